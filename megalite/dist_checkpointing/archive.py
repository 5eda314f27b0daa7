"""The records of a ``torch.save`` archive: a zip of uncompressed records, each with a checksum.

A zip can be read in more than one way: from its end or its start, with bytes before it, with records that share bytes,
with a name twice. Readers disagree about such files, so that what one has checked is not what the other loads. Here
only the one form that torch writes is accepted; everything else is damage.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from megalite.utils.errors import DamagedCheckpointError

ReadRange = Callable[[int, int], bytes | memoryview]
"""(first byte within the archive, length) -> exactly these bytes."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED = 1
_MAX_DIRECTORY = 16 << 20
"""An archive of a tensor has less than 1 KiB of directory; one of an object with 100,000 tensors has 10 MiB."""
_PIECE = 1 << 20


class _Malformed(Exception):
    """What is wrong with an archive."""


@functools.cache
def _fastest_crc32() -> Callable[..., int]:
    """Return zlib's function, or the same of isa-l, which is several times as fast."""
    try:
        from isal.isal_zlib import crc32 as fast
    except ImportError:
        return zlib.crc32
    return fast


def crc32(data: bytes | memoryview, start: int = 0) -> int:
    """Return the CRC-32 of zip files, continued from ``start``."""
    return _fastest_crc32()(data, start)


@dataclass(frozen=True)
class ArchiveRecord:
    """Where the content of a record lies within its archive."""

    name: str
    start: int
    size: int
    checksum: int


def find_records(read: ReadRange, length: int, where: str) -> list[ArchiveRecord]:
    """Return the records in the order of their bytes; CheckpointError when the archive is not as torch writes it.

    Only the directory and the records' headers are read.
    """
    try:
        directory, count, begin = _directory(read, length)
        entries = _entries(directory, count)
        return _located(read, entries, begin)
    except (_Malformed, struct.error, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{where} is damaged: {error}; use another checkpoint") from error


def check_records(read: ReadRange, records: list[ArchiveRecord], where: str) -> None:
    """Raise CheckpointError when the content of a record does not have its checksum; reads 1 MiB at a time.

    A checksum of 0 was not computed.
    """
    for record in records:
        if not record.checksum:
            continue
        found = 0
        for start in range(record.start, record.start + record.size, _PIECE):
            found = crc32(read(start, min(_PIECE, record.start + record.size - start)), found)
        if found != record.checksum:
            raise DamagedCheckpointError(
                f"{where} is damaged: the checksum of record {record.name} is {found:08x}, its archive says "
                f"{record.checksum:08x}; use another checkpoint"
            )


def _directory(read: ReadRange, length: int) -> tuple[bytes, int, int]:
    """Return the directory's bytes, its number of entries and where it begins."""
    end = length - _END.size
    if end < 0:
        raise _Malformed(f"{length} bytes are no archive")
    signature, disk, first_disk, here, count, size, begin, comment = _END.unpack(read(end, _END.size))
    if signature != b"PK\x05\x06" or disk or first_disk or here != count or comment:
        raise _Malformed("the end of the archive is not where it should be")
    locator = end - _LOCATOR64.size
    if locator >= _END64.size and bytes(read(locator, 4)) == b"PK\x06\x07":
        end = locator - _END64.size
        _, disk, place, disks = _LOCATOR64.unpack(read(locator, _LOCATOR64.size))
        signature, _, _, _, own, first_disk, here, count, size, begin = _END64.unpack(read(end, _END64.size))
        if signature != b"PK\x06\x06" or place != end or disk or own or first_disk or disks > 1 or here != count:
            raise _Malformed("the 64-bit end of the archive is not where it should be")
    if begin + size != end or size > _MAX_DIRECTORY or count * _ENTRY.size > size or not count:
        raise _Malformed(f"a directory of {count} records in {size} bytes at byte {begin} does not end at byte {end}")
    return bytes(read(begin, size)), count, begin


def _entries(directory: bytes, count: int) -> list[tuple[int, ArchiveRecord]]:
    """Return (header's place, record without start) of all entries."""
    found = []
    at = 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(directory, at)
        signature, flags, method, checksum, packed, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_length, extra_length, comment_length, disk = fields[10:14]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if signature != b"PK\x01\x02" or at > len(directory):
            raise _Malformed("its directory is cut short")
        name = directory[name_at:extra_at].decode("utf-8")
        packed, size, header = _wide(directory[extra_at : extra_at + extra_length], packed, size, fields[16])
        if method or packed != size or flags & _ENCRYPTED or disk:
            raise _Malformed(f"record {name} is compressed or encrypted")
        found.append((header, ArchiveRecord(name, 0, size, checksum)))
    if at != len(directory):
        raise _Malformed("its directory has bytes that belong to no record")
    return found


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return the values, those that do not fit 32 bits from the extra field."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide += struct.unpack_from(f"<{length // 8}Q", extra, at + 4)
        at += 4 + length
    needed = sum(value == _IN_EXTRA for value in values)
    if needed > len(wide):
        raise _Malformed("a 64-bit length is missing")
    rest = iter(wide)
    return tuple(next(rest) if value == _IN_EXTRA else value for value in values)


def _located(read: ReadRange, entries: list[tuple[int, ArchiveRecord]], end: int) -> list[ArchiveRecord]:
    """Return the records with their places: one after the other, none sharing a byte with another."""
    entries = sorted(entries, key=lambda entry: entry[0])
    limits = [header for header, _ in entries[1:]] + [end]
    records = []
    for (header, record), limit in zip(entries, limits, strict=True):
        if header + _LOCAL.size > limit:
            raise _Malformed(f"record {record.name} overlaps another or is cut short")
        fields = _LOCAL.unpack(read(header, _LOCAL.size))
        signature, flags, method, name_length, extra_length = fields[0], fields[2], fields[3], *fields[9:]
        start = header + _LOCAL.size + name_length + extra_length
        if start + record.size > limit:
            raise _Malformed(f"record {record.name} overlaps another or is cut short")
        name = bytes(read(header + _LOCAL.size, name_length))
        if signature != b"PK\x03\x04" or method or flags & _ENCRYPTED or name != record.name.encode():
            raise _Malformed(f"the header of record {record.name} says something else than the directory")
        records.append(ArchiveRecord(record.name, start, record.size, record.checksum))
    _check_names([record.name for record in records])
    return records


def _check_names(names: list[str]) -> None:
    # Torch looks records up without regard to case, in the folder that the first of them is in.
    folder = names[0].partition("/")[0]
    for name in names:
        if not name.startswith(f"{folder}/"):
            raise _Malformed(f"record {name} is not in folder {folder}")
    if len({name.lower() for name in names}) != len(names):
        raise _Malformed("a record is repeated")
