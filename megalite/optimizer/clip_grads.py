"""The norm of all gradients, independent of how they are cut over ranks, to the last bit.

Every 64 consecutive elements of a gradient buffer form a row that no shard boundary crosses. A row's sum of squares is
taken in float64 by a fixed tree of additions. The rows are then added without rounding error: each is split into
three parts on fixed grids of powers of two, so coarse that sums over up to 2^32 rows are exact in float64, in any order
(the idea of reproducible summation: Demmel and Nguyen, "Parallel Reproducible Summation", 2015). What is cut off is
below 2^-64 of the largest row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megalite.parallel.buffers import ROW
from megalite.utils.dist import Group

_CHUNK_ROWS = 512
_FOLDS = 3
# A grid 2^(e - 21) for values up to 2^e: 2^32 of them sum to at most 2^53 grid units, which float64 holds exactly.
_FIRST_GRID = 21
_NEXT_GRID = 22


def row_sums_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Return the float64 sum of squares of each 64 elements of a 1-D tensor whose length is a multiple of 64."""
    rows = flat.view(-1, ROW)
    sums = torch.empty(rows.shape[0], dtype=torch.float64, device=flat.device)
    # One small buffer that stays in the cache: five times as fast as new tensors of the whole size.
    buffer = torch.empty(min(_CHUNK_ROWS, rows.shape[0]), ROW, dtype=torch.float64, device=flat.device)
    for part, result in zip(rows.split(_CHUNK_ROWS), sums.split(_CHUNK_ROWS), strict=True):
        squares = buffer[: part.shape[0]].copy_(part)
        squares.mul_(squares)
        width = ROW // 2
        # Halving by elementwise additions: the order is fixed, whereas a reduction kernel may choose it by shape.
        while width:
            squares[:, :width].add_(squares[:, width : 2 * width])
            width //= 2
        result.copy_(squares[:, 0])
    return sums


def exact_sum(values: Sequence[torch.Tensor], group: Group, device: torch.device) -> float:
    """Return the sum of non-negative float64 ``values`` over all ranks, the same bits for any cut over ranks.

    Collective over ``group``. Infinite if any value is NaN or infinite.
    """
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for part in values:
        if part.numel():
            # torch.maximum hands NaN on; a MAX all-reduce need not, so NaN travels as infinity.
            largest = torch.maximum(largest, part.max())
    largest = torch.nan_to_num(largest, nan=math.inf, posinf=math.inf)
    top = group.all_reduce(largest, dist.ReduceOp.MAX).item()
    if top == 0.0 or not math.isfinite(top):
        return top
    exponent = max(math.frexp(top)[1], -900)
    totals = torch.zeros(_FOLDS, dtype=torch.float64, device=device)
    for part in values:
        rest = part
        for fold in range(_FOLDS):
            grid = 2.0 ** (exponent - _FIRST_GRID - fold * _NEXT_GRID)
            # Adding and subtracting 1.5 * 2^52 grid units rounds to the grid.
            on_grid = (rest + 1.5 * 2.0**52 * grid) - 1.5 * 2.0**52 * grid
            totals[fold] += on_grid.sum()
            rest = rest - on_grid
    return math.fsum(group.all_reduce(totals).tolist())


def gradient_norm(segments: Sequence[torch.Tensor], group: Group, device: torch.device) -> float:
    """Return the l2 norm of the ``segments`` of all ranks, each a whole number of rows. Collective over ``group``."""
    return math.sqrt(exact_sum([row_sums_of_squares(segment) for segment in segments], group, device))


def clip_coefficient(norm: float, max_norm: float) -> float | None:
    """Return the factor that brings ``norm`` down to ``max_norm``, or None if there is nothing to do."""
    if max_norm <= 0.0:
        return None
    factor = max_norm / (norm + 1.0e-6)
    return factor if factor < 1.0 else None
