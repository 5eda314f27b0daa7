"""The index of the ``torch_dist`` layout, and which stored bytes a rank needs.

Data files are ``__{rank}_{i}.distcp``, tensor blocks first, then objects; ``.metadata`` is the pickle of torch's own
``Metadata`` classes, so that ``torch.distributed.checkpoint`` and Megatron find every item. Intersecting stored chunks
with requested blocks is left to DCP.
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
from megalite.dist_checkpointing.safe import Record, unpickle_index
from megalite.dist_checkpointing.strategies.base import (
    CheckpointIndex,
    ChunkRead,
    Copy,
    GlobalSavePlan,
    LoadPlan,
    StoredChunk,
    StoredItem,
    StoredTensor,
)
from megalite.utils.errors import CheckpointError

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
        columns = (blocks.key_of, plan.file_of, plan.starts, plan.lengths)
        for block, (key, file, start, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            offset, sizes = map(torch.Size, blocks.rectangle(block))
            self._tensors[blocks.keys[key]].chunks.append(dcp.ChunkStorageMetadata(offset, sizes))
            place = _StorageInfo(plan.files[file], start, length)
            self._storage[dcp.MetadataIndex(blocks.keys[key], offset)] = place

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
        return pickle.dumps(metadata, protocol=4)


def parse_index(data: bytes, where: str) -> CheckpointIndex:
    """Return the content of ``.metadata``; CheckpointError when it is damaged, hostile or contradicts itself."""
    found = unpickle_index(data, where)
    try:
        return _parse_index(found, where)
    except CheckpointError:
        raise
    # The unpickled structure may be of any shape: a list where a dict belongs, an attribute that is not there.
    except Exception as error:
        raise CheckpointError(f"{where} is not a valid index: {error!r}; do not use this checkpoint") from error


def _parse_index(found: Record, where: str) -> CheckpointIndex:
    places: dict[tuple[str, Shape | None], StoredItem] = {}
    for place, info in found.storage_data.items():
        offset = getattr(place, "offset", None)
        item = StoredItem(info.relative_path, info.offset, info.length)
        plain = isinstance(item.file, str) and Path(item.file).name == item.file and item.file not in ("", ".", "..")
        if not plain or "\0" in item.file:
            raise CheckpointError(
                f"{where} places {place.fqn} in {item.file!r}, which is not a file of the folder; do not use this "
                "checkpoint"
            )
        if not (_is_shape((item.offset, item.length))) or getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{where}: {place.fqn} has byte range ({item.offset!r}, {item.length!r}) or is transformed; only plain "
                "items can be read"
            )
        places[place.fqn, None if offset is None else tuple(offset)] = item
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredItem] = {}
    for key, entry in found.state_dict_metadata.items():
        if entry.name.endswith(".BytesStorageMetadata"):
            objects[key] = places[key, None]
            continue
        chunks = [_parse_chunk(key, chunk, entry.size, places, where) for chunk in entry.chunks]
        tensors[key] = StoredTensor(tuple(entry.size), _parse_dtype(entry.properties), chunks)
    return CheckpointIndex(tensors, objects)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(number) is int and 0 <= number < 2**62 for number in value)


def _parse_chunk(key: str, chunk: Record, shape: Shape, places: dict, where: str) -> StoredChunk:
    offset, sizes = chunk.offsets, chunk.sizes
    fits = all(_is_shape(value) for value in (shape, offset, sizes)) and len(shape) == len(offset) == len(sizes)
    if not fits or any(start + size > whole for start, size, whole in zip(offset, sizes, shape, strict=True)):
        raise CheckpointError(
            f"{where}: chunk {sizes} at {offset} of {key} leaves shape {shape}; use another checkpoint"
        )
    if (key, offset) not in places:
        raise CheckpointError(f"{where} does not say where chunk {offset} of {key} lies; use another checkpoint")
    return StoredChunk(offset, sizes, places[key, offset])


def _parse_dtype(properties: Record) -> torch.dtype:
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}")
    return dtype


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
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(offset: Shape, sizes: Shape) -> Any:
        return dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))

    starts = np.array([part.offset for part in stored.chunks], dtype=np.int64).reshape(
        len(stored.chunks), len(stored.shape)
    )
    ends = starts + np.array([part.sizes for part in stored.chunks], dtype=np.int64).reshape(starts.shape)
    reads: dict[int, ChunkRead] = {}
    for leaf in blocks:
        # DCP compares every stored chunk with every block; only those that meet are left to it.
        low, high = np.array(leaf.global_offset), np.add(leaf.global_offset, leaf.chunk_shape)
        near = np.flatnonzero(((starts < high) & (low < ends)).all(axis=1)).tolist()
        items = create_read_items_for_chunk_list(
            name,
            dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=stored.dtype),
                torch.Size(stored.shape),
                [chunk(stored.chunks[part].offset, stored.chunks[part].sizes) for part in near],
            ),
            [chunk(leaf.global_offset, leaf.chunk_shape)],
        )
        found = 0
        for item in items:
            part = near[item.storage_index.index]
            sizes = tuple(item.lengths)
            read = reads.setdefault(part, ChunkRead(name, stored.dtype, stored.chunks[part]))
            read.copies.append(Copy(leaf, tuple(item.storage_offsets), tuple(item.dest_offsets), sizes))
            found += volume(sizes)
        expected = _stored_volume(leaf, stored.shape)
        if found != expected:
            raise CheckpointError(
                f"{name}: the stored chunks hold {found} elements for the {expected} of block {leaf.chunk_shape} at "
                f"{leaf.global_offset}; the index is damaged, use another checkpoint"
            )
    return list(reads.values())
