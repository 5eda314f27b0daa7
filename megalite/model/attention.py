"""Causal self-attention, its heads cut over the tensor-parallel group.

Legend: S sequence, B batch, H hidden, N local query heads, G local groups (key and value heads), D head size.
"""

from __future__ import annotations

import torch

from megalite.model.module import MegaliteModule, Placement, TransformerConfig, factory_arguments
from megalite.model.norms import build_norm
from megalite.model.rotary import RotaryEmbedding
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mappings import gather_partial_from_tensor_region
from megalite.parallel.random import DropoutContext
from megalite.parallel.recompute import recompute


class SelfAttention(MegaliteModule):
    """Attention over this rank's heads; [S (/ tp), B, H] in and out."""

    extra_state_of = ("linear_proj", "linear_qkv")

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.dropout = placement.dropout
        tp = placement.parallel.tp
        self.num_heads = config.num_attention_heads // tp.size
        width = config.num_attention_heads * config.kv_channels
        common = factory_arguments(config, placement) | {"sequence_parallel": config.sequence_parallel}
        # Registered before linear_qkv, as Megatron does: the order of registration is the order in gradient buffers.
        self.linear_proj = RowParallelLinear(
            width, config.hidden_size, init_std=config.output_init_std, bias=config.add_bias_linear, **common
        )
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            config.qkv_width,
            init_std=config.init_method_std,
            bias=config.add_bias_linear or config.add_qkv_bias,
            **common,
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            # Each rank's heads add to the gradient, with and without sequence parallelism.
            self.q_layernorm = build_norm(config, placement, config.kv_channels, sums_over_tp=True)
            self.k_layernorm = build_norm(config, placement, config.kv_channels, sums_over_tp=True)
        self.rotary = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(config.kv_channels, config.rotary_percent, config.rotary_base)

    def forward(
        self, x: torch.Tensor, context: DropoutContext, document_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        q_SBND, k_SBGD, v_SBGD = self._project(x)
        if self.q_layernorm is not None:
            q_SBND, k_SBGD = self.q_layernorm(q_SBND), self.k_layernorm(k_SBGD)
        if self.rotary is not None:
            q_SBND, k_SBGD = self.rotary(q_SBND), self.rotary(k_SBGD)
        rate = self.config.attention_dropout if self.training else 0.0
        site = context.at("attention", head_offset=self.parallel.tp.rank * self.num_heads)

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads_first = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
            o_BNSD = self.dropout.attention(*heads_first, rate, site, document_ids)
            return o_BNSD.permute(2, 0, 1, 3).reshape(q.shape[0], q.shape[1], -1)

        if self.config.recompute_granularity == "selective" and self.training:
            return self.linear_proj(recompute(core, self.dropout.tracker, q_SBND, k_SBGD, v_SBGD))
        return self.linear_proj(core(q_SBND, k_SBGD, v_SBGD))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [S, B, N, D] and the keys and values [S, B, G, D] that they need."""
        config, tp = self.config, self.parallel.tp
        rows = self.linear_qkv(x)
        groups_here = config.num_query_groups // tp.size
        if groups_here == 0:
            # More ranks than groups: a group's rows lie on several ranks, which all need its key and value.
            rows = gather_partial_from_tensor_region(rows, tp)
            groups_here = config.num_query_groups
        S, B, _ = rows.shape
        D = config.kv_channels
        heads_per_group = config.num_attention_heads // config.num_query_groups
        # Rows are grouped as [query heads | key | value] of one group, D rows each, so that a cut keeps heads whole.
        grouped = rows.view(S, B, groups_here, heads_per_group + 2, D)
        q = grouped[:, :, :, :heads_per_group].reshape(S, B, -1, D)
        k, v = grouped[:, :, :, -2], grouped[:, :, :, -1]
        if config.num_query_groups < tp.size:
            first = tp.rank * self.num_heads
            group = first // heads_per_group
            q = q[:, :, first : first + self.num_heads]
            k, v = k[:, :, group : group + 1], v[:, :, group : group + 1]
        return q, k, v
