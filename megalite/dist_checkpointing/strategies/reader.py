"""The items that one rank needs: read once each, checked, and put where they belong.

The elements of a tensor lie in its archive as they lie in memory. What a tensor needs of a chunk as it lies on disk is
read straight into it; else into a kept buffer, from which it is copied. What surrounds the elements, a few hundred
bytes, is read apart and compared with what torch writes; torch loads an archive that looks different.

Of a chunk that is not needed whole only the needed ranges are read (``ranges`` has the rule), with hashes rounded to
their blocks. It is read whole all the same when its archive is not byte for byte of our making, since damage of a
header could then move the elements; and, without hashes, when nearly all of it is needed.

What is checked: with hashes every byte that is used; without, the archive's checksum of every chunk that is read whole.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.archive import crc32
from megalite.dist_checkpointing.integrity import BLOCK, BlockHashes, ItemHashes
from megalite.dist_checkpointing.strategies.base import ByteSource, ChunkRead, Copy, ItemFraming, LoadPlan, StoredItem
from megalite.dist_checkpointing.strategies.filesystem import FileSource
from megalite.dist_checkpointing.strategies.framing import Elements
from megalite.dist_checkpointing.strategies.ranges import Range, needed_ranges, runs_of
from megalite.dist_checkpointing.strategies.staging import HostBuffer
from megalite.utils.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes that are read and then hashed while they are in the processor's cache."""
_SURROUNDING = 4096
"""Both ends of an archive that are read at once: more than torch needs for its records beside the elements."""
_SHORT = 64 << 10
"""Items up to this length are read with one call."""
_NEARLY_WHOLE = 0.95
"""Part of a chunk from which on all of it is read, so that its checksum can be compared."""
_MOST_THREADS = 4
_WORTH_THREADS = 16 << 20
"""Bytes from which on threads are worth their start."""


@dataclass(frozen=True)
class _Destination:
    """Where the elements [first, end) of an item, in bytes, are read to."""

    first: int
    end: int
    target: memoryview


class ItemReader:
    """Reads the items of a plan; with ``hashes`` every byte that is used is compared with what was written."""

    def __init__(self, folder: Path, framing: ItemFraming, hashes: BlockHashes | None = None) -> None:
        self.folder, self.framing, self.hashes = folder, framing, hashes

    def read(self, plan: LoadPlan) -> dict[str, Any]:
        """Fill the leaves of ``plan`` and return the loaded objects by unique key.

        Of several damaged items the first one of the plan is reported.
        """
        with _Lane(self) as lane:
            objects = {key: lane.read_object(key, item) for key, item in plan.objects}
            for leaf in plan.zeroed:
                leaf.data.detach().zero_()
            _wait_for_devices(plan)
            num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(plan.chunks))
            if num_threads < 2 or sum(read.chunk.item.length for read in plan.chunks) < _WORTH_THREADS:
                for read in plan.chunks:
                    lane.fill(read)
                return objects
        _fill_in_threads(self, plan.chunks, num_threads)
        _wait_for_devices(plan)
        return objects


def _wait_for_devices(plan: LoadPlan) -> None:
    """Let what is queued for the plan's tensors be done: each thread queues on a stream of its own."""
    leaves = [*plan.zeroed, *(copy.leaf for read in plan.chunks for copy in read.copies)]
    for device in {leaf.data.device for leaf in leaves if leaf.data.is_cuda}:
        torch.cuda.synchronize(device)


def _fill_in_threads(reader: ItemReader, chunks: Sequence[ChunkRead], num_threads: int) -> None:
    """Fill chunks in several threads, each with open files and a buffer of its own."""
    local = threading.local()
    lanes: list[_Lane] = []

    def fill(read: ChunkRead) -> None:
        if not hasattr(local, "lane"):
            local.lane = _Lane(reader)
            lanes.append(local.lane)
        local.lane.fill(read)

    with ThreadPoolExecutor(num_threads) as threads:
        waiting = [threads.submit(fill, read) for read in chunks]
        try:
            for done in waiting:
                done.result()
        finally:
            for rest in waiting:
                rest.cancel()
            threads.shutdown()
            for lane in lanes:
                lane.close()


class _Lane:
    """What reads one item after the other: open files and a kept buffer."""

    def __init__(self, reader: ItemReader) -> None:
        self.reader = reader
        self.source: ByteSource = FileSource(reader.folder)
        self._buffer: HostBuffer | None = None
        self._block = memoryview(bytearray(BLOCK)) if reader.hashes is not None else memoryview(b"")

    def __enter__(self) -> _Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.source.close()

    def read_object(self, key: str, item: StoredItem) -> Any:
        data = self.source.read(item.file, item.offset, item.length)
        self._check_whole(item, data, key)
        return self.reader.framing.parse_object(data, f"{key} in {self.reader.folder / item.file}")

    def _check_whole(self, item: StoredItem, data: bytes, name: str) -> None:
        if self.reader.hashes is not None:
            self.reader.hashes.check(item.file, item.offset, item.length, [data], name)

    def fill(self, read: ChunkRead) -> None:
        """Put what is needed of one chunk where it belongs."""
        item, sizes = read.chunk.item, read.chunk.sizes
        where = f"{read.name}/{item.file}"
        content = _ItemBytes(self.source, item)
        framing, hashes = self.reader.framing, self.reader.hashes
        found = framing.find_elements(content.read, item.length, read.dtype, sizes, where)
        if found is None:
            logger.debug("%s is not laid out as torch saves a tensor: the whole archive is loaded", where)
            data = content.read(0, item.length)
            self._check_whole(item, data, read.name)
            _copy_out(read, framing.parse_tensor(data, read.dtype, sizes, where))
            return
        destinations, buffer = self._destinations(read, found)
        is_whole = sum(to.end - to.first for to in destinations) == found.length
        if hashes is not None:
            own = hashes.item(item.file, item.offset, item.length, read.name)
            _read_checked(content, destinations, own, self._block, is_whole)
        elif is_whole:
            _read_whole(content, destinations, found, where)
        else:
            for to in destinations:
                content.read_into(to.first, to.target)
        if buffer is not None:
            _copy_out(read, buffer.view(read.dtype).view(sizes))

    def _destinations(self, read: ChunkRead, found: Elements) -> tuple[list[_Destination], torch.Tensor | None]:
        """Return what is read to where, and the buffer from which it has to be copied, if it does not go straight."""
        sizes = read.chunk.sizes
        runs = [runs_of(copy.source, copy.sizes, sizes, read.dtype.itemsize) for copy in read.copies]
        ranges = needed_ranges(runs)
        part = sum(end - first for first, end in ranges)
        if not found.is_certain or (self.reader.hashes is None and part >= _NEARLY_WHOLE * found.length):
            ranges, part = [(0, found.length)] if ranges else [], found.length
        direct = _direct_targets(read, runs, ranges)
        if direct is not None:
            return [_Destination(found.start + a, found.start + b, target) for (a, b), target in direct], None
        raw = self._take(found.length, is_whole=part == found.length)
        bytes_of = memoryview(raw.numpy())
        return [_Destination(found.start + a, found.start + b, bytes_of[a:b]) for a, b in ranges], raw

    def _take(self, length: int, is_whole: bool) -> torch.Tensor:
        """Return that many bytes of the kept buffer; of one that is not filled whole, pages that stay empty cost
        nothing."""
        if self._buffer is None or self._buffer.size < length:
            # The old one first: two at a time would be needed by nobody.
            self._buffer = None
            self._buffer = HostBuffer(length, populate=is_whole)
        return self._buffer.bytes[:length]


def _read_whole(content: _ItemBytes, destinations: Sequence[_Destination], found: Elements, where: str) -> None:
    """Read all elements and compare them with the checksum of their archive, if it has one."""
    actual = 0
    for to in destinations:
        for start in range(0, len(to.target), _PIECE):
            piece = to.target[start : start + _PIECE]
            content.read_into(to.first + start, piece)
            actual = crc32(piece, actual) if found.checksum else 0
    if actual != found.checksum:
        raise DamagedCheckpointError(
            f"{where} is damaged: the checksum of its elements is {actual:08x}, its archive says "
            f"{found.checksum:08x}; use another checkpoint"
        )


def _read_checked(
    content: _ItemBytes,
    destinations: Sequence[_Destination],
    hashes: ItemHashes,
    scratch: memoryview,
    is_whole: bool,
) -> None:
    """Read every block that has some of the destinations' bytes, once, and compare its hash."""
    blocks: dict[int, list[_Destination]] = {}
    if is_whole:
        # Then the blocks that have none are those of what surrounds the elements: they are compared as well.
        blocks = {number: [] for number in range(-(-content.length // BLOCK))}
    for to in destinations:
        for number in range(to.first // BLOCK, -(-to.end // BLOCK)):
            blocks.setdefault(number, []).append(to)
    for number, members in sorted(blocks.items()):
        first, end = number * BLOCK, min((number + 1) * BLOCK, content.length)
        if len(members) == 1 and members[0].first <= first and end <= members[0].end:
            # Straight to its place, and hashed there while it is in the processor's cache.
            block = members[0].target[first - members[0].first : end - members[0].first]
        else:
            block = scratch[: end - first]
        content.read_into(first, block)
        hashes.check(number, block)
        for to in members if block.obj is scratch.obj else ():
            low, high = max(first, to.first), min(end, to.end)
            to.target[low - to.first : high - to.first] = block[low - first : high - first]


class _ItemBytes:
    """The bytes of an item, of which those at both ends are read once and kept."""

    def __init__(self, source: ByteSource, item: StoredItem) -> None:
        self._source, self._item = source, item
        self.length = item.length
        if item.length <= _SHORT:
            self._head = self._tail = source.read(item.file, item.offset, item.length)
            self._tail_start = 0
        else:
            self._head = source.read(item.file, item.offset, _SURROUNDING)
            self._tail_start = item.length - _SURROUNDING
            self._tail = source.read(item.file, item.offset + self._tail_start, _SURROUNDING)

    def read(self, start: int, length: int) -> bytes:
        if start >= 0 and start + length <= len(self._head):
            return self._head[start : start + length]
        if start >= self._tail_start and start + length <= self.length:
            first = start - self._tail_start
            return self._tail[first : first + length]
        return self._source.read(self._item.file, self._item.offset + start, length)

    def read_into(self, start: int, target: memoryview) -> None:
        if start + len(target) <= len(self._head):
            target[:] = self._head[start : start + len(target)]
        else:
            self._source.read_into(self._item.file, self._item.offset + start, target)


def _direct_targets(
    read: ChunkRead, runs: Sequence[np.ndarray], ranges: Sequence[Range]
) -> list[tuple[Range, memoryview]] | None:
    """Return the range of every copy and the memory that it fills as it lies on disk; None if one has to be copied."""
    targets = []
    for copy, own in zip(read.copies, runs, strict=True):
        target = _contiguous_target(read, copy)
        if target is None or len(own) != 1:
            return None
        first, end = own[0].tolist()
        targets.append(((first, end), memoryview(target.reshape(-1).view(torch.uint8).numpy())))
    targets.sort(key=lambda entry: entry[0])
    overlap = any(later[0] < earlier[1] for (earlier, _), (later, _) in itertools.pairwise(targets))
    if overlap or sum(end - first for (first, end), _ in targets) != sum(end - first for first, end in ranges):
        # Something is wanted twice or read through: all of it goes by way of the buffer, and is read once.
        return None
    return targets


def _contiguous_target(read: ChunkRead, copy: Copy) -> torch.Tensor | None:
    """Return the part of a tensor that a copy fills, if it lies there as it does on disk."""
    if copy.leaf.dtype != read.dtype or copy.leaf.data.device.type != "cpu":
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
