"""The transformer layers of one chunk of the model.

Legend: S sequence, B batch, H hidden; activations are [S, B, H], or [S / tp, B, H] with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megalite.model.attention import SelfAttention
from megalite.model.mlp import MLP
from megalite.model.module import (
    LayerAxis,
    MegaliteModule,
    ModelChunk,
    Placement,
    ShardedLeaf,
    TransformerConfig,
    sharded_parameter,
)
from megalite.model.norms import build_norm
from megalite.parallel.random import DropoutContext
from megalite.parallel.recompute import recompute

# The norms in front of a linear layer have the names of Megatron's fused modules on disk, fused or not.
ON_DISK_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}


class TransformerLayer(MegaliteModule):
    """x + dropout(attention(norm(x))), then the same with the feed-forward block."""

    def __init__(self, config: TransformerConfig, placement: Placement, number: int) -> None:
        """``number`` is the global number of the layer, from 1."""
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.dropout = placement.dropout
        self.number = number
        partial = config.sequence_parallel
        self.input_layernorm = build_norm(config, placement, config.hidden_size, partial)
        self.self_attention = SelfAttention(config, placement)
        self.pre_mlp_layernorm = build_norm(config, placement, config.hidden_size, partial)
        self.mlp = MLP(config, placement)

    def on_disk_name(self, name: str) -> str:
        return ON_DISK_NAMES.get(name, name)

    def forward(
        self, x: torch.Tensor, context: DropoutContext, document_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        context = context.in_layer(self.number)
        attended = self.self_attention(self.input_layernorm(x), context, document_ids)
        x = x + self._drop(attended, context, "self_attention")
        return x + self._drop(self.mlp(self.pre_mlp_layernorm(x)), context, "mlp")

    def _drop(self, x: torch.Tensor, context: DropoutContext, site: str) -> torch.Tensor:
        is_local = self.config.sequence_parallel
        offset = self.parallel.tp.rank * x.shape[0] if is_local else 0
        rate = self.config.hidden_dropout if self.training else 0.0
        return self.dropout.hidden(x, rate, context.at(site, position_offset=offset), is_local)


class TransformerBlock(MegaliteModule):
    """The layers of one chunk, named by their global number, and the final norm at the end of the model."""

    def __init__(self, config: TransformerConfig, placement: Placement, chunk: ModelChunk) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.tracker = placement.dropout.tracker
        numbers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        self.layers = nn.ModuleDict({str(i): TransformerLayer(config, placement, i + 1) for i in numbers})
        self.final_layernorm = (
            build_norm(config, placement, config.hidden_size, config.sequence_parallel) if chunk.is_last else None
        )

    def forward(
        self, x: torch.Tensor, context: DropoutContext, document_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        layers = list(self.layers.values())
        for size, is_recomputed in self._runs(len(layers)):
            run, layers = layers[:size], layers[size:]
            if is_recomputed:
                x = recompute(_run_layers, self.tracker, run, x, context, document_ids)
            else:
                x = _run_layers(run, x, context, document_ids)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _runs(self, num_layers: int) -> list[tuple[int, bool]]:
        """Return (layers, recomputed as a whole): "uniform" in equal runs, "block" only the first layers, singly."""
        config = self.config
        if config.recompute_granularity != "full" or not self.training:
            return [(num_layers, False)]
        size = config.recompute_num_layers
        if config.recompute_method == "uniform":
            return [(min(size, num_layers - start), True) for start in range(0, num_layers, size)]
        return [(1, True)] * min(size, num_layers) + [(max(0, num_layers - size), False)]

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedLeaf]:
        state: dict[str, ShardedLeaf] = {}
        for number, child in self.layers.items():
            place = (int(number), self.config.num_layers)
            state.update(child.sharded_state_dict(f"{name}layers.{number}.", f"{key}layers.", place))
        if self.final_layernorm is not None:
            for own, parameter in self.final_layernorm.named_parameters():
                path = f"final_layernorm.{own}"
                state[name + path] = sharded_parameter(parameter, key + path, self.parallel)
        return state


def _run_layers(
    layers: Sequence[nn.Module], x: torch.Tensor, context: DropoutContext, document_ids: torch.Tensor | None
) -> torch.Tensor:
    for layer in layers:
        x = layer(x, context, document_ids)
    return x
