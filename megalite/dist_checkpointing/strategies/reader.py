"""The items that one rank needs: read once each, checked, and put where they belong.

The elements of a tensor lie in its archive as they lie in memory. Where a chunk fills a contiguous part of a tensor of
its type, they are read straight into it; else into one kept buffer, from which they are copied. What surrounds them, a
few hundred bytes, is read apart and compared with what torch writes; torch loads an archive that looks different.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.dist_checkpointing.archive import crc32
from megalite.dist_checkpointing.integrity import BlockHashes
from megalite.dist_checkpointing.strategies.base import ByteSource, ChunkRead, ItemFraming, LoadPlan, Piece, StoredItem
from megalite.dist_checkpointing.strategies.filesystem import FileSource
from megalite.utils.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes that are read and then hashed while they are in the processor's cache."""
_SURROUNDING = 4096
"""Both ends of an archive that are read at once: more than torch needs for its records beside the elements."""


class ItemReader:
    """Reads the items of a plan; with ``hashes`` every byte that is used is compared with what was written."""

    def __init__(self, folder: Path, framing: ItemFraming, hashes: BlockHashes | None = None) -> None:
        self.folder, self.framing, self.hashes = folder, framing, hashes
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, plan: LoadPlan) -> dict[str, Any]:
        """Fill the leaves of ``plan`` and return the loaded objects by unique key."""
        source = FileSource(self.folder)
        try:
            objects = {}
            for key, item in plan.objects:
                data = source.read(item.file, item.offset, item.length)
                self._check(item, [data], key)
                objects[key] = self.framing.parse_object(data, f"{key} in {self.folder / item.file}")
            for leaf in plan.zeroed:
                leaf.data.detach().zero_()
            for read in plan.chunks:
                self._fill(source, read)
        finally:
            source.close()
        return objects

    def _check(self, item: StoredItem, pieces: Iterable[Piece], name: str) -> None:
        if self.hashes is not None:
            self.hashes.check(item.file, item.offset, item.length, pieces, name)

    def _fill(self, source: ByteSource, read: ChunkRead) -> None:
        item, sizes = read.chunk.item, read.chunk.sizes
        where = f"{read.name}/{item.file}"
        ends = _Ends(source, item)
        found = self.framing.find_elements(ends.read, item.length, read.dtype, sizes, where)
        if found is None:
            logger.debug("%s is not laid out as torch saves a tensor: the whole archive is loaded", where)
            data = source.read(item.file, item.offset, item.length)
            self._check(item, [data], read.name)
            _copy_out(read, self.framing.parse_tensor(data, read.dtype, sizes, where))
            return
        target = _whole_target(read)
        raw = self._take(found.length) if target is None else target.reshape(-1).view(torch.uint8)
        pieces = _arriving(source, item.file, item.offset + found.start, memoryview(raw.numpy()))
        if self.hashes is not None:
            head, tail = ends.around(found.start, found.length)
            self._check(item, itertools.chain([head], pieces, [tail]), read.name)
        else:
            actual = functools.reduce(lambda checksum, piece: crc32(piece, checksum), pieces, 0)
            if found.checksum and actual != found.checksum:
                raise DamagedCheckpointError(
                    f"{where} is damaged: the checksum of its elements is {actual:08x}, its archive says "
                    f"{found.checksum:08x}; use another checkpoint"
                )
        if target is None:
            _copy_out(read, raw.view(read.dtype).view(sizes))

    def _take(self, length: int) -> torch.Tensor:
        """Return that many bytes of the kept buffer."""
        if len(self._buffer) < length:
            self._buffer = torch.empty(length, dtype=torch.uint8)
        return self._buffer[:length]


def _arriving(source: ByteSource, file: str, offset: int, target: memoryview) -> Iterator[memoryview]:
    """Fill ``target`` piece by piece, yielding each as soon as it is there."""
    for start in range(0, len(target), _PIECE):
        piece = target[start : start + _PIECE]
        source.read_into(file, offset + start, piece)
        yield piece


class _Ends:
    """The bytes of an item, of which those at both ends are read once and kept."""

    def __init__(self, source: ByteSource, item: StoredItem) -> None:
        self._source, self._item = source, item
        length = min(_SURROUNDING, item.length)
        self._head = source.read(item.file, item.offset, length)
        self._tail_start = item.length - length
        self._tail = source.read(item.file, item.offset + self._tail_start, length)

    def read(self, start: int, length: int) -> bytes:
        if start >= 0 and start + length <= len(self._head):
            return self._head[start : start + length]
        if start >= self._tail_start and start + length <= self._item.length:
            first = start - self._tail_start
            return self._tail[first : first + length]
        return self._source.read(self._item.file, self._item.offset + start, length)

    def around(self, start: int, length: int) -> tuple[bytes, bytes]:
        """Return the bytes before and behind these."""
        end = start + length
        return self.read(0, start), self.read(end, self._item.length - end)


def _whole_target(read: ChunkRead) -> torch.Tensor | None:
    """Return the part of a tensor that the chunk fills as it lies on disk; None where it has to be copied."""
    if len(read.copies) != 1:
        return None
    (copy,) = read.copies
    if copy.sizes != read.chunk.sizes or copy.leaf.dtype != read.dtype or copy.leaf.data.device.type != "cpu":
        return None
    target = copy.leaf.global_data
    for axis, (goal, size) in enumerate(zip(copy.target, copy.sizes, strict=True)):
        target = target.narrow(axis, goal, size)
    return target if target.is_contiguous() and target.numel() else None


def _copy_out(read: ChunkRead, tensor: torch.Tensor) -> None:
    for copy in read.copies:
        target, part = copy.leaf.global_data, tensor.detach()
        for axis, (start, goal, size) in enumerate(zip(copy.source, copy.target, copy.sizes, strict=True)):
            part = part.narrow(axis, start, size)
            target = target.narrow(axis, goal, size)
        target.copy_(part)
