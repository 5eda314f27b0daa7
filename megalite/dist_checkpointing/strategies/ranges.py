"""Which bytes of a stored chunk are needed: pure arithmetic, no file.

A rectangle of a row-major chunk is a number of equally long runs. Runs that are less than 16 KiB apart are read as one,
since a further call costs more than the bytes between them; the rest is left on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from megalite.dist_checkpointing.mapping import Shape

READ_THROUGH = 16 << 10
"""Bytes between two runs below which they are read as one."""

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
    cut = max(axis for axis in range(len(chunk)) if sizes[axis] != chunk[axis])
    starts = np.array([source[cut] * strides[cut]], dtype=np.int64)
    for axis in reversed(range(cut)):
        steps = (source[axis] + np.arange(sizes[axis], dtype=np.int64)) * strides[axis]
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
    return np.stack([starts, starts + sizes[cut] * strides[cut]], axis=1) * itemsize


def needed_ranges(runs: Iterable[np.ndarray], through: int = READ_THROUGH) -> list[Range]:
    """Return what to read for these runs, ascending and apart."""
    merged = np.concatenate(list(runs))
    if len(merged) < 2:
        return [(first, end) for first, end in merged.tolist()]
    merged = merged[np.argsort(merged[:, 0], kind="stable")]
    reach = np.maximum.accumulate(merged[:, 1])
    begins = np.concatenate(([True], merged[1:, 0] >= reach[:-1] + through))
    ends = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(merged) - 1]))
    return list(zip(merged[begins, 0].tolist(), reach[ends].tolist(), strict=True))
