"""Plans of the ``torch_dist`` layout: who writes which bytes where, and which stored bytes a rank needs.

One data file per rank, ``__{rank}_{i}.distcp``, objects first, then tensor chunks; ``.metadata`` is the pickle of
torch's own ``Metadata`` classes, so that ``torch.distributed.checkpoint`` and Megatron find every item. Intersecting
stored chunks with requested blocks is left to DCP.
"""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor, is_main_replica, volume
from megalite.dist_checkpointing.safe import Record, find_unreadable, unpickle_index
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.base import (
    CheckpointIndex,
    ChunkRead,
    Copy,
    GlobalSavePlan,
    ItemFraming,
    LoadPlan,
    SavePlan,
    StoredChunk,
    StoredItem,
    StoredTensor,
)
from megalite.utils.errors import CheckpointError, SaveError

# What torch writes into Metadata.version since it has that field.
_DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class LocalSave:
    """A rank's plan and, in the order of its items, what it is about."""

    plan: SavePlan
    objects: list[bytes]
    tensors: list[torch.Tensor]


def plan_local_save(leaves: ShardedLeaves, rank: int, framing: ItemFraming) -> LocalSave:
    """Return what the global ``rank`` writes: its main replicas. Objects are serialized here, since they are small.

    Raises SaveError for an object that could not be read back, and for one key with two shapes or dtypes.
    """
    objects: dict[str, bytes] = {}
    for leaf in leaves.objects:
        if is_main_replica(leaf.replica_id):
            if (bad := find_unreadable(leaf.data, leaf.unique_key)) is not None:
                raise SaveError(f"{bad} cannot be read back safely from a checkpoint; store plain Python data")
            if leaf.unique_key in objects:
                raise SaveError(f"object {leaf.unique_key} is declared twice on rank {rank}; give each cell one owner")
            objects[leaf.unique_key] = framing.frame_object(leaf.data)
    mains = [leaf for leaf in leaves.tensors if is_main_replica(leaf.replica_id)]
    keys: dict[str, int] = {}
    owners: list[ShardedTensor] = []
    for leaf in mains:
        if leaf.key not in keys:
            keys[leaf.key] = len(owners)
            owners.append(leaf)
        _check_same(leaf.key, _type_of(leaf), _type_of(owners[keys[leaf.key]]))
    axes = max((len(leaf.global_shape) for leaf in mains), default=0)
    lengths = [len(data) for data in objects.values()]
    lengths += [framing.tensor_length(leaf.dtype, leaf.chunk_shape) for leaf in mains]
    plan = SavePlan(
        file=f"__{rank}_0.distcp",
        keys=tuple(keys),
        shapes=tuple(leaf.global_shape for leaf in owners),
        dtypes=tuple(leaf.dtype for leaf in owners),
        key_of_chunk=np.array([keys[leaf.key] for leaf in mains], dtype=np.int64),
        offsets=_rows([leaf.global_offset for leaf in mains], axes, 0),
        sizes=_rows([leaf.chunk_shape for leaf in mains], axes, 1),
        objects=tuple(objects),
        starts=np.cumsum([0, *lengths], dtype=np.int64)[:-1],
        lengths=np.array(lengths, dtype=np.int64),
    )
    return LocalSave(plan, list(objects.values()), [leaf.global_data for leaf in mains])


def _type_of(leaf: ShardedTensor) -> tuple[Shape, torch.dtype]:
    return leaf.global_shape, leaf.dtype


def _check_same(key: str, one: tuple[Shape, torch.dtype], other: tuple[Shape, torch.dtype]) -> None:
    if one != other:
        raise SaveError(
            f"{key} is declared as {other[1]} of global shape {other[0]} and as {one[1]} of global shape {one[0]}; all "
            "blocks of a key must agree"
        )


def _rows(shapes: Sequence[Shape], axes: int, filler: int) -> np.ndarray:
    rows = [(*shape, *(filler,) * (axes - len(shape))) for shape in shapes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), axes)


def merge_plans(plans: Sequence[SavePlan]) -> GlobalSavePlan:
    """Return the plans of all ranks as one; SaveError when they disagree about a key."""
    keys: dict[str, int] = {}
    types: list[tuple[Shape, torch.dtype]] = []
    for plan in plans:
        for key, kind in zip(plan.keys, zip(plan.shapes, plan.dtypes, strict=True), strict=True):
            if keys.setdefault(key, len(types)) == len(types):
                types.append(kind)
            _check_same(key, kind, types[keys[key]])
    axes = max((plan.offsets.shape[1] for plan in plans), default=0)
    chunks = [len(plan.key_of_chunk) for plan in plans]
    objects = [
        (key, plan.file, int(start), int(length))
        for plan in plans
        for key, start, length in zip(plan.objects, plan.starts, plan.lengths, strict=False)
    ]
    numbers = [np.array([keys[key] for key in plan.keys], dtype=np.int64) for plan in plans]
    return GlobalSavePlan(
        keys=tuple(keys),
        shapes=tuple(shape for shape, _ in types),
        dtypes=tuple(dtype for _, dtype in types),
        key_of_chunk=np.concatenate([table[plan.key_of_chunk] for table, plan in zip(numbers, plans, strict=True)]),
        offsets=np.concatenate([_widened(plan.offsets, axes, 0) for plan in plans]),
        sizes=np.concatenate([_widened(plan.sizes, axes, 1) for plan in plans]),
        files=tuple(plan.file for plan in plans),
        file_of_chunk=np.repeat(np.arange(len(plans)), chunks),
        starts=np.concatenate([plan.starts[len(plan.objects) :] for plan in plans]),
        lengths=np.concatenate([plan.lengths[len(plan.objects) :] for plan in plans]),
        objects=tuple(objects),
    )


def _widened(rows: np.ndarray, axes: int, filler: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, axes - rows.shape[1])), constant_values=filler)


def file_sizes(plan: GlobalSavePlan) -> dict[str, int]:
    """Return the length of every data file that the plan has."""
    ends = np.zeros(len(plan.files), dtype=np.int64)
    np.maximum.at(ends, plan.file_of_chunk, plan.starts + plan.lengths)
    sizes = {name: int(end) for name, end in zip(plan.files, ends, strict=True)}
    for _, name, start, length in plan.objects:
        sizes[name] = max(sizes.get(name, 0), start + length)
    return {name: size for name, size in sizes.items() if size > 0}


def index_bytes(plan: GlobalSavePlan, folder: Path) -> bytes:
    """Return the content of ``.metadata`` in torch's own classes."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, shape, dtype in zip(plan.keys, plan.shapes, plan.dtypes, strict=True)
    }
    storage: dict[Any, Any] = {}
    columns = (plan.key_of_chunk, plan.file_of_chunk, plan.starts, plan.lengths)
    for chunk, (key, file, start, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        axes = len(plan.shapes[key])
        offset = torch.Size(plan.offsets[chunk, :axes].tolist())
        sizes = torch.Size(plan.sizes[chunk, :axes].tolist())
        tensors[plan.keys[key]].chunks.append(dcp.ChunkStorageMetadata(offset, sizes))
        storage[dcp.MetadataIndex(plan.keys[key], offset)] = _StorageInfo(plan.files[file], start, length)
    for unique_key, file, start, length in plan.objects:
        tensors[unique_key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(unique_key)] = _StorageInfo(file, start, length)
    values = {
        "state_dict_metadata": tensors,
        "planner_data": None,
        "storage_data": storage,
        "storage_meta": dcp.StorageMeta(checkpoint_id=str(folder), save_id=str(uuid.uuid4())),
        "version": _DCP_VERSION,
    }
    # Old versions of torch have no version field.
    known = {field.name for field in dataclasses.fields(dcp.Metadata)}
    return pickle.dumps(dcp.Metadata(**{name: value for name, value in values.items() if name in known}), protocol=4)


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


def plan_load(leaves: ShardedLeaves, index: CheckpointIndex, folder: Path) -> LoadPlan:
    """Return the reads for ``leaves``; keys that are not stored are left out.

    CheckpointError when stored chunks do not cover a requested block exactly once.
    """
    requested: dict[str, list[ShardedTensor]] = defaultdict(list)
    for leaf in leaves.tensors:
        if leaf.key in index.tensors:
            requested[leaf.key].append(leaf)
    reads: list[ChunkRead] = []
    zeroed: list[ShardedTensor] = []
    for key, blocks in requested.items():
        reads += _plan_tensor(f"{key} in {folder}", index.tensors[key], blocks)
        zeroed += [leaf for leaf in blocks if _stored_volume(leaf, index.tensors[key].shape) < leaf.data.numel()]
    reads.sort(key=lambda read: (read.chunk.item.file, read.chunk.item.offset))
    wanted = {leaf.unique_key for leaf in leaves.objects}
    objects = [(key, index.objects[key]) for key in wanted if key in index.objects]
    objects.sort(key=lambda entry: (entry[1].file, entry[1].offset))
    return LoadPlan(reads, objects, zeroed)


def _stored_volume(leaf: ShardedTensor, stored: Shape) -> int:
    """Return how many elements of the block the stored global shape has; fewer only if it may differ."""
    edges = zip(leaf.global_offset, leaf.chunk_shape, stored, strict=True)
    return volume(tuple(max(0, min(offset + size, whole) - offset) for offset, size, whole in edges))


def _plan_tensor(name: str, stored: StoredTensor, blocks: list[ShardedTensor]) -> list[ChunkRead]:
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(offset: Shape, sizes: Shape) -> Any:
        return dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))

    items = create_read_items_for_chunk_list(
        name,
        dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=stored.dtype),
            torch.Size(stored.shape),
            [chunk(part.offset, part.sizes) for part in stored.chunks],
        ),
        [chunk(leaf.global_offset, leaf.chunk_shape) for leaf in blocks],
    )
    reads: dict[int, ChunkRead] = {}
    found = [0] * len(blocks)
    for item in items:
        part, block = item.storage_index.index, item.dest_index.index
        sizes = tuple(item.lengths)
        read = reads.setdefault(part, ChunkRead(name, stored.dtype, stored.chunks[part]))
        read.copies.append(Copy(blocks[block], tuple(item.storage_offsets), tuple(item.dest_offsets), sizes))
        found[block] += volume(sizes)
    for leaf, count in zip(blocks, found, strict=True):
        expected = _stored_volume(leaf, stored.shape)
        if count != expected:
            raise CheckpointError(
                f"{name}: the stored chunks hold {count} elements for the {expected} of block {leaf.chunk_shape} at "
                f"{leaf.global_offset}; the index is damaged, use another checkpoint"
            )
    return list(reads.values())
