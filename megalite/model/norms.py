"""LayerNorm and RMSNorm whose parameters know whether their gradient is a partial sum."""

from __future__ import annotations

from torch import nn

from megalite.model.module import Placement, TransformerConfig
from megalite.parallel.layers import ParameterTraits, mark


def build_norm(config: TransformerConfig, placement: Placement, size: int, sums_over_tp: bool) -> nn.Module:
    """Return a norm over the last ``size`` elements; ``sums_over_tp`` says that each rank sees a part of the rows."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm = kind(size, eps=config.norm_epsilon, dtype=config.dtype, device=placement.device)
    for parameter in norm.parameters():
        mark(parameter, ParameterTraits(sums_over_tp=sums_over_tp))
    return norm
