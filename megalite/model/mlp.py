"""The feed-forward block, its inner features cut over the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megalite.model.module import MegaliteModule, Placement, TransformerConfig, factory_arguments
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(MegaliteModule):
    """linear_fc2(activation(linear_fc1(x))); [S (/ tp), B, H] in and out.

    The activation is the exact GELU, or SwiGLU: silu(gate) * up, where linear_fc1 has the rows of gate above those of
    up and each is cut by itself.
    """

    extra_state_of = ("linear_fc1", "linear_fc2")

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.is_gated = config.swiglu
        blocks = 2 if config.swiglu else 1
        common = factory_arguments(config, placement) | {
            "sequence_parallel": config.sequence_parallel,
            "bias": config.add_bias_linear,
        }
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * config.ffn_hidden_size,
            init_std=config.init_method_std,
            blocks=blocks,
            **common,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, init_std=config.output_init_std, **common
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.linear_fc1(x)
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.linear_fc2(F.silu(gate) * up)
        return self.linear_fc2(F.gelu(inner))
