"""Checks that need all ranks' declarations: every element written exactly once, keys and shapes as asked.

The checks are pure: they get plans and return or raise; exchanging is the caller's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor, parse_unique_key
from megalite.dist_checkpointing.strategies.base import CheckpointIndex, GlobalSavePlan
from megalite.utils.errors import CheckpointError, SaveError

_SHOWN_NAMES = 20


def check_exactly_once(plan: GlobalSavePlan) -> None:
    """Raise SaveError when an element of a global tensor or a cell of an object grid is written not once."""
    pair = find_overlap(plan.key_of_chunk, plan.offsets, plan.sizes)
    if pair is not None:
        first, second = (_shown_chunk(plan, chunk) for chunk in pair)
        raise SaveError(
            f"{plan.keys[plan.key_of_chunk[pair[0]]]}: the blocks {first} and {second} overlap; only one rank may "
            "write an element, set replica_id of the other copies"
        )
    written = np.zeros(len(plan.keys), dtype=np.int64)
    np.add.at(written, plan.key_of_chunk, plan.sizes.prod(axis=1, dtype=np.int64))
    for key, (name, shape, count) in enumerate(zip(plan.keys, plan.shapes, written.tolist(), strict=True)):
        if count != math.prod(shape):
            chunks = plan.key_of_chunk == key
            offset, sizes = find_hole(shape, plan.offsets[chunks], plan.sizes[chunks])
            raise SaveError(
                f"{name}: {count} of {math.prod(shape)} elements of global shape {shape} are written, block {sizes} at "
                f"{offset} by nobody; every block needs one copy with replica_id 0"
            )
    _check_objects(plan)


def _shown_chunk(plan: GlobalSavePlan, chunk: int) -> str:
    axes = len(plan.shapes[plan.key_of_chunk[chunk]])
    offset, sizes = tuple(plan.offsets[chunk][:axes].tolist()), tuple(plan.sizes[chunk][:axes].tolist())
    return f"{sizes} at {offset} of {plan.files[plan.file_of_chunk[chunk]]}"


def _check_objects(plan: GlobalSavePlan) -> None:
    cells: dict[tuple[str, Shape], dict[Shape, str]] = defaultdict(dict)
    for unique_key, file, _, _ in plan.objects:
        key, offset, shape = parse_unique_key(unique_key)
        other = cells[key, shape].setdefault(offset, file)
        if other is not file:
            raise SaveError(f"object {unique_key} is in both {other} and {file}; set replica_id of the other copies")
    for (key, shape), found in cells.items():
        if len(found) != math.prod(shape):
            raise SaveError(
                f"object {key}: {len(found)} of the {math.prod(shape)} cells of its grid {shape} are written; every "
                "cell needs one copy with replica_id 0"
            )


def find_overlap(groups: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> tuple[int, int] | None:
    """Return two overlapping rectangles of the same group, or None. ``offsets`` and ``sizes`` are [n, axes].

    Rectangles are split along one axis after the other into runs that touch no other run, until nothing splits any
    more; regular grids and blocks of flat ranges end as single rectangles, only what is left is compared in pairs.
    """
    alive = np.flatnonzero(sizes.prod(axis=1, dtype=np.int64) > 0)
    runs = groups[alive]
    while True:
        runs = _numbered(runs)
        shared = np.bincount(runs)[runs] > 1
        alive, runs = alive[shared], _numbered(runs[shared])
        if not len(alive):
            return None
        before = runs.max() + 1
        for axis in range(offsets.shape[1]):
            runs = _split_runs(runs, offsets[alive, axis], sizes[alive, axis])
        if runs.max() + 1 == before:
            return _overlap_in_pairs(alive, runs, offsets, sizes)


def _numbered(runs: np.ndarray) -> np.ndarray:
    """Return the run numbers without gaps, from 0."""
    return np.unique(runs, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _split_runs(runs: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return finer run numbers: intervals of a run that are connected by overlap keep together."""
    ends = starts + lengths
    # Runs are laid side by side on one line, so that one sort serves all of them.
    base = runs * (int(ends.max()) + 1)
    order = np.argsort(base + starts, kind="stable")
    reach = np.maximum.accumulate((base + ends)[order])
    begins = np.concatenate(([True], (base + starts)[order][1:] >= reach[:-1]))
    finer = np.empty_like(runs)
    finer[order] = np.cumsum(begins) - 1
    return finer


def _overlap_in_pairs(
    alive: np.ndarray, runs: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> tuple[int, int] | None:
    for run in np.unique(runs):
        members = alive[runs == run]
        low, high = offsets[members], offsets[members] + sizes[members]
        for position in range(len(members) - 1):
            meets = (low[position] < high[position + 1 :]) & (low[position + 1 :] < high[position])
            found = np.flatnonzero(meets.all(axis=1))
            if len(found):
                return int(members[position]), int(members[position + 1 + found[0]])
    return None


def find_hole(shape: Shape, offsets: np.ndarray, sizes: np.ndarray) -> tuple[Shape, Shape]:
    """Return (offset, sizes) of a block of ``shape`` that none of the disjoint rectangles touches; one must exist."""
    axes = len(shape)
    low, high = np.zeros(axes, dtype=np.int64), np.array(shape, dtype=np.int64)
    starts, ends = offsets[:, :axes], offsets[:, :axes] + sizes[:, :axes]

    def covered(low: np.ndarray, high: np.ndarray) -> int:
        inside = np.minimum(ends, high) - np.maximum(starts, low)
        return int(np.clip(inside, 0, None).prod(axis=1).sum())

    # Halving always keeps a half that is not covered entirely.
    while covered(low, high) > 0:
        axis = int(np.argmax(high - low))
        middle = (low[axis] + high[axis]) // 2
        half = high.copy()
        half[axis] = middle
        if covered(low, half) < int((half - low).prod()):
            high = half
        else:
            low = low.copy()
            low[axis] = middle
    return tuple(low.tolist()), tuple((high - low).tolist())


def check_keys(folder: object, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise CheckpointError when stored keys were not requested or requested ones are not stored."""
    if not missing and not unexpected:
        return
    parts = []
    if unexpected:
        parts.append(f"the run asks for {len(unexpected)} keys that are not stored: {shown_names(unexpected)}")
    if missing:
        parts.append(f"{len(missing)} stored keys are not asked for: {shown_names(missing)}")
    raise CheckpointError(
        f"keys of {folder} and of the run differ: {'; '.join(parts)}. Load with the model and optimizer it was saved "
        "from"
    )


def shown_names(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _SHOWN_NAMES
    return ", ".join(ordered[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def check_shapes(leaves: Iterable[ShardedTensor], index: CheckpointIndex, folder: object) -> None:
    """Raise CheckpointError when a requested tensor has another global shape than the stored one."""
    for leaf in leaves:
        stored = index.tensors.get(leaf.key)
        if stored is None or stored.shape == leaf.global_shape:
            continue
        if not leaf.allow_shape_mismatch or len(stored.shape) != len(leaf.global_shape):
            raise CheckpointError(
                f"{leaf.key} has global shape {stored.shape} in {folder}, the run needs {leaf.global_shape}; load "
                "with the sizes it was saved with"
            )
