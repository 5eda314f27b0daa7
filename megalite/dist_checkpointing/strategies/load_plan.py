"""Which stored chunks a rank needs: requested blocks intersected with those of the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.dist_checkpointing.mapping import Shape, ShardedObject, ShardedTensor, volume
from megalite.dist_checkpointing.strategies.base import (
    CheckpointIndex,
    ChunkRead,
    Copy,
    LoadPlan,
    StoredTensor,
)
from megalite.utils.errors import DamagedCheckpointError


def plan_load(
    tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject], index: CheckpointIndex, folder: Path
) -> LoadPlan:
    """Return the reads for these leaves; keys that are not stored are left out.

    CheckpointError when stored chunks have more or fewer elements of a block than it has; ``check_index`` is what finds
    every overlap.
    """
    requested: dict[str, list[ShardedTensor]] = defaultdict(list)
    for leaf in tensors:
        if leaf.key in index.tensors:
            requested[leaf.key].append(leaf)
    reads: list[ChunkRead] = []
    zeroed: list[ShardedTensor] = []
    for key, blocks in requested.items():
        reads += _plan_tensor(f"{key} in {folder}", index.tensors[key], blocks)
        zeroed += [leaf for leaf in blocks if _stored_volume(leaf, index.tensors[key].shape) < leaf.data.numel()]
    reads.sort(key=lambda read: (read.chunk.item.file, read.chunk.item.offset))
    wanted = {leaf.unique_key for leaf in objects}
    stored = [(key, index.objects[key]) for key in wanted if key in index.objects]
    stored.sort(key=lambda entry: (entry[1].file, entry[1].offset))
    return LoadPlan(reads, stored, zeroed)


def _stored_volume(leaf: ShardedTensor, stored: Shape) -> int:
    """Return how many elements of the block the stored global shape has; fewer only if it may differ."""
    edges = zip(leaf.global_offset, leaf.chunk_shape, stored, strict=True)
    return volume(tuple(max(0, min(offset + size, whole) - offset) for offset, size, whole in edges))


def _plan_tensor(name: str, stored: StoredTensor, blocks: list[ShardedTensor]) -> list[ChunkRead]:
    count, axes = len(stored.chunks), len(stored.shape)
    starts = np.array([part.offset for part in stored.chunks], dtype=np.int64).reshape(count, axes)
    ends = starts + np.array([part.sizes for part in stored.chunks], dtype=np.int64).reshape(count, axes)
    reads: dict[int, ChunkRead] = {}
    for leaf in blocks:
        origin = np.array(leaf.global_offset, dtype=np.int64)
        low = np.maximum(starts, origin)
        sizes = np.minimum(ends, origin + np.array(leaf.chunk_shape, dtype=np.int64)) - low
        near = np.flatnonzero((sizes > 0).all(axis=1))
        columns = (near, low[near] - starts[near], low[near] - origin, sizes[near])
        found = 0
        for part, source, target, extent in zip(*(column.tolist() for column in columns), strict=True):
            read = reads.setdefault(part, ChunkRead(name, stored.dtype, stored.chunks[part]))
            read.copies.append(Copy(leaf, tuple(source), tuple(target), tuple(extent)))
            found += volume(extent)
        expected = _stored_volume(leaf, stored.shape)
        if found != expected:
            raise DamagedCheckpointError(
                f"{name}: the stored chunks hold {found} elements for the {expected} of block {leaf.chunk_shape} at "
                f"{leaf.global_offset}; the index is damaged, use another checkpoint"
            )
    return list(reads.values())
