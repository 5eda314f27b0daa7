"""The tables of a blend against the walk that defines them, one sample after the other."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megalite.data import blend_indices
from megalite.data.blend_indices import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    count_draws,
    normalize,
)


def reference(weights, size, limits=None):
    """The definition: the source that lags most, the first of equal ones."""
    taken = [0] * len(weights)
    sources, places = [], []
    for sample in range(size):
        best, most = -1, -float("inf")
        for source, weight in enumerate(weights):
            if limits is not None and taken[source] == limits[source]:
                continue
            lag = weight * max(float(sample), 1.0) - taken[source]
            if lag > most:
                best, most = source, lag
        sources.append(best)
        places.append(taken[best])
        taken[best] += 1
    return sources, places


def equal(indices, expected):
    return (indices.dataset_index.tolist(), indices.dataset_sample_index.tolist()) == expected


@pytest.fixture(params=["as it is", "small pieces"])
def pieces(request, monkeypatch):
    """With small pieces a few thousand samples have several blocks of several lanes."""
    if request.param == "small pieces":
        monkeypatch.setattr(blend_indices, "_BLOCK", 700)
        monkeypatch.setattr(blend_indices, "_MIN_STEPS", 8)
        monkeypatch.setattr(blend_indices, "_MAX_CELLS", 60)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
def test_blends_equal_the_walk(pieces, spread):
    random = np.random.RandomState(int(10 * spread))
    for _ in range(8):
        weights = normalize(10.0 ** -random.uniform(0, spread, random.randint(1, 14)))
        size = int(random.randint(1, 3000))
        indices = build_blending_indices(weights, size)
        assert equal(indices, reference(weights, size))
        assert (indices.dataset_index.dtype, indices.dataset_sample_index.dtype) == (np.int16, np.int64)
        assert count_draws(indices, len(weights)) == np.bincount(indices.dataset_index, minlength=len(weights)).tolist()


def test_exhaustive_blends_equal_the_walk_and_use_up_all(pieces):
    random = np.random.RandomState(5)
    for _ in range(12):
        sizes = random.randint(1, random.choice([3, 40, 600]), random.randint(1, 9)).tolist()
        total = sum(sizes)
        indices = build_exhaustive_blending_indices(sizes)
        assert equal(indices, reference([size / total for size in sizes], total, sizes))
        assert count_draws(indices, len(sizes)) == sizes


def test_equal_lags_go_to_the_first():
    assert build_blending_indices([0.25] * 4, 8).dataset_index.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_normalized_weights_are_divided_by_their_sum():
    assert normalize([1, 3]) == [0.25, 0.75]
    assert normalize([0.1] * 3) == (np.array([0.1] * 3) / np.sum([0.1] * 3)).tolist()


def test_wrong_guesses_cost_time_only(monkeypatch):
    real = blend_indices._Walker.guess
    monkeypatch.setattr(blend_indices, "_MIN_STEPS", 8)
    monkeypatch.setattr(blend_indices._Walker, "guess", lambda self, *a, **k: real(self, *a, **k)[:, ::-1].copy())
    weights = normalize([5, 3, 1e-3])
    assert equal(build_blending_indices(weights, 2000), reference(weights, 2000))


def test_a_million_samples_take_a_moment():
    started = time.monotonic()
    build_blending_indices(normalize([0.5, 0.3, 0.15, 0.05]), 1_000_000)
    # Step by step it takes ten times as long; the bound leaves room for a machine that is busy.
    assert time.monotonic() - started < 6.0
