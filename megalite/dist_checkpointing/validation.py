"""Checks that need all ranks' declarations: every element written exactly once, keys and shapes as asked.

The checks are pure: they get plans and return or raise; exchanging is the caller's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor, parse_unique_key
from megalite.dist_checkpointing.strategies.base import Blocks, CheckpointIndex, GlobalSavePlan
from megalite.utils.errors import CheckpointError, MegaliteError, SaveError

_SHOWN_NAMES = 20


class StrictHandling(Enum):
    """What a load does about keys that only the file or only the request has; Megatron's names.

    *Unexpected* keys are requested and not stored; *missing* ones are stored and requested by no rank.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """The same as ``raise_unexpected``: Megatron's name for leaving it to the reader."""
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are one WARNING, and keep their local value."""
    LOG_ALL = "log_all"
    """So are missing keys."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys are an error."""
    RAISE_ALL = "raise_all"
    """Both are an error: the default."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are returned, and keep their local value."""
    RETURN_ALL = "return_all"
    """Both are returned."""
    IGNORE_ALL = "ignore_all"
    """Nothing is said about either."""

    @property
    def asks_for_missing(self) -> bool:
        """Whether it matters which stored keys no rank requests."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @property
    def returns_keys(self) -> bool:
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)

    @property
    def raises(self) -> bool:
        return self in (
            StrictHandling.RAISE_ALL,
            StrictHandling.RAISE_UNEXPECTED,
            StrictHandling.ASSUME_OK_UNEXPECTED,
        )

    @property
    def logs(self) -> bool:
        return self in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED)


def check_exactly_once(blocks: Blocks, owner: Callable[[int], str], verb: str, error: type[MegaliteError]) -> None:
    """Raise ``error`` when an element of a global tensor is in two blocks or in none.

    ``owner`` names who has a block, ``verb`` says what is done with it ("written"), for the message.
    """
    pair = find_overlap(blocks.key_of, blocks.offsets, blocks.sizes)
    if pair is not None:
        (place, size), (other_place, other_size) = (blocks.rectangle(block) for block in pair)
        raise error(
            f"{blocks.keys[blocks.key_of[pair[0]]]}: the blocks {size} at {place} of {owner(pair[0])} and {other_size} "
            f"at {other_place} of {owner(pair[1])} overlap; every element must be {verb} by one rank, so set "
            "replica_id of the other copies"
        )
    covered = np.zeros(len(blocks.keys), dtype=np.int64)
    np.add.at(covered, blocks.key_of, blocks.sizes.prod(axis=1, dtype=np.int64))
    for key, (name, shape, count) in enumerate(zip(blocks.keys, blocks.shapes, covered.tolist(), strict=True)):
        if count != math.prod(shape):
            own = blocks.key_of == key
            offset, sizes = find_hole(shape, blocks.offsets[own], blocks.sizes[own])
            raise error(
                f"{name}: {count} of {math.prod(shape)} elements of global shape {shape} are {verb}, block {sizes} at "
                f"{offset} by nobody; every block needs one copy with replica_id 0"
            )


def check_declared(plan: GlobalSavePlan) -> None:
    """Raise SaveError when ranks hold a tensor or object that none of them writes."""
    written = set(plan.blocks.keys).union(*(local.objects for local in plan.local))
    lost = sorted(set().union(*(local.only_declared for local in plan.local)) - written)
    if lost:
        raise SaveError(
            f"no rank writes {shown_names(lost)}: every copy has a replica_id other than 0; one copy of every block "
            "needs replica_id 0"
        )


def check_objects(plan: GlobalSavePlan) -> None:
    """Raise SaveError when a cell of an object grid is written not exactly once."""
    cells: dict[tuple[str, Shape], dict[Shape, str]] = defaultdict(dict)
    for local in plan.local:
        for unique_key in local.objects:
            key, offset, shape = parse_unique_key(unique_key)
            other = cells[key, shape].setdefault(offset, local.files[0])
            if other is not local.files[0]:
                raise SaveError(
                    f"object {unique_key} is in both {other} and {local.files[0]}; set replica_id of the other copies"
                )
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
