"""The transformer layers of one pipeline stage.

Legend: S sequence, B batch, H hidden; activations are [S, B, H], or [S / tp, B, H] with sequence parallelism.
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.model.attention import SelfAttention
from megalite.model.mlp import MLP
from megalite.model.module import LayerAxis, MegaliteModule, Placement, TransformerConfig, sharded_parameter
from megalite.parallel.layers import ParameterTraits, mark
from megalite.parallel.random import DropoutContext

# The norms in front of a linear layer have the names of Megatron's fused modules on disk, fused or not.
ON_DISK_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}


def build_norm(config: TransformerConfig, placement: Placement) -> nn.LayerNorm:
    """Return a LayerNorm whose parameters know whether they see a part of the sequence only."""
    norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype, device=placement.device)
    for parameter in (norm.weight, norm.bias):
        mark(parameter, ParameterTraits(sequence_parallel=config.sequence_parallel))
    return norm


class TransformerLayer(MegaliteModule):
    """x + dropout(attention(norm(x))), then the same with the feed-forward block."""

    def __init__(self, config: TransformerConfig, placement: Placement, number: int) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.dropout = placement.dropout
        self.number = number
        self.input_layernorm = build_norm(config, placement)
        self.self_attention = SelfAttention(config, placement)
        self.pre_mlp_layernorm = build_norm(config, placement)
        self.mlp = MLP(config, placement)

    def on_disk_name(self, name: str) -> str:
        return ON_DISK_NAMES.get(name, name)

    def forward(self, x: torch.Tensor, context: DropoutContext) -> torch.Tensor:
        context = context.in_layer(self.number)
        x = x + self._drop(self.self_attention(self.input_layernorm(x), context), context, "self_attention")
        return x + self._drop(self.mlp(self.pre_mlp_layernorm(x)), context, "mlp")

    def _drop(self, x: torch.Tensor, context: DropoutContext, site: str) -> torch.Tensor:
        is_local = self.config.sequence_parallel
        offset = self.parallel.tp.rank * x.shape[0] if is_local else 0
        rate = self.config.hidden_dropout if self.training else 0.0
        return self.dropout.hidden(x, rate, context.at(site, position_offset=offset), is_local)


class TransformerBlock(MegaliteModule):
    """The layers of one stage, and the final norm on the last stage."""

    def __init__(self, config: TransformerConfig, placement: Placement, first_layer: int, num_layers: int) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.first_layer = first_layer
        self.layers = nn.ModuleList(TransformerLayer(config, placement, first_layer + i + 1) for i in range(num_layers))
        self.final_layernorm = build_norm(config, placement) if placement.parallel.pp.is_last else None

    def forward(self, x: torch.Tensor, context: DropoutContext) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, context)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedTensor | ShardedObject]:
        state: dict[str, ShardedTensor | ShardedObject] = {}
        for i, child in enumerate(self.layers):
            place = (self.first_layer + i, self.config.num_layers)
            state.update(child.sharded_state_dict(f"{name}layers.{i}.", f"{key}layers.", place))
        if self.final_layernorm is not None:
            for own, parameter in self.final_layernorm.named_parameters():
                path = f"final_layernorm.{own}"
                state[name + path] = sharded_parameter(parameter, key + path, self.parallel)
        return state
