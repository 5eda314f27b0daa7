"""Which bytes of a stored chunk are needed: pure arithmetic, no file.

A rectangle of a row-major chunk is a number of equally long runs. The rule of reading: runs that are less than 16 KiB
apart are read as one, since a further call costs more than the bytes between them, and a chunk of which at least 95 %
is needed is read whole, since then its checksum can be compared; everything else is left on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from megalite.dist_checkpointing.mapping import Shape

READ_THROUGH = 16 << 10
"""Bytes between two runs below which they are read as one."""
_NEARLY_WHOLE = 0.95

Range = tuple[int, int]
"""[first, end) in bytes."""


def runs_of(source: Shape, sizes: Shape, chunk: Shape, itemsize: int) -> np.ndarray:
    """Return [n, 2]: the byte ranges of rectangle (``source``, ``sizes``) in a row-major ``chunk``, ascending."""
    if not math.prod(sizes):
        return np.zeros((0, 2), dtype=np.int64)
    if sizes == chunk:
        return np.array([[0, math.prod(chunk) * itemsize]], dtype=np.int64)
    strides = [math.prod(chunk[axis + 1 :]) for axis in range(len(chunk))]
    # Behind the innermost axis that is cut, elements lie side by side.
    cut = max((axis for axis in range(len(chunk)) if sizes[axis] != chunk[axis]), default=-1)
    length = sizes[cut] * strides[cut] if cut >= 0 else math.prod(chunk)
    starts = np.array([source[cut] * strides[cut] if cut >= 0 else 0], dtype=np.int64)
    for axis in reversed(range(max(cut, 0))):
        steps = (source[axis] + np.arange(sizes[axis], dtype=np.int64)) * strides[axis]
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
    return np.stack([starts, starts + length], axis=1) * itemsize


def needed_ranges(runs: Iterable[np.ndarray], length: int, through: int = READ_THROUGH) -> list[Range]:
    """Return what to read of a chunk of ``length`` bytes, ascending and apart; one range is all of it if nearly all
    is needed."""
    merged = np.concatenate(list(runs))
    if not len(merged):
        return []
    if len(merged) == 1 and int(merged[0, 1] - merged[0, 0]) == length:
        return [(0, length)]
    merged = merged[np.argsort(merged[:, 0], kind="stable")]
    reach = np.maximum.accumulate(merged[:, 1])
    begins = np.concatenate(([True], merged[1:, 0] >= reach[:-1] + through))
    ends = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(merged) - 1]))
    ranges = list(zip(merged[begins, 0].tolist(), reach[ends].tolist(), strict=True))
    if sum(end - first for first, end in ranges) >= _NEARLY_WHOLE * length:
        return [(0, length)]
    return ranges
