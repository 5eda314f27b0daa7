"""Needed byte ranges against marking every element."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megalite.dist_checkpointing.strategies.ranges import READ_THROUGH, needed_ranges, runs_of


def _marked(source: tuple[int, ...], sizes: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> np.ndarray:
    mask = np.zeros(chunk, dtype=bool)
    mask[tuple(slice(first, first + size) for first, size in zip(source, sizes, strict=True))] = True
    return np.repeat(mask.reshape(-1), itemsize)


@pytest.mark.parametrize("seed", range(60))
def test_runs_and_ranges_are_the_marked_bytes(seed: int) -> None:
    rng = random.Random(seed)
    chunk = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    itemsize = rng.choice([1, 2, 4])
    length = math.prod(chunk) * itemsize
    wanted, runs = np.zeros(length, dtype=bool), []
    for _ in range(rng.randint(1, 3)):
        sizes = tuple(rng.randint(1, size) for size in chunk)
        source = tuple(rng.randint(0, size - own) for size, own in zip(chunk, sizes, strict=True))
        marked = _marked(source, sizes, chunk, itemsize)
        own = runs_of(source, sizes, chunk, itemsize)
        again = np.zeros(length, dtype=bool)
        for first, end in own.tolist():
            assert not again[first:end].any()
            again[first:end] = True
        assert (again == marked).all() and (np.diff(own[:, 0]) > 0).all()
        assert len(own) == 1 or (own[1:, 0] > own[:-1, 1]).all(), "runs that touch are one"
        wanted |= marked
        runs.append(own)
    through = rng.choice([1, 2, 5, 100])
    ranges = needed_ranges(runs, through)
    read = np.zeros(length, dtype=bool)
    for first, end in ranges:
        read[first:end] = True
    assert (read | ~wanted).all(), "something needed is not read"
    assert all(later[0] - earlier[1] >= through for earlier, later in zip(ranges, ranges[1:], strict=False))
    gaps = "".join("x" if needed else "." for needed in wanted).strip(".").split("x")
    extra = sum(len(gap) for gap in gaps if len(gap) < through)
    assert read.sum() == wanted.sum() + extra


def test_what_is_read_beyond_the_need() -> None:
    rows = runs_of((0, 0), (1000, 2 * READ_THROUGH), (1000, 4 * READ_THROUGH), 1)
    assert sum(b - a for a, b in needed_ranges([rows])) == 2000 * READ_THROUGH, "wide columns stay apart"
    assert needed_ranges([runs_of((0, 0), (1000, 10), (1000, 20), 1)]) == [(0, 19990)], "narrow ones do not"
    assert needed_ranges([runs_of((5,), (90,), (100,), 1)]) == [(5, 95)]
    assert needed_ranges([runs_of((0, 3), (0, 2), (4, 5), 4)]) == []
