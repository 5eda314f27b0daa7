"""Hashes of the bytes of a checkpoint: taken while they are written, compared while they are read.

``sha256`` is Megatron's manifest ``integrity.json``: one hash per file, checked by reading whole files. ``xxh3`` is our
own ``integrity_xxh3.npz``: a 64-bit hash per MiB of every item, an order of magnitude faster, and checked in the pass
that reads an item anyway. Both find damage; neither protects against someone who can also write the manifest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from megalite.dist_checkpointing.core import (
    COMMON_FILE,
    INDEX_FILE,
    MARKER_FILE,
    is_file_name,
    read_entry,
    unreadable,
)
from megalite.dist_checkpointing.strategies.base import Piece
from megalite.utils.errors import CheckpointError, ConfigError, DamagedCheckpointError

Integrity = Literal["off", "xxh3", "sha256"]

SHA256_FILE = "integrity.json"
XXH3_FILE = "integrity_xxh3.npz"
BLOCK = 1 << 20
_READ_SIZE = 1 << 20
_SMALL_FILES = (COMMON_FILE, INDEX_FILE, MARKER_FILE)

Digest = str | np.ndarray | None
"""Of one file: lower-case hexadecimal (sha256), or the hashes of all blocks of its items in file order (xxh3)."""


def require_integrity(kind: Integrity) -> None:
    """Raise ConfigError when the hashes of ``kind`` cannot be computed here."""
    if kind == "xxh3" and importlib.util.find_spec("xxhash") is None:
        raise ConfigError(
            "checkpoint.verify_integrity is xxh3, but the package xxhash is not installed; install it with "
            "pip install xxhash, or choose sha256 or off"
        )


class Hasher:
    """Hashes one file while it is written, item by item."""

    def __init__(self, kind: Integrity) -> None:
        require_integrity(kind)
        self._sha256 = hashlib.sha256() if kind == "sha256" else None
        self._blocks: list[int] | None = [] if kind == "xxh3" else None

    def item(self, pieces: Iterable[Piece]) -> None:
        """Take the bytes of the next item."""
        if self._sha256 is not None:
            for piece in pieces:
                self._sha256.update(piece)
        if self._blocks is not None:
            self._blocks += block_hashes(pieces)

    def digest(self) -> Digest:
        """Return what belongs into the manifest; None when nothing is hashed."""
        if self._sha256 is not None:
            return self._sha256.hexdigest()
        return None if self._blocks is None else np.array(self._blocks, dtype=np.uint64)


def block_hashes(pieces: Iterable[Piece]) -> list[int]:
    """Return the xxh3 hash of each MiB of the bytes that ``pieces`` are together."""
    import xxhash

    hashes: list[int] = []
    open_block, filled = xxhash.xxh3_64(), 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part, rest = rest[: BLOCK - filled], rest[BLOCK - filled :]
            open_block.update(part)
            filled += len(part)
            if filled == BLOCK:
                hashes.append(open_block.intdigest())
                open_block, filled = xxhash.xxh3_64(), 0
    return hashes + [open_block.intdigest()] if filled else hashes


def block_hash(block: Piece) -> int:
    """Return the xxh3 hash of one block."""
    import xxhash

    return xxhash.xxh3_64_intdigest(block)


def hash_of(data: bytes, kind: Integrity) -> Digest:
    """Return the digest of a file that is one item."""
    hasher = Hasher(kind)
    hasher.item([data])
    return hasher.digest()


@dataclass(frozen=True)
class HashedFile:
    """A file with its digest and, in file order, (first byte, length) of its items."""

    name: str
    items: Sequence[tuple[int, int]]
    digest: Digest


def manifest(kind: Integrity, files: Sequence[HashedFile]) -> tuple[str, bytes] | None:
    """Return (name, content) of the manifest of ``files``; None when nothing is hashed."""
    files = sorted(files, key=lambda file: file.name)
    if kind == "sha256":
        content = {"algorithm": "sha256", "files": {file.name: file.digest for file in files}}
        return SHA256_FILE, json.dumps(content, indent=2).encode("ascii")
    if kind == "off":
        return None
    items = [(number, start, length) for number, file in enumerate(files) for start, length in file.items]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        block_size=np.array(BLOCK),
        files=np.array([file.name for file in files]),
        items=np.array(items, dtype=np.int64).reshape(len(items), 3),
        hashes=np.concatenate([np.asarray(file.digest, dtype=np.uint64) for file in files]),
    )
    return XXH3_FILE, buffer.getvalue()


@dataclass(frozen=True)
class ItemHashes:
    """The hashes of the blocks of one item."""

    where: str
    file: str
    place: tuple[int, int]
    name: str
    expected: np.ndarray

    def check(self, number: int, block: Piece) -> None:
        """Raise DamagedCheckpointError unless these are the bytes that were written as block ``number``."""
        self.compare(number, block_hash(block))

    def compare(self, number: int, found: int) -> None:
        """Raise DamagedCheckpointError unless ``found`` is the hash of block ``number``."""
        expected = int(self.expected[number])
        if found != expected:
            first = self.place[0] + number * BLOCK
            raise DamagedCheckpointError(
                f"{self.name} is damaged: bytes {first} to {min(first + BLOCK, self.place[1])} of {self.file} have "
                f"hash {found:016x}, {self.where} says {expected:016x}; use another checkpoint"
            )


class BlockHashes:
    """The parsed xxh3 manifest."""

    def __init__(self, data: bytes, where: str) -> None:
        self.where = where
        self._hashes, self._places = _parse_blocks(data, where)

    def check(self, file: str, start: int, length: int, pieces: Iterable[Piece], name: str) -> None:
        """Raise CheckpointError when the bytes of an item, in pieces, are not those that were written."""
        item = self.item(file, start, length, name)
        for number, found in enumerate(block_hashes(pieces)):
            item.compare(number, found)

    def item(self, file: str, start: int, length: int, name: str) -> ItemHashes:
        """Return the hashes of one item; CheckpointError when there are none."""
        place = self._places.get((file, start, length))
        if place is None:
            raise DamagedCheckpointError(
                f"{self.where} has no hash for bytes {start} to {start + length} of {file} ({name}): the manifest "
                "is of another save; use another checkpoint"
            )
        return ItemHashes(self.where, file, (start, start + length), name, self._hashes[place])

    @property
    def items(self) -> Iterator[tuple[str, int, int]]:
        """All items as (file, first byte, length)."""
        return iter(self._places)


def _parse_blocks(data: bytes, where: str) -> tuple[np.ndarray, dict[tuple[str, int, int], slice]]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(entry.compress_type or entry.file_size > len(data) for entry in archive.infolist()):
                raise ValueError("it has compressed arrays")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            block_size, files, items, hashes = (arrays[name] for name in ("block_size", "files", "items", "hashes"))
        if int(block_size) != BLOCK or files.dtype.kind != "U" or items.dtype != np.int64 or hashes.dtype != np.uint64:
            raise ValueError("arrays of another type or block size")
        if (items < 0).any() or items.shape[1] != 3 or hashes.ndim != 1:
            raise ValueError("an item has a negative place")
        ends = np.cumsum(-(-items[:, 2] // BLOCK)).tolist()
        if (ends[-1] if ends else 0) != len(hashes):
            raise ValueError(f"{len(hashes)} hashes for {ends[-1] if ends else 0} blocks")
        names = files.tolist()
        if not all(map(is_file_name, names)):
            raise ValueError("it names files outside the folder")
        starts = [0, *ends[:-1]]
        places = {
            (names[number], start, length): slice(begin, end)
            for (number, start, length), begin, end in zip(items.tolist(), starts, ends, strict=True)
        }
    # A damaged file can make the parser raise nearly anything.
    except Exception as error:
        raise DamagedCheckpointError(f"{where} is damaged: {error}; use another checkpoint") from error
    return hashes, places


def parse_sha256(data: bytes, where: str) -> dict[str, str]:
    """Return file name -> hash of Megatron's manifest; CheckpointError when it is not one."""
    try:
        content = json.loads(data)
        algorithm, files = content["algorithm"], content["files"]
        well_formed = all(re.fullmatch("[0-9a-f]{64}", value) and is_file_name(name) for name, value in files.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not a manifest: {error!r}; use another checkpoint") from error
    if algorithm != "sha256" or not well_formed:
        raise DamagedCheckpointError(
            f"{where} has algorithm {algorithm!r} or malformed entries, this reader knows sha256 of files in the "
            "folder; use another checkpoint"
        )
    return files


def sha256_of_file(path: Path) -> str:
    """Return the hash of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_SIZE):
            digest.update(piece)
    return digest.hexdigest()


def sha256_findings(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the listed files; files that are not listed do not matter."""
    findings = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.is_symlink():
            findings.append(f"{name} is missing")
        elif (found := sha256_of_file(path)) != expected:
            findings.append(f"{name} has sha256 {found[:16]}..., the manifest says {expected[:16]}...")
    return findings


def xxh3_findings(folder: Path, hashes: BlockHashes) -> list[str]:
    """Return what is wrong with the items of the manifest, read one after the other."""
    findings = []
    for name, start, length in hashes.items:
        path = folder / name
        if not path.is_file() or path.is_symlink():
            findings.append(f"{name} is missing")
            continue
        try:
            with open(path, "rb", buffering=0) as file:
                if start + length > os.fstat(file.fileno()).st_size:
                    findings.append(f"{name} is cut short: bytes {start} to {start + length} were written")
                else:
                    hashes.check(name, start, length, _blocks_of(file, start, length), f"{name} at byte {start}")
        except CheckpointError as error:
            findings.append(str(error))
        except OSError as error:
            findings.append(str(unreadable(path, error)))
    return list(dict.fromkeys(findings))


def _blocks_of(file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    file.seek(start)
    for first in range(0, length, BLOCK):
        yield file.read(min(BLOCK, length - first))


def verify_manifests(folder: Path) -> list[str]:
    """Return what the manifests of a folder find; nothing when there are none or all is well. One process."""
    findings: list[str] = []
    checks: tuple[tuple[str, Any], ...] = (
        (SHA256_FILE, lambda data, where: sha256_findings(folder, parse_sha256(data, where))),
        (XXH3_FILE, lambda data, where: xxh3_findings(folder, BlockHashes(data, where))),
    )
    for name, check in checks:
        path = folder / name
        if path.is_file():
            try:
                findings += check(read_entry(path), str(path))
            except CheckpointError as error:
                findings.append(str(error))
    return findings
