"""The feed-forward block, its inner features cut over the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megalite.model.module import MegaliteModule, Placement, TransformerConfig, factory_arguments
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(MegaliteModule):
    """linear_fc2(gelu(linear_fc1(x))) with the exact GELU; [S (/ tp), B, H] in and out."""

    extra_state_of = ("linear_fc1", "linear_fc2")

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        common = factory_arguments(config, placement) | {"sequence_parallel": config.sequence_parallel}
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, config.ffn_hidden_size, init_std=config.init_method_std, **common
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, init_std=config.output_init_std, **common
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))
