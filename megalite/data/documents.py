"""Raw documents of input files: plain or JSON lines, as they are or compressed with gzip, or from standard input."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megalite.utils.errors import DataError

STDIN = Path("-")
"""Stands for standard input, which is JSON lines."""

JSONL_SUFFIXES = (".jsonl", ".json")
GZIP_SUFFIX = ".gz"

_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 4096


@dataclass(frozen=True)
class Chunk:
    """Raw documents; ``numbers`` are their lines in ``path``, empty for a plain file."""

    path: Path
    documents: list[bytes]
    bytes_read: int
    """Of the input as it lies on disk: less than the documents when it is compressed."""

    numbers: list[int] = field(default_factory=list)

    def where(self, place: int) -> str:
        """Return the file and, if there are lines, the line of a document."""
        name = name_of(self.path)
        return f"{name}:{self.numbers[place]}" if self.numbers else name


def name_of(path: Path) -> str:
    """Return how an input is called in messages."""
    return "standard input" if path == STDIN else str(path)


def read_chunks(inputs: Sequence[Path], jsonl: bool) -> Iterator[Chunk]:
    """Yield the input in order, cut into pieces of a few megabytes at most unless one document is larger.

    With ``jsonl`` every input is JSON lines, whatever its suffix. DataError for compressed data that is damaged.
    """
    for path in inputs:
        has_lines = jsonl or path == STDIN or _suffix(path) in JSONL_SUFFIXES
        try:
            if path == STDIN:
                yield from _lines(path, sys.stdin.buffer, None)
                continue
            with open(path, "rb") as raw:
                if path.suffix != GZIP_SUFFIX:
                    yield from _lines(path, raw, None) if has_lines else _whole(path, raw, None)
                    continue
                with gzip.GzipFile(fileobj=raw) as file:
                    yield from _lines(path, file, raw) if has_lines else _whole(path, file, raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{name_of(path)} is no whole gzip file: {error}. Copy it again, or give it a name without "
                f"{GZIP_SUFFIX} if it is not compressed."
            ) from error


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(GZIP_SUFFIX)).suffix


def _whole(path: Path, file: BinaryIO, compressed: BinaryIO | None) -> Iterator[Chunk]:
    document = file.read()
    yield Chunk(path, [document], len(document) if compressed is None else compressed.tell())


def _lines(path: Path, file: BinaryIO, compressed: BinaryIO | None) -> Iterator[Chunk]:
    documents: list[bytes] = []
    size, first, position = 0, 1, 0

    def chunk() -> Chunk:
        read = size if compressed is None else compressed.tell() - position
        return Chunk(path, documents, read, list(range(first, first + len(documents))))

    for number, line in enumerate(file, 1):
        documents.append(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        size += len(line)
        if size >= _CHUNK_BYTES or len(documents) >= _CHUNK_DOCUMENTS:
            piece = chunk()
            yield piece
            documents, size, first, position = [], 0, number + 1, position + piece.bytes_read
    if documents:
        yield chunk()
