"""Token sequences on disk in Megatron's layout: ``<prefix>.bin`` holds the tokens, ``<prefix>.idx`` their places.

Little endian throughout. ``.idx`` is a header (magic, version, dtype code, S sequences, D document boundaries), then
int32 lengths [S], int64 byte offsets in ``.bin`` [S], int64 document boundaries [D] and, for multimodal data only, int8
modes [S]. Document i holds the sequences ``document_indices[i]`` up to ``document_indices[i + 1]``.
"""

from __future__ import annotations

import array
import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megalite.data.meta import DatasetMeta, meta_path, read_meta
from megalite.utils.errors import DataError
from megalite.utils.files import fsync_directory, write_durably

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(text) for code, text in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

MAX_UINT16_VOCAB = 65500
"""Vocabularies below this size are stored as uint16; the limit is Megatron's, so that files come out equal."""

_CHUNK = 1 << 22
_REBUILD = "Copy the file again or rebuild it with tools/preprocess_data.py --overwrite."


def bin_path(prefix: Path) -> Path:
    """Return ``<prefix>.bin``; a dot inside the prefix is part of the name."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """Return ``<prefix>.idx``; a dot inside the prefix is part of the name."""
    return Path(f"{prefix}.idx")


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron's writer picks for a vocabulary."""
    return np.dtype("<u2") if vocab_size < MAX_UINT16_VOCAB else np.dtype("<i4")


def pointers_from_lengths(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte offset of each sequence, int64 also where the lengths are int32 and their sum is not."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened: {error.strerror}. Set data.data_path to the prefix, without '.bin' or '.idx', "
            "of data made by tools/preprocess_data.py."
        ) from error


def _read_header(path: Path, size: int) -> tuple[np.dtype, int, int]:
    if size < HEADER.size:
        state = "empty" if size == 0 else "cut short"
        raise DataError(f"{path} is {state}: it has {size} bytes, its header alone has {HEADER.size}. {_REBUILD}")
    with _opening(path), open(path, "rb") as file:
        magic, version, code, sequences, boundaries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC:
        raise DataError(
            f"{path} is not an index of token sequences: it begins with {magic!r} instead of {MAGIC!r}. "
            "Set data.data_path to a prefix made by tools/preprocess_data.py or by Megatron."
        )
    if version != VERSION:
        raise DataError(f"{path} has format version {version}, this reader knows {VERSION}. {_REBUILD}")
    if code not in DTYPES:
        known = ", ".join(f"{number} ({dtype.name})" for number, dtype in DTYPES.items())
        raise DataError(f"{path} has dtype code {code}, known are {known}. {_REBUILD}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    # Multimodal data adds one byte a sequence, and nothing in the header says so.
    if size not in (expected, expected + sequences):
        problem = "cut short" if size < expected else "longer than it should be"
        raise DataError(
            f"{path} is {problem}: it has {size} bytes, {sequences} sequences and {boundaries} document boundaries "
            f"need {expected}. {_REBUILD}"
        )
    return DTYPES[code], sequences, boundaries


def _check_index(path: Path, index: _Index, bin_size: int) -> None:
    """Raise unless every sequence lies inside ``.bin`` and the documents cover all sequences in order."""
    sequences = len(index.sequence_lengths)
    for start in range(0, sequences, _CHUNK):
        lengths = index.sequence_lengths[start : start + _CHUNK].astype(np.int64)
        pointers = index.sequence_pointers[start : start + _CHUNK]
        outside = (lengths < 0) | (pointers < 0) | (pointers + lengths * index.dtype.itemsize > bin_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise DataError(
                f"{path} places sequence {start + at} ({lengths[at]} tokens of {index.dtype.itemsize} bytes at byte "
                f"{pointers[at]}) outside the .bin file of {bin_size} bytes. The files do not belong together or are "
                f"damaged. {_REBUILD}"
            )
    bounds = index.document_indices
    ordered = all((np.diff(bounds[s : s + _CHUNK + 1]) >= 0).all() for s in range(0, len(bounds), _CHUNK))
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != sequences or not ordered:
        found = f"{bounds[0]} to {bounds[-1]}" if len(bounds) else "nothing"
        raise DataError(
            f"{path} has document boundaries that run from {found} instead of rising from 0 to the {sequences} "
            f"sequences. {_REBUILD}"
        )


def _read_index(prefix: Path) -> _Index:
    path = idx_path(prefix)
    with _opening(path):
        size = path.stat().st_size
    with _opening(bin_path(prefix)):
        bin_size = bin_path(prefix).stat().st_size
    dtype, sequences, boundaries = _read_header(path, size)
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", boundaries, HEADER.size + 12 * sequences)
    needed = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if bin_size != needed:
        state = "empty" if bin_size == 0 else "cut short" if bin_size < needed else "longer than its index says"
        raise DataError(f"{bin_path(prefix)} is {state}: it has {bin_size} bytes, {path} needs {needed}. {_REBUILD}")
    index = _Index(dtype, lengths, pointers, bounds)
    _check_index(path, index, bin_size)
    return index


class IndexedDataset:
    """The sequences under a prefix, checked as a whole when opened.

    With ``mmap`` off ``.bin`` is read with positioned reads, which also suit file systems that map badly. Either way
    an instance may be used by forked and by spawned workers.
    """

    def __init__(self, prefix: Path | str, mmap: bool = True) -> None:
        self.prefix = Path(prefix)
        self.name = str(self.prefix)
        self.mmap = mmap
        index = _read_index(self.prefix)
        self.dtype = index.dtype
        self.sequence_lengths = index.sequence_lengths
        self.sequence_pointers = index.sequence_pointers
        self.document_indices = index.document_indices
        self.num_tokens = int(self.sequence_lengths.sum(dtype=np.int64))
        with _opening(bin_path(self.prefix)):
            self._file = open(bin_path(self.prefix), "rb", buffering=0)
        # A mapping of zero bytes is refused by the system.
        mapped = mmap and self.num_tokens > 0
        self._map = np.memmap(self._file, dtype=np.uint8, mode="r") if mapped else None

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path, bool]]:
        # A mapping would be pickled as a copy of the whole file.
        return IndexedDataset, (self.prefix, self.mmap)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens (default: the rest) of a sequence from ``offset`` on, read-only.

        Raises IndexError outside the dataset or the sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is outside {self.prefix} with {len(self)} sequences")
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} are outside sequence {index} of {self.prefix} with {available}"
            )
        start = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        if length == 0:
            return np.empty(0, self.dtype)
        if self._map is not None:
            return np.frombuffer(self._map, self.dtype, length, start)
        return np.frombuffer(self._read(start, length * self.dtype.itemsize), self.dtype)

    def _read(self, start: int, size: int) -> bytes:
        # pread keeps no file position, so that forked workers may share the descriptor.
        pieces = []
        while size > 0:
            piece = os.pread(self._file.fileno(), size, start)
            if not piece:
                path = bin_path(self.prefix)
                raise DataError(f"{path} ended {size} bytes early at byte {start}: it was cut while in use. {_REBUILD}")
            pieces.append(piece)
            start, size = start + len(piece), size - len(piece)
        return b"".join(pieces)

    def meta(self) -> DatasetMeta | None:
        """Return what ``<prefix>.meta.json`` says, or None for files of other tools."""
        return read_meta(self.prefix, self.num_tokens)

    def document_of(self, sequence: int) -> int:
        """Return the number of the document that holds a sequence."""
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1


class IndexedDatasetWriter:
    """Writes a dataset beside its final name; ``finalize`` makes it appear, leaving the block without it removes it.

    A context manager. Tokens that ``dtype`` cannot hold are a DataError, never a wrapped number.
    """

    def __init__(
        self,
        prefix: Path | str,
        dtype: np.dtype | type,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        eod: int | None = None,
        tokenizer_sha256: str | None = None,
    ) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            names = ", ".join(known.name for known in _CODES)
            raise DataError(f"{self.prefix} cannot hold tokens of type {self.dtype.name}; use one of {names}.")
        self.max_token_id = 0
        self.num_tokens = 0
        self._tokenizer, self._vocab_size, self._eod = tokenizer, vocab_size, eod
        self._tokenizer_sha256 = tokenizer_sha256
        # Typed arrays: a corpus of 100 million documents would need gigabytes as Python lists.
        self._lengths = array.array("i")
        self._bounds = array.array("q", [0])
        self._temporary = Path(f"{bin_path(self.prefix)}.tmp")
        self._file: BinaryIO | None = open(self._temporary, "wb")

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append a document of one sequence, or of several whose ``lengths`` add up to the tokens."""
        tokens = np.asarray(tokens)
        lengths = [len(tokens)] if lengths is None else list(lengths)
        self._append(tokens, np.asarray(lengths, dtype=np.int64))
        self._bounds.append(len(self._lengths))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append many documents of one sequence each, laid end to end in ``tokens``."""
        first = len(self._lengths) + 1
        self._append(tokens, lengths)
        self._bounds.frombytes(np.arange(first, first + len(lengths), dtype=np.int64).tobytes())

    def merge(self, other_prefix: Path | str) -> None:
        """Append all documents of another dataset of the same dtype and tokenizer."""
        other = IndexedDataset(other_prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix} holds {other.dtype.name}, {self.prefix} is written as {self.dtype.name}. Only equal "
                "types can be merged: make both with the same tokenizer."
            )
        meta = other.meta()
        theirs = (meta.tokenizer, meta.eod, meta.tokenizer_sha256) if meta is not None else (None, None, None)
        ours = (self._tokenizer, self._eod, self._tokenizer_sha256)
        if None not in (theirs[0], ours[0]) and theirs != ours:
            raise DataError(
                f"{other.prefix} was made with {theirs[0]} (end of document {theirs[1]}, file {theirs[2]}), "
                f"{self.prefix} with {ours[0]} ({ours[1]}, {ours[2]}). Make both with the same tokenizer."
            )
        shift = len(self._lengths)
        sequence = 0
        while sequence < len(other):
            # Copied by sequences, not bytes: a foreign file may keep them in another order than their numbers.
            ahead = other.sequence_lengths[sequence : sequence + 65536]
            taken = max(1, int(np.searchsorted(np.cumsum(ahead, dtype=np.int64), _CHUNK)))
            lengths = other.sequence_lengths[sequence : sequence + taken]
            pieces = [other.get(i) for i in range(sequence, sequence + len(lengths))]
            self._append(np.concatenate(pieces), lengths)
            sequence += len(lengths)
        self._bounds.frombytes((other.document_indices[1:] + shift).tobytes())

    def _append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        total = int(np.sum(lengths, dtype=np.int64))
        if total != len(tokens):
            raise DataError(
                f"{self.prefix}: sequence lengths add up to {total}, the document has {len(tokens)} tokens."
            )
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: a sequence of {int(np.max(lengths))} tokens is longer than the format's limit of "
                f"{np.iinfo(np.int32).max}. Cut the document."
            )
        if len(tokens) and self.dtype.kind != "f":
            self._check_range(int(tokens.min()), int(tokens.max()))
        assert self._file is not None, "the writer is closed"
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())
        self.num_tokens += len(tokens)

    def _check_range(self, smallest: int, largest: int) -> None:
        limit = int(np.iinfo(self.dtype).max)
        if smallest < 0 or largest > limit:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"{self.prefix}: token id {wrong} does not fit {self.dtype.name} (0 to {limit}). Use the dtype of "
                "best_dtype(vocab_size) and a tokenizer that stays inside its vocabulary."
            )
        self.max_token_id = max(self.max_token_id, largest)

    def finalize(self) -> None:
        """Flush the files to the device and give them their names, ``.idx`` last: where it is, the data is whole."""
        assert self._file is not None, "the writer is closed"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        bounds = np.frombuffer(self._bounds, dtype=np.int64)
        header = HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(bounds))
        pointers = pointers_from_lengths(lengths, self.dtype.itemsize)
        idx, meta = idx_path(self.prefix), meta_path(self.prefix)
        parts = (lengths.astype("<i4"), pointers.astype("<i8"), bounds.astype("<i8"))
        write_durably(Path(f"{idx}.tmp"), header + b"".join(part.tobytes() for part in parts))
        tokenizer = (self._tokenizer, self._vocab_size, self._eod, self._tokenizer_sha256)
        about = DatasetMeta(self.max_token_id, self.num_tokens, *tokenizer)
        write_durably(Path(f"{meta}.tmp"), about.to_bytes())
        # An old index must not meet new tokens when the process dies between two renames.
        idx.unlink(missing_ok=True)
        os.replace(self._temporary, bin_path(self.prefix))
        os.replace(f"{meta}.tmp", meta)
        os.replace(f"{idx}.tmp", idx)
        fsync_directory(self.prefix.parent)
        self._file = None

    def abort(self) -> None:
        """Remove what was written so far; does nothing after ``finalize``."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for path in (self._temporary, Path(f"{idx_path(self.prefix)}.tmp"), Path(f"{meta_path(self.prefix)}.tmp")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
