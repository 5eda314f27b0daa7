"""The item format of ``torch_dist``: every item is a ``torch.save`` archive of its own.

The archive of a tensor is laid out here instead of by ``torch.save``: its length then follows from dtype and shape,
so that a plan is complete before anything is written, and the elements go to disk straight from the tensor's memory.
Records, order and 64-byte alignment are those of torch; the pickle comes from the tensor's own reduction.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import torch

from megalite.dist_checkpointing.archive import ReadRange, check_records, crc32, find_records
from megalite.dist_checkpointing.mapping import Shape
from megalite.dist_checkpointing.safe import archive_sizes, load_archive, load_checked_archive, require_modest
from megalite.dist_checkpointing.strategies.base import Piece
from megalite.utils.errors import DamagedCheckpointError

_ALIGNMENT = 64
_FIELD_LIMIT = 0xFFFFFFFF
_UTF8_NAMES = 0x0800
_LOCAL_CHECKSUM = 14
"""Where the checksum stands in a record's header, and in its entry of the directory below."""
_DIRECTORY_CHECKSUM = 16


@dataclass(frozen=True)
class Elements:
    """The bytes of a tensor's elements within its archive."""

    start: int
    length: int
    checksum: int
    """CRC-32, or 0 if it was not computed."""
    is_certain: bool
    """Whether all that surrounds them is what is written here, byte for byte, so that nothing else can lie there."""


class TorchSaveFraming:
    """Items as ``torch.load`` and Megatron read them; objects are wrapped in a list of one.

    ``zip64_from`` is the record size from which the 64-bit zip fields are used.
    """

    def __init__(self, zip64_from: int = _FIELD_LIMIT) -> None:
        self._zip64_from = zip64_from

    def tensor_length(self, dtype: torch.dtype, shape: Shape) -> int:
        frame = _frame(dtype, tuple(shape), self._zip64_from)
        return len(frame.head) + math.prod(shape) * dtype.itemsize + len(frame.tail)

    def frame_tensor(self, tensor: torch.Tensor) -> list[Piece]:
        # A flat byte view: also types that numpy does not know (bfloat16, float8) have one.
        elements = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        frame = _frame(tensor.dtype, tuple(tensor.shape), self._zip64_from)
        head, tail = frame.around(crc32(elements))
        return [head, elements, tail]

    def frame_object(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save([value], buffer)
        return buffer.getvalue()

    def parse_tensor(self, data: bytes, dtype: torch.dtype, shape: Shape, where: str) -> torch.Tensor:
        sizes = archive_sizes(data, where)
        storage = sum(size for name, size in sizes.items() if "/data/" in name)
        expected = math.prod(shape) * dtype.itemsize
        # Checked before torch builds the tensor: old versions trusted the pickle about the size of the storage.
        if storage < expected:
            raise DamagedCheckpointError(
                f"{where} holds {storage} bytes of elements, {dtype} {shape} needs {expected}; use another checkpoint"
            )
        tensor = load_checked_archive(data, where)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = (
                f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise DamagedCheckpointError(
                f"{where} holds {found}, the index says {dtype} {shape}; use another checkpoint"
            )
        return tensor

    def find_elements(
        self, read: ReadRange, length: int, dtype: torch.dtype, shape: Shape, where: str
    ) -> Elements | None:
        """Return where the elements lie in the archive of such a tensor, reading only what surrounds them.

        None when it is not laid out as torch does it for a contiguous tensor on the CPU: then the whole archive has to
        be loaded.
        """
        frame, size = _frame(dtype, shape, self._zip64_from), math.prod(shape) * dtype.itemsize
        if length == len(frame.head) + size + len(frame.tail):
            head, tail = read(0, len(frame.head)), read(length - len(frame.tail), len(frame.tail))
            checksum = frame.checksum_in(head)
            if (head, tail) == frame.around(checksum):
                # Byte for byte what is written here: nothing is left to parse.
                return Elements(len(head), size, checksum, is_certain=True)
        records = {record.name.partition("/")[2]: record for record in find_records(read, length, where)}
        elements, described = records.pop("data/0", None), records.get("data.pkl")
        if elements is None or described is None or elements.size != math.prod(shape) * dtype.itemsize:
            return None
        check_records(read, list(records.values()), where)
        order = records.get("byteorder")
        is_plain = bytes(read(described.start, described.size)) == _tensor_pickle(dtype, shape)
        if not is_plain or (order is not None and bytes(read(order.start, order.size)) != b"little"):
            return None
        return Elements(elements.start, elements.size, elements.checksum, is_certain=False)

    def parse_object(self, data: bytes, where: str) -> Any:
        value = load_archive(data, where)
        if not isinstance(value, list) or len(value) != 1:
            raise DamagedCheckpointError(f"{where} holds no list of one object; use another checkpoint")
        require_modest(value, where)
        return value[0]


@dataclass(frozen=True)
class _Frame:
    """The bytes before and after the elements of a tensor, in which only the checksum depends on the elements."""

    head: bytes
    tail: bytes
    checksum_in_head: int
    checksum_in_tail: int

    def around(self, checksum: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after elements that have this checksum."""
        packed = struct.pack("<I", checksum)
        head, tail = bytearray(self.head), bytearray(self.tail)
        head[self.checksum_in_head : self.checksum_in_head + 4] = packed
        tail[self.checksum_in_tail : self.checksum_in_tail + 4] = packed
        return bytes(head), bytes(tail)

    def checksum_in(self, head: bytes | memoryview) -> int:
        """Return the checksum that stands in bytes of this form."""
        return struct.unpack_from("<I", head, self.checksum_in_head)[0]


# Tensors of one type and shape are many: every layer has the same, and so has every moment.
@functools.lru_cache(maxsize=1 << 14)
def _frame(dtype: torch.dtype, shape: Shape, zip64_from: int) -> _Frame:
    archive = _Archive(zip64_from)
    archive.add("data.pkl", _tensor_pickle(dtype, shape))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add("byteorder", b"little")
    checksum_in_head = archive.buffer.tell() + _LOCAL_CHECKSUM
    head_length = archive.add_outside("data/0", math.prod(shape) * dtype.itemsize)
    archive.add("version", b"3\n")
    checksum_in_tail = archive.finish("data/0") - head_length
    written = archive.buffer.getvalue()
    return _Frame(written[:head_length], written[head_length:], checksum_in_head, checksum_in_tail)


def _tensor_pickle(dtype: torch.dtype, shape: Shape) -> bytes:
    """Return the ``data.pkl`` of a contiguous CPU tensor of this type and shape."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    stand_in = _Reduced(rebuild, (arguments[0], 0, tuple(shape), strides, *arguments[4:]))
    buffer = io.BytesIO()
    _TensorPickler(buffer, math.prod(shape), dtype.itemsize).dump(stand_in)
    return buffer.getvalue()


class _Reduced:
    """Pickles as the call of ``function`` with ``arguments``."""

    def __init__(self, function: Any, arguments: tuple) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self._call


class _TensorPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, numel: int, itemsize: int) -> None:
        super().__init__(buffer, protocol=2)
        self._numel, self._itemsize = numel, itemsize

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            return ("storage", getattr(torch, obj._pickle_storage_type()), "0", "cpu", self._numel)
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, "0", "cpu", self._numel * self._itemsize)
        return None


class _Archive:
    """A zip of uncompressed records, aligned as torch does it, one of which may lie outside the buffer."""

    def __init__(self, zip64_from: int) -> None:
        self.buffer = io.BytesIO()
        self._zip64_from = zip64_from
        self._outside = 0
        self._directory: list[tuple[bytes, int, int, int]] = []

    def add(self, name: str, content: bytes) -> None:
        self._local_header(name, len(content), crc32(content))
        self.buffer.write(content)

    def add_outside(self, name: str, size: int) -> int:
        """Announce a record whose bytes and checksum the caller puts in; returns where in the buffer they belong."""
        self._local_header(name, size, 0)
        self._outside = size
        return self.buffer.tell()

    def _position(self) -> int:
        return self.buffer.tell() + self._outside

    def _local_header(self, name: str, size: int, checksum: int) -> None:
        path = _path_of(name)
        position = self._position()
        large = size >= self._zip64_from
        extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        start = position + 30 + len(path) + len(extra) + 4
        padding = -start % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        shown = _FIELD_LIMIT if large else size
        version = 45 if large else 0
        fields = (b"PK\x03\x04", version, _UTF8_NAMES, 0, 0, 0, checksum, shown, shown, len(path), len(extra))
        self.buffer.write(struct.pack("<4sHHHHHIIIHH", *fields) + path + extra)
        self._directory.append((path, position, size, checksum))

    def finish(self, name: str) -> int:
        """Write the directory; returns where in the buffer the checksum of record ``name`` stands in it."""
        found = 0
        start = self._position()
        large_archive = start >= self._zip64_from
        for path, position, size, checksum in self._directory:
            large = size >= self._zip64_from
            far = position >= self._zip64_from
            values = [size, size] * large + [position] * far
            extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
            shown = _FIELD_LIMIT if large else size
            where = _FIELD_LIMIT if far else position
            version = 45 if values else 0
            if path == _path_of(name):
                found = self.buffer.tell() + _DIRECTORY_CHECKSUM
            fields = (b"PK\x01\x02", 0, version, _UTF8_NAMES, 0, 0, 0, checksum, shown, shown)
            fields += (len(path), len(extra), 0, 0, 0, 0, where)
            self.buffer.write(struct.pack("<4sHHHHHHIIIHHHHHII", *fields) + path + extra)
        count, length = len(self._directory), self._position() - start
        if large_archive:
            end = self._position()
            fields = (b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
            self.buffer.write(struct.pack("<4sQHHIIQQQQ", *fields))
            self.buffer.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        shown_start = _FIELD_LIMIT if large_archive else start
        self.buffer.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, length, shown_start, 0))
        return found


def _path_of(name: str) -> bytes:
    return b"archive/" + name.encode()
