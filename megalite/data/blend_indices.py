"""Which source of a blend gives each sample, equal to Megatron's choice for equal weights and sizes.

Sample s comes from the source that lags most behind its share: the largest ``weight * max(s, 1) - taken`` in double
precision, the first of equal ones. The choice needs the counts of all choices before, so that it is a walk of N steps.

Here stretches of the walk, lanes, are walked side by side, each from counts that are guessed. Walks with slightly
different counts at one position soon meet, so that most lanes end right however they began. Then every lane that did
not begin with the counts the lane before it ended with is walked again from those, until there is none. What remains
is one chain of steps from the true start, whatever the guesses were: they decide the time, not the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_SOURCES = 32766
"""Sources are numbered in int16."""

# Long lanes meet the true walk more surely, many lanes make better use of an array operation. The temporaries of a
# block are ten bytes a sample, and a state of all lanes should stay in the cache of a core.
_BLOCK = 1 << 22
_MAX_LANES = 1024
_MAX_CELLS = 1 << 17
_MIN_STEPS = 64


@dataclass(frozen=True)
class BlendIndices:
    """For each of N samples: its source, int16, and which sample of that source it is, int64."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray


def normalize(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in double precision."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def build_blending_indices(weights: Sequence[float], size: int) -> BlendIndices:
    """Return ``size`` samples from sources with these normalised weights, all above 0."""
    return _walk(_Walker(np.array(weights, dtype=np.float64)), size)


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> BlendIndices:
    """Return all samples of all sources, mixed evenly; a source that is used up is chosen no more."""
    counts = np.array(sizes, dtype=np.int64)
    total = int(counts.sum())
    return _walk(_Walker(counts / float(total), limits=counts.astype(np.float64)), total)


def count_draws(indices: BlendIndices, num_sources: int) -> list[int]:
    """Return how many samples each source gives."""
    draws = np.zeros(num_sources, dtype=np.int64)
    for start in range(0, len(indices.dataset_index), _BLOCK):
        draws += np.bincount(indices.dataset_index[start : start + _BLOCK], minlength=num_sources)
    return draws.tolist()


class _Walker:
    """Takes steps in several lanes at once. Legend: L lanes, D sources; counts are doubles, exact below 2**53."""

    def __init__(self, weights: np.ndarray, limits: np.ndarray | None = None) -> None:
        self.weights, self.limits = weights, limits
        self._heavy = np.flatnonzero(weights >= weights.max() / 4)

    def guess(self, positions: np.ndarray, at_least: np.ndarray) -> np.ndarray:
        """Return counts [L, D] that add up to ``positions`` [L] and are not below ``at_least`` [D].

        Rather too few of a light source than too many: what lags is taken at once, what is ahead waits long. Heavy
        sources get the rest, as they are never far from their next turn.
        """
        taken = np.maximum(np.floor(positions[:, None] * self.weights), at_least)
        rest = positions - taken.sum(axis=1)
        shares = np.cumsum(self.weights[self._heavy])
        edges = np.rint(rest[:, None] * (shares / shares[-1]))
        taken[:, self._heavy] += np.diff(edges, axis=1, prepend=0.0)
        return taken

    def advance(self, positions: np.ndarray, taken: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Walk ``steps`` from ``positions`` [L] and change ``taken`` [L, D]; return sources and places [steps, L]."""
        lanes, num_sources = taken.shape
        counts = taken.reshape(-1)
        rows = np.arange(lanes) * num_sources
        sources = np.empty((steps, lanes), dtype=np.int16)
        places = np.empty((steps, lanes), dtype=np.int64)
        position = positions[:, None].copy()
        lag = np.empty_like(taken)
        for step in range(steps):
            np.multiply(np.maximum(position, 1.0), self.weights, out=lag)
            np.subtract(lag, taken, out=lag)
            if self.limits is not None:
                lag[taken >= self.limits] = -np.inf
            # Of equal lags argmax gives the first.
            chosen = lag.argmax(axis=1)
            at = rows + chosen
            sources[step] = chosen
            places[step] = counts[at]
            counts[at] += 1.0
            position += 1.0
        return sources, places


def _walk(walker: _Walker, size: int) -> BlendIndices:
    num_sources = len(walker.weights)
    dataset_index = np.empty(size, dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    taken = np.zeros(num_sources, dtype=np.float64)
    for start in range(0, size, _BLOCK):
        count = min(_BLOCK, size - start)
        lanes = max(1, min(_MAX_LANES, _MAX_CELLS // num_sources, count // _MIN_STEPS))
        steps = -(-count // lanes)
        sources, places = _walk_block(walker, start, taken, -(-count // steps), steps)
        # Lane after lane; the last one may have gone beyond the block.
        dataset_index[start : start + count] = sources.T.reshape(-1)[:count]
        dataset_sample_index[start : start + count] = places.T.reshape(-1)[:count]
        taken += np.bincount(dataset_index[start : start + count], minlength=num_sources)
    return BlendIndices(dataset_index, dataset_sample_index)


def _walk_block(
    walker: _Walker, start: int, taken: np.ndarray, lanes: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Walk ``lanes`` lanes of ``steps`` each from the true counts ``taken`` [D] at ``start``."""
    sources = np.empty((steps, lanes), dtype=np.int16)
    places = np.empty((steps, lanes), dtype=np.int64)
    positions = start + steps * np.arange(lanes, dtype=np.float64)
    begin = np.tile(taken, (lanes, 1))
    end = np.empty_like(begin)

    def walk(chosen: np.ndarray) -> None:
        state = begin[chosen]
        sources[:, chosen], places[:, chosen] = walker.advance(positions[chosen], state, steps)
        end[chosen] = state

    walk(np.array([0]))
    if lanes == 1:
        return sources, places
    # A run-up lets most lanes meet the true walk before they begin.
    run_up = steps // 4
    early = positions[1:] - run_up
    begin[1:] = walker.guess(early, at_least=end[0])
    walker.advance(early, begin[1:], run_up)
    begin[1] = end[0]
    pending = np.arange(1, lanes)
    while len(pending):
        walk(pending)
        pending = 1 + np.flatnonzero((end[:-1] != begin[1:]).any(axis=1))
        begin[pending] = end[pending - 1]
    return sources, places
