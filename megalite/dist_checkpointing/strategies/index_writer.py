"""``.metadata`` as torch's own classes unpickle, written without making an object for each chunk.

A pickle is a program for a small stack machine. What is equal for all chunks is the same bytes, and what differs are
references into the machine's memo and numbers, which are given equal lengths: so the entries of all chunks are one
array of bytes. The memo is laid out here:

    0 to 127      used and used again within single constants, which torch's classes pickle themselves
    128 to 255    classes and the names of their fields: references to these take two bytes
    from 256 on   keys, files, types, shapes and rectangles, each of which is written once
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import volume
from megalite.dist_checkpointing.strategies.base import GlobalSavePlan

# What torch writes into Metadata.version since it has that field.
_DCP_VERSION = "1.0.0"

_FIRST_NAME, _FIRST_ENTRY = 128, 256
_START, _END = b"\x80\x02", b"."
_POP, _NONE, _MARK = b"0", b"N", b"("
_NEW, _SET_ITEMS, _APPEND_ITEMS, _BUILD = b")\x81", b"u", b"e", b"b"
_EMPTY_DICT, _EMPTY_LIST, _TUPLE, _TUPLE_OF_ONE, _CALL = b"}", b"]", b"t", b"\x85", b"R"


def _constant(value: Any) -> bytes:
    """Return the opcodes that put ``value``, a small one, on the stack."""
    return pickle.dumps(value, protocol=2)[len(_START) : -len(_END)]


def _rows(count: int, *columns: bytes | np.ndarray) -> np.ndarray:
    """Return [count, bytes]: columns side by side, of which bytes are the same in every row."""

    def wide(column: bytes | np.ndarray) -> np.ndarray:
        if isinstance(column, np.ndarray):
            return column
        return np.broadcast_to(np.frombuffer(column, np.uint8), (count, len(column)))

    return np.concatenate([wide(column) for column in columns], axis=1)


def _little_endian(values: np.ndarray, width: int) -> np.ndarray:
    return np.ascontiguousarray(values.astype("<i8")).view(np.uint8).reshape(len(values), 8)[:, :width]


def _get(entries: np.ndarray) -> np.ndarray:
    """Return the opcodes that fetch these entries of the memo."""
    return _rows(len(entries), b"j", _little_endian(entries, 4))


def _put(entries: np.ndarray) -> np.ndarray:
    return _rows(len(entries), b"r", _little_endian(entries, 4))


def _integers(values: np.ndarray) -> np.ndarray:
    """Return the opcodes of numbers that are not negative, each of as many bytes as the largest needs with its sign."""
    width = int(values.max(initial=0)).bit_length() // 8 + 1
    return _rows(len(values), bytes((0x8A, width)), _little_endian(values, width))


class _Program:
    """Opcodes so far, and where the memo has what."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [_START]
        self._names: dict[Any, bytes] = {}
        self.next_entry = _FIRST_ENTRY

    def name(self, value: Any) -> bytes:
        """Return the two opcodes that fetch a class or the name of a field."""
        if value not in self._names:
            number = _FIRST_NAME + len(self._names)
            self.parts += [_constant(value), b"q", bytes((number,)), _POP]
            self._names[value] = b"h" + bytes((number,))
        return self._names[value]

    def entries(self, count: int) -> np.ndarray:
        """Return the numbers of the next ``count`` entries of the memo."""
        first, self.next_entry = self.next_entry, self.next_entry + count
        return np.arange(first, self.next_entry)

    def constants(self, values: Sequence[Any]) -> np.ndarray:
        """Put values into the memo and return their entries."""
        entries = self.entries(len(values))
        for value, entry in zip(values, entries.tolist(), strict=True):
            self.parts += [_constant(value), b"r", struct.pack("<I", entry), _POP]
        return entries

    def new(self, cls: type) -> bytes:
        """Return the opcodes that make an instance and begin to list its fields; ``_SET_ITEMS + _BUILD`` ends it."""
        return self.name(cls) + _NEW + _EMPTY_DICT + _MARK

    def shapes(self, rows: np.ndarray) -> np.ndarray:
        """Put a ``torch.Size`` for each row into the memo, equal ones once, and return the entry of each row."""
        different, which = _distinct(rows)
        entries = self.entries(len(different))
        numbers = [_integers(different[:, axis]) for axis in range(rows.shape[1])]
        call = _TUPLE + _TUPLE_OF_ONE + _CALL
        made = _rows(len(different), self.name(torch.Size) + _MARK, *numbers, call, _put(entries), _POP)
        self.parts.append(made.tobytes())
        return entries[which]


class IndexWriter:
    """Makes ``.metadata``; what is equal from save to save is made once."""

    def __init__(self, plan: GlobalSavePlan) -> None:
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        self._plan = plan
        self._program = program = _Program()
        blocks = plan.blocks
        keys = program.constants(blocks.keys)
        files = program.constants(plan.files)
        kept = _without_repeats(plan)
        owner = blocks.key_of[kept]
        shape_of_key = np.zeros(len(blocks.keys), dtype=np.int64)
        offset_of, size_of = np.zeros(len(kept), dtype=np.int64), np.zeros(len(kept), dtype=np.int64)
        num_axes = np.array([len(shape) for shape in blocks.shapes], dtype=np.int64)
        for axes in np.unique(num_axes).tolist():
            of_key, of_block = np.flatnonzero(num_axes == axes), np.flatnonzero(num_axes[owner] == axes)
            whole = np.array([blocks.shapes[key] for key in of_key.tolist()], dtype=np.int64).reshape(len(of_key), axes)
            rows = (whole, blocks.offsets[kept[of_block], :axes], blocks.sizes[kept[of_block], :axes])
            entries = np.split(program.shapes(np.concatenate(rows)), [len(of_key), len(of_key) + len(of_block)])
            shape_of_key[of_key], offset_of[of_block], size_of[of_block] = entries
        chunks = self._rectangles(offset_of, size_of, dcp.ChunkStorageMetadata)
        self._tensors = self._tensor_entries(keys, shape_of_key, owner, chunks, dcp)
        place = program.new(dcp.MetadataIndex) + program.name("fqn")
        info = program.new(_StorageInfo) + program.name("relative_path")
        done = _SET_ITEMS + _BUILD
        self._storage = _rows(
            len(kept),
            *(place, _get(keys[owner]), program.name("index") + _NONE + program.name("offset"), _get(offset_of), done),
            *(info, _get(files[plan.file_of[kept]]), program.name("offset"), _integers(plan.starts[kept])),
            *(program.name("length"), _integers(plan.lengths[kept]), done),
        ).tobytes()

    def _rectangles(self, offset_of: np.ndarray, size_of: np.ndarray, cls: type) -> np.ndarray:
        """Put a rectangle for each pair into the memo, equal ones once: masters and moments have the same."""
        program = self._program
        pairs, which = np.unique(offset_of * program.next_entry + size_of, return_inverse=True)
        offsets, sizes = np.divmod(pairs, program.next_entry)
        entries = program.entries(len(pairs))
        start, second = program.new(cls) + program.name("offsets"), program.name("sizes")
        made = _rows(len(pairs), start, _get(offsets), second, _get(sizes), _SET_ITEMS + _BUILD, _put(entries), _POP)
        program.parts.append(made.tobytes())
        return entries[which.reshape(-1)]

    def _tensor_entries(
        self, keys: np.ndarray, shape_of_key: np.ndarray, owner: np.ndarray, chunks: np.ndarray, dcp: Any
    ) -> bytes:
        """Return key and value of every tensor, for a dict."""
        program, dtypes = self._program, list(dict.fromkeys(self._plan.blocks.dtypes))
        known = program.constants([dcp.TensorProperties(dtype=dtype) for dtype in dtypes])
        properties = {dtype: entry.tobytes() for dtype, entry in zip(dtypes, _get(known), strict=True)}
        order = np.argsort(owner, kind="stable")
        members = _get(chunks[order])
        ends = np.searchsorted(owner[order], np.arange(len(keys)), side="right").tolist()
        start = program.new(dcp.TensorStorageMetadata) + program.name("properties")
        size, listed = program.name("size"), program.name("chunks") + _EMPTY_LIST + _MARK
        parts: list[bytes] = []
        first = 0
        columns = (_get(keys), self._plan.blocks.dtypes, _get(shape_of_key), ends)
        for key, dtype, shape, end in zip(*columns, strict=True):
            parts += [key.tobytes(), start, properties[dtype], size, shape.tobytes()]
            parts += [listed, members[first:end].tobytes(), _APPEND_ITEMS + _SET_ITEMS + _BUILD]
            first = end
        return b"".join(parts)

    def content(self, object_lengths: Sequence[Sequence[int]], folder: Path) -> bytes:
        """Return the file of one save, whose objects have these lengths on each rank."""
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        tensors, storage = [self._tensors], [self._storage]
        entry = _constant(dcp.BytesStorageMetadata())
        for item in self._plan.place_objects(object_lengths):
            place = dcp.MetadataIndex(item.unique_key), _StorageInfo(item.file, item.start, item.length)
            tensors += [_constant(item.unique_key), entry]
            storage += map(_constant, place)
        values = {
            "state_dict_metadata": _dict_of(tensors),
            "planner_data": _NONE,
            "storage_data": _dict_of(storage),
            "storage_meta": _constant(dcp.StorageMeta(checkpoint_id=str(folder), save_id=str(uuid.uuid4()))),
            "version": _constant(_DCP_VERSION),
        }
        # Old versions of torch have no version field.
        known = {field.name for field in dataclasses.fields(dcp.Metadata)}
        fields = [_constant(name) + value for name, value in values.items() if name in known]
        whole = [_constant(dcp.Metadata), _NEW, _dict_of(fields), _BUILD]
        return b"".join([*self._program.parts, *whole, _END])


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows without repetitions, and for each row which of those it is."""
    if not rows.shape[1]:
        return rows[:1], np.zeros(len(rows), dtype=np.int64)
    order = np.lexsort(rows.T)
    in_order = rows[order]
    is_new = np.concatenate(([True], (in_order[1:] != in_order[:-1]).any(axis=1)))[: len(rows)]
    which = np.empty(len(rows), dtype=np.int64)
    which[order] = np.cumsum(is_new) - 1
    return in_order[is_new], which


def _dict_of(pairs: Sequence[bytes]) -> bytes:
    return b"".join([_EMPTY_DICT, _MARK, *pairs, _SET_ITEMS])


def _without_repeats(plan: GlobalSavePlan) -> np.ndarray:
    """Return the blocks to list: those of a tensor without elements lie at one place, and one is enough."""
    is_empty = np.array([not volume(shape) for shape in plan.blocks.shapes], dtype=bool)[plan.blocks.key_of]
    _, first = np.unique(plan.blocks.key_of, return_index=True)
    is_first = np.zeros(len(plan.blocks), dtype=bool)
    is_first[first] = True
    return np.flatnonzero(~is_empty | is_first)
