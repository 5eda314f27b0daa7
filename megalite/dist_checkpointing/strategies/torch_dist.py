"""The index of the ``torch_dist`` layout, and which stored bytes a rank needs.

Data files are ``__{rank}_{i}.distcp``, tensor blocks first, then objects; ``.metadata`` is the pickle of torch's own
``Metadata`` classes, so that ``torch.distributed.checkpoint`` and Megatron find every item.
"""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import Shape, ShardedObject, ShardedTensor, volume
from megalite.dist_checkpointing.safe import without_collections
from megalite.dist_checkpointing.strategies.base import (
    CheckpointIndex,
    ChunkRead,
    Copy,
    GlobalSavePlan,
    LoadPlan,
    StoredTensor,
)
from megalite.utils.errors import DamagedCheckpointError

# What torch writes into Metadata.version since it has that field.
_DCP_VERSION = "1.0.0"


class IndexWriter:
    """Makes ``.metadata`` in torch's own classes; what is equal from save to save is built once."""

    def __init__(self, plan: GlobalSavePlan) -> None:
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        self._plan = plan
        blocks = plan.blocks
        self._tensors: dict[str, Any] = {
            key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])
            for key, shape, dtype in zip(blocks.keys, blocks.shapes, blocks.dtypes, strict=True)
        }
        self._storage: dict[Any, Any] = {}
        # Equal shapes and rectangles are one object, which a pickle stores once: masters and moments have the same.
        shapes: dict[Shape, torch.Size] = {}
        rectangles: dict[tuple[Shape, Shape], Any] = {}
        columns = (blocks.key_of, plan.file_of, plan.starts, plan.lengths)
        for block, (key, file, start, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            place = blocks.rectangle(block)
            if place not in rectangles:
                rectangles[place] = dcp.ChunkStorageMetadata(
                    *(shapes.setdefault(shape, torch.Size(shape)) for shape in place)
                )
            offset = rectangles[place].offsets
            if dcp.MetadataIndex(blocks.keys[key], offset) in self._storage:
                # Of a tensor without elements every block is the whole.
                continue
            self._tensors[blocks.keys[key]].chunks.append(rectangles[place])
            info = _StorageInfo(plan.files[file], start, length)
            self._storage[dcp.MetadataIndex(blocks.keys[key], offset)] = info

    def content(self, object_lengths: Sequence[Sequence[int]], folder: Path) -> bytes:
        """Return the file of one save, whose objects have these lengths on each rank."""
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        tensors, storage = dict(self._tensors), dict(self._storage)
        for item in self._plan.place_objects(object_lengths):
            tensors[item.unique_key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(item.unique_key)] = _StorageInfo(item.file, item.start, item.length)
        values = {
            "state_dict_metadata": tensors,
            "planner_data": None,
            "storage_data": storage,
            "storage_meta": dcp.StorageMeta(checkpoint_id=str(folder), save_id=str(uuid.uuid4())),
            "version": _DCP_VERSION,
        }
        # Old versions of torch have no version field.
        known = {field.name for field in dataclasses.fields(dcp.Metadata)}
        metadata = dcp.Metadata(**{name: value for name, value in values.items() if name in known})
        with without_collections():
            return pickle.dumps(metadata, protocol=4)


def plan_load(
    tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject], index: CheckpointIndex, folder: Path
) -> LoadPlan:
    """Return the reads for these leaves; keys that are not stored are left out.

    CheckpointError when stored chunks do not cover a requested block exactly once.
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
