"""Who writes which bytes where: pure arithmetic over arrays.

A rank's plan is a few arrays, however many tensors there are. The plans of all ranks are brought together on one of
them, once; while the structure of the state stays the same, they are used again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor
from megalite.dist_checkpointing.safe import find_unreadable
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.base import Blocks, GlobalSavePlan, ItemFraming, SavePlan, shape_rows
from megalite.utils.errors import MegaliteError, SaveError


def structure_digest(leaves: ShardedLeaves, *settings: object) -> bytes:
    """Return a digest of everything that a plan depends on: what is declared, not the values."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for leaf in leaves.tensors:
        what = (leaf.key, leaf.dtype, leaf.global_shape, leaf.global_offset, leaf.chunk_shape, leaf.replica_id)
        digest.update(repr(what).encode())
    for cell in leaves.objects:
        digest.update(repr((cell.unique_key, cell.replica_id)).encode())
    return digest.digest()


def blocks_of(leaves: Sequence[ShardedTensor], error: type[MegaliteError] = SaveError) -> Blocks:
    """Return the leaves as arrays; ``error`` when two of one key have different shapes or types."""
    numbers: dict[str, int] = {}
    owners: list[ShardedTensor] = []
    for leaf in leaves:
        if leaf.key not in numbers:
            numbers[leaf.key] = len(owners)
            owners.append(leaf)
        first = owners[numbers[leaf.key]]
        check_same(leaf.key, (leaf.global_shape, leaf.dtype), (first.global_shape, first.dtype), error)
    axes = max((len(leaf.global_shape) for leaf in owners), default=0)
    return Blocks(
        keys=tuple(numbers),
        shapes=tuple(leaf.global_shape for leaf in owners),
        dtypes=tuple(leaf.dtype for leaf in owners),
        key_of=np.array([numbers[leaf.key] for leaf in leaves], dtype=np.int64),
        offsets=shape_rows([leaf.global_offset for leaf in leaves], axes, 0),
        sizes=shape_rows([leaf.chunk_shape for leaf in leaves], axes, 1),
    )


def check_same(
    key: str, one: tuple[Shape, torch.dtype], other: tuple[Shape, torch.dtype], error: type[MegaliteError]
) -> None:
    """Raise ``error`` when a key is declared with two global shapes or types."""
    if one != other:
        raise error(
            f"{key} is declared as {other[1]} of global shape {other[0]} and as {one[1]} of global shape {one[0]}; all "
            "blocks of a key must agree"
        )


def merge_blocks(parts: Sequence[Blocks], error: type[MegaliteError] = SaveError) -> Blocks:
    """Return the blocks of all ranks as one; ``error`` when ranks disagree about a key."""
    numbers: dict[str, int] = {}
    types: list[tuple[Shape, torch.dtype]] = []
    # Ranks of one cell declare the same keys, and are many.
    tables: dict[tuple, np.ndarray] = {}

    def table_of(part: Blocks) -> np.ndarray:
        what = (part.keys, part.shapes, part.dtypes)
        if what not in tables:
            for key, kind in zip(part.keys, zip(part.shapes, part.dtypes, strict=True), strict=True):
                if numbers.setdefault(key, len(types)) == len(types):
                    types.append(kind)
                check_same(key, kind, types[numbers[key]], error)
            tables[what] = np.array([numbers[key] for key in part.keys], dtype=np.int64)
        return tables[what]

    count, axes = sum(map(len, parts)), max((part.offsets.shape[1] for part in parts), default=0)
    key_of = np.empty(count, dtype=np.int64)
    offsets, sizes = np.zeros((count, axes), dtype=np.int64), np.ones((count, axes), dtype=np.int64)
    first = 0
    for part in parts:
        own, width = slice(first, first + len(part)), part.offsets.shape[1]
        key_of[own] = table_of(part)[part.key_of]
        offsets[own, :width], sizes[own, :width] = part.offsets, part.sizes
        first = own.stop
    return Blocks(
        keys=tuple(numbers),
        shapes=tuple(shape for shape, _ in types),
        dtypes=tuple(dtype for _, dtype in types),
        key_of=key_of,
        offsets=offsets,
        sizes=sizes,
    )


def frame_objects(leaves: ShardedLeaves, framing: ItemFraming) -> dict[str, bytes]:
    """Return the bytes of this rank's main replicas of objects, which are small, by unique key.

    SaveError for one that could not be read back or is declared twice.
    """
    objects: dict[str, bytes] = {}
    for cell in leaves.main_objects:
        if (bad := find_unreadable(cell.data, cell.unique_key)) is not None:
            raise SaveError(f"{bad} cannot be read back safely from a checkpoint; store plain Python data")
        if cell.unique_key in objects:
            raise SaveError(f"object {cell.unique_key} is declared twice on one rank; give each cell one owner")
        objects[cell.unique_key] = framing.frame_object(cell.data)
    return objects


def plan_local_save(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[str],
    rank: int,
    framing: ItemFraming,
    num_files: int = 1,
    declared: Iterable[str] = (),
) -> SavePlan:
    """Return the plan of the global ``rank`` that writes these blocks and objects into at most ``num_files`` files.

    ``declared`` are all keys that it holds, also those that others write.
    """
    blocks = blocks_of(tensors)
    lengths = np.array([framing.tensor_length(leaf.dtype, leaf.chunk_shape) for leaf in tensors], dtype=np.int64)
    file_of = _balanced(lengths, num_files)
    starts = np.zeros(len(lengths), dtype=np.int64)
    count = int(file_of.max()) + 1 if len(file_of) else int(bool(objects))
    for file in range(count):
        inside = np.flatnonzero(file_of == file)
        starts[inside] = np.cumsum(lengths[inside]) - lengths[inside]
    files = tuple(f"__{rank}_{file}.distcp" for file in range(count))
    left = sorted(set(declared).difference(blocks.keys, objects))
    return SavePlan(blocks, tuple(objects), files, file_of, starts, lengths, tuple(left))


def _balanced(lengths: np.ndarray, num_files: int) -> np.ndarray:
    """Return a file for each item: the largest first, each into the file that is shortest so far."""
    file_of = np.zeros(len(lengths), dtype=np.int64)
    if num_files > 1:
        filled = [0] * num_files
        for item in np.argsort(-lengths, kind="stable").tolist():
            file = filled.index(min(filled))
            file_of[item] = file
            filled[file] += int(lengths[item])
    return file_of


def merge_plans(plans: Sequence[SavePlan], ranks: Sequence[int]) -> GlobalSavePlan:
    """Return the plans of all ranks as one; SaveError when they disagree about a key."""
    first_file = np.cumsum([0, *(len(plan.files) for plan in plans)])
    return GlobalSavePlan(
        blocks=merge_blocks([plan.blocks for plan in plans]),
        files=tuple(name for plan in plans for name in plan.files),
        file_of=np.concatenate([plan.file_of + first for plan, first in zip(plans, first_file, strict=False)]),
        starts=np.concatenate([plan.starts for plan in plans]),
        lengths=np.concatenate([plan.lengths for plan in plans]),
        rank_of=np.repeat(np.array(ranks, dtype=np.int64), [len(plan.lengths) for plan in plans]),
        local=tuple(plans),
    )


def file_sizes(plan: GlobalSavePlan, object_lengths: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the length of every data file that the plan has."""
    ends = np.zeros(len(plan.files), dtype=np.int64)
    np.maximum.at(ends, plan.file_of, plan.starts + plan.lengths)
    sizes = {name: int(end) for name, end in zip(plan.files, ends, strict=True)}
    for item in plan.place_objects(object_lengths):
        sizes[item.file] = max(sizes[item.file], item.start + item.length)
    return sizes
