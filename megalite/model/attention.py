"""Causal self-attention, its heads cut over the tensor-parallel group.

Legend: S sequence, B batch, H hidden, N local heads, D head size.
"""

from __future__ import annotations

import torch

from megalite.model.module import MegaliteModule, Placement, TransformerConfig, factory_arguments
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.random import DropoutContext


class SelfAttention(MegaliteModule):
    """Attention over this rank's heads; [S (/ tp), B, H] in and out."""

    extra_state_of = ("linear_proj", "linear_qkv")

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.dropout = placement.dropout
        self.num_heads = config.num_attention_heads // placement.parallel.tp.size
        width = config.num_attention_heads * config.kv_channels
        common = factory_arguments(config, placement) | {"sequence_parallel": config.sequence_parallel}
        # Registered before linear_qkv, as Megatron does: the order of registration is the order in gradient buffers.
        self.linear_proj = RowParallelLinear(width, config.hidden_size, init_std=config.output_init_std, **common)
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, 3 * width, init_std=config.init_method_std, **common)

    def forward(self, x: torch.Tensor, context: DropoutContext) -> torch.Tensor:
        # Rows of linear_qkv are grouped per head, [q | k | v] of D rows each, so that a cut over tp keeps heads whole.
        qkv = self.linear_qkv(x)
        S, B, _ = qkv.shape
        q_BNSD, k_BNSD, v_BNSD = qkv.view(S, B, self.num_heads, 3, self.config.kv_channels).permute(3, 1, 2, 0, 4)
        rate = self.config.attention_dropout if self.training else 0.0
        site = context.at("attention", head_offset=self.parallel.tp.rank * self.num_heads)
        o_BNSD = self.dropout.attention(q_BNSD, k_BNSD, v_BNSD, rate, site)
        return self.linear_proj(o_BNSD.permute(2, 0, 1, 3).reshape(S, B, -1))
