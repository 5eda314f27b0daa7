"""Text to token files: reads documents, encodes them in processes, writes them in the order of the input.

A plain text file is one document; a JSON lines file has one in each line. Nothing here imports torch, so that a worker
process starts quickly.
"""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from megalite.data.indexed_dataset import IndexedDatasetWriter, best_dtype, bin_path, idx_path
from megalite.data.tokenizers import build_tokenizer
from megalite.utils.errors import ConfigError, DataError

JSONL_SUFFIXES = (".jsonl", ".json")

_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 4096
_PENDING_PER_WORKER = 4
_REPORT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What to read, how to encode it, where to put it."""

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer_type: str = "ByteTokenizer"
    vocab_size: int | None = None
    json_key: str = "text"
    jsonl: bool = False
    append_eod: bool = True
    workers: int = 1
    overwrite: bool = False
    skip_bad_lines: bool = False


@dataclass
class PreprocessCounts:
    """How far the work is; sizes in bytes."""

    input_size: int = 0
    bytes_read: int = 0
    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bad_lines: int = 0


@dataclass(frozen=True)
class _Chunk:
    """Raw documents; ``numbers`` are their lines in ``path``, empty for a plain file."""

    path: Path
    documents: list[bytes]
    numbers: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray
    lengths: np.ndarray
    bytes_read: int
    empty_documents: int
    bad_lines: int


def _text_of_line(line: bytes, key: str) -> str:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"it holds {type(record).__name__}, not an object")
    if key not in record:
        raise ValueError(f"it has no key {key!r}, only {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[key], str):
        raise ValueError(f"{key!r} holds {type(record[key]).__name__}, not a text")
    # JSON can write half of a character pair, which is no text in any encoding.
    record[key].encode("utf-8")
    return record[key]


def _texts(chunk: _Chunk, options: PreprocessOptions) -> Iterator[str | None]:
    """Yield the text of each document, None for a bad line that is skipped."""
    if not chunk.numbers:
        try:
            yield chunk.documents[0].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{chunk.path} is not UTF-8: byte {error.start} cannot be read ({error.reason}). Convert the file, for "
                "example with iconv -t utf-8."
            ) from error
        return
    for number, line in zip(chunk.numbers, chunk.documents, strict=True):
        if not line.strip():
            yield ""
            continue
        try:
            text = _text_of_line(line, options.json_key)
        except (ValueError, RecursionError) as error:
            if not options.skip_bad_lines:
                raise DataError(
                    f"{chunk.path}:{number} is not a usable JSON line: {error}. Correct it, set --json-key, or count "
                    "such lines with --skip-bad-lines."
                ) from error
            yield None
            continue
        yield text


def _encode(chunk: _Chunk, options: PreprocessOptions) -> _Encoded:
    """Return the tokens of a chunk; runs in a worker process."""
    tokenizer = build_tokenizer(options.tokenizer_type, options.vocab_size)
    dtype = best_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eod] if options.append_eod else [], dtype=dtype)
    pieces: list[np.ndarray] = [np.empty(0, dtype)]
    lengths: list[int] = []
    empty = bad = 0
    for text in _texts(chunk, options):
        if text is None:
            bad += 1
        elif not text or text.isspace():
            empty += 1
        else:
            try:
                ids = tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{chunk.path}{_line(chunk, len(lengths) + empty + bad)}: {error}") from error
            pieces += (ids, end)
            lengths.append(len(ids) + len(end))
    tokens = np.concatenate(pieces).astype(dtype, copy=False)
    return _Encoded(tokens, np.array(lengths, dtype=np.int64), chunk.size, empty, bad)


def _line(chunk: _Chunk, place: int) -> str:
    return f":{chunk.numbers[place]}" if chunk.numbers else ""


def _read_chunks(options: PreprocessOptions) -> Iterator[_Chunk]:
    """Yield the input in order, cut into pieces of a few megabytes at most unless one document is larger."""
    for path in options.inputs:
        if not options.jsonl and path.suffix not in JSONL_SUFFIXES:
            yield _Chunk(path, [path.read_bytes()])
            continue
        documents: list[bytes] = []
        size, first = 0, 1
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                documents.append(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                size += len(line)
                if size >= _CHUNK_BYTES or len(documents) >= _CHUNK_DOCUMENTS:
                    yield _Chunk(path, documents, list(range(first, number + 1)))
                    documents, size, first = [], 0, number + 1
        if documents:
            yield _Chunk(path, documents, list(range(first, first + len(documents))))


def _ignore_interrupts() -> None:
    # Ctrl-C reaches all processes of a terminal; the main one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encode_all(options: PreprocessOptions) -> Iterator[_Encoded]:
    """Yield encoded chunks in the order of the input, with a bounded number of them in memory."""
    if options.workers == 1:
        for chunk in _read_chunks(options):
            yield _encode(chunk, options)
        return
    pending: deque[Future[_Encoded]] = deque()
    # Not a multiprocessing.Pool: it waits for ever when a worker is killed, and reads the input without bound.
    with ProcessPoolExecutor(options.workers, get_context("forkserver"), _ignore_interrupts) as pool:
        try:
            for chunk in _read_chunks(options):
                pending.append(pool.submit(_encode, chunk, options))
                if len(pending) > options.workers * _PENDING_PER_WORKER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {options.workers} worker processes died while reading {options.inputs[0]} and what follows. "
                "It was killed or ran out of memory: use fewer --workers or smaller documents."
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _check(options: PreprocessOptions) -> int:
    """Return the size of the input, or raise before any work is done."""
    if options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; give 1 or more.")
    if not options.inputs:
        raise ConfigError("no input file was given; name one or more with --input.")
    size = 0
    for path in options.inputs:
        if not path.is_file():
            state = "is not a file" if path.exists() else "does not exist"
            raise DataError(f"the input {path} {state}. Give text or JSON lines files.")
        size += path.stat().st_size
    folder = options.output_prefix.parent
    if not folder.is_dir():
        raise ConfigError(f"the output folder {folder} of {options.output_prefix} does not exist. Create it first.")
    outputs = (bin_path(options.output_prefix), idx_path(options.output_prefix))
    existing = next((path for path in outputs if path.exists()), None)
    if existing is not None and not options.overwrite:
        raise ConfigError(f"the output {existing} exists already. Choose another --output-prefix or add --overwrite.")
    return size


def preprocess(
    options: PreprocessOptions, report: Callable[[PreprocessCounts], None] = lambda counts: None
) -> PreprocessCounts:
    """Write the dataset and return the counts; ``report`` is called twice a second with those so far.

    The files are the same for any number of workers. When this raises, whatever was at the output prefix is unchanged
    and nothing was added to it. Documents without text, or with nothing but white space, are counted and left out.
    """
    counts = PreprocessCounts(input_size=_check(options))
    tokenizer = build_tokenizer(options.tokenizer_type, options.vocab_size)
    dtype = best_dtype(tokenizer.vocab_size)
    try:
        with IndexedDatasetWriter(
            options.output_prefix, dtype, tokenizer.name, tokenizer.vocab_size, tokenizer.eod
        ) as writer:
            _write(options, writer, counts, report)
    except OSError as error:
        raise DataError(
            f"{error.filename or options.output_prefix} cannot be read or written: {error.strerror}. Check the rights "
            "and the free space, then run again."
        ) from error
    return counts


def _write(
    options: PreprocessOptions,
    writer: IndexedDatasetWriter,
    counts: PreprocessCounts,
    report: Callable[[PreprocessCounts], None],
) -> None:
    reported = time.monotonic()
    for encoded in _encode_all(options):
        writer.add_documents(encoded.tokens, encoded.lengths)
        counts.documents, counts.tokens = writer.num_documents, writer.num_tokens
        counts.bytes_read += encoded.bytes_read
        counts.empty_documents += encoded.empty_documents
        counts.bad_lines += encoded.bad_lines
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            report(counts)
    if counts.documents == 0:
        raise DataError(
            f"the {len(options.inputs)} input files hold no text: {counts.empty_documents} empty documents, "
            f"{counts.bad_lines} bad lines. Nothing was written; check --input and --json-key."
        )
    writer.finalize()
