"""Text to token files: reads documents, encodes them in processes, writes them in the order of the input.

A plain text file is one document; a JSON lines file has one in each line. Nothing here imports torch, so that a worker
process starts quickly.
"""

from __future__ import annotations

import functools
import json
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from megalite.data.documents import GZIP_SUFFIX, STDIN, Chunk, name_of, read_chunks
from megalite.data.indexed_dataset import IndexedDatasetWriter, best_dtype, bin_path, idx_path
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_PENDING_PER_WORKER = 4
_REPORT_SECONDS = 0.5
_NAMED_BAD_LINES = 10


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What to read, how to encode it, where to put it."""

    inputs: tuple[Path, ...]
    """Files in this order; a single ``-`` is JSON lines from standard input."""

    output_prefix: Path
    tokenizer_type: str = "ByteTokenizer"
    vocab_size: int | None = None
    tokenizer_model: Path | None = None
    tokenizer_eod: str | None = None
    json_key: str = "text"
    jsonl: bool = False
    append_eod: bool = True
    workers: int = 1
    overwrite: bool = False
    skip_bad_lines: bool = False


@dataclass
class PreprocessCounts:
    """How far the work is; sizes in bytes, of compressed files as they lie on disk."""

    input_size: int | None = 0
    """None when it cannot be known."""

    bytes_read: int = 0
    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bad_lines: int = 0


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray
    lengths: np.ndarray
    bytes_read: int
    empty_documents: int
    bad_lines: list[str]
    """Where each is and what is wrong with it."""


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


@dataclass(frozen=True)
class _BadLine:
    problem: str


def _texts(chunk: Chunk, options: PreprocessOptions) -> Iterator[str | _BadLine]:
    """Yield the text of each document, or what is wrong with a line that is skipped."""
    if not chunk.numbers:
        try:
            yield chunk.documents[0].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name_of(chunk.path)} is not UTF-8: byte {error.start} cannot be read ({error.reason}). Convert the "
                "file, for example with iconv -t utf-8."
            ) from error
        return
    for place, line in enumerate(chunk.documents):
        if not line.strip():
            yield ""
            continue
        try:
            text = _text_of_line(line, options.json_key)
        except (ValueError, RecursionError) as error:
            problem = f"{chunk.where(place)} is not a usable JSON line: {error}"
            if not options.skip_bad_lines:
                raise DataError(
                    f"{problem}. Correct it, set --json-key, or leave such lines out with --skip-bad-lines."
                ) from error
            yield _BadLine(problem)
            continue
        yield text


# Built once in each worker, which lives for one call: reading a large vocabulary takes longer than encoding a chunk.
@functools.lru_cache(maxsize=1)
def _tokenizer(options: PreprocessOptions) -> Tokenizer:
    return _build_tokenizer(options)


def _build_tokenizer(options: PreprocessOptions) -> Tokenizer:
    kind, model, eod = options.tokenizer_type, options.tokenizer_model, options.tokenizer_eod
    return build_tokenizer(kind, options.vocab_size, model=model, eod=eod)


def _encode_in_worker(chunk: Chunk, options: PreprocessOptions) -> _Encoded:
    return _encode(chunk, options, _tokenizer(options))


def _encode(chunk: Chunk, options: PreprocessOptions, tokenizer: Tokenizer) -> _Encoded:
    dtype = best_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eod] if options.append_eod else [], dtype=dtype)
    pieces: list[np.ndarray] = [np.empty(0, dtype)]
    lengths: list[int] = []
    empty, bad = 0, []
    for place, text in enumerate(_texts(chunk, options)):
        if isinstance(text, _BadLine):
            bad.append(text.problem)
        elif not text or text.isspace():
            empty += 1
        else:
            try:
                ids = tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{chunk.where(place)}: {error}") from error
            pieces += (ids, end)
            lengths.append(len(ids) + len(end))
    tokens = np.concatenate(pieces).astype(dtype, copy=False)
    return _Encoded(tokens, np.array(lengths, dtype=np.int64), chunk.bytes_read, empty, bad)


def _ignore_interrupts() -> None:
    # Ctrl-C reaches all processes of a terminal; the main one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encode_all(options: PreprocessOptions, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """Yield encoded chunks in the order of the input, with a bounded number of them in memory."""
    if options.workers == 1:
        for chunk in read_chunks(options.inputs, options.jsonl):
            yield _encode(chunk, options, tokenizer)
        return
    pending: deque[Future[_Encoded]] = deque()
    # Not a multiprocessing.Pool: it waits for ever when a worker is killed, and reads the input without bound.
    with ProcessPoolExecutor(options.workers, get_context("forkserver"), _ignore_interrupts) as pool:
        try:
            for chunk in read_chunks(options.inputs, options.jsonl):
                pending.append(pool.submit(_encode_in_worker, chunk, options))
                if len(pending) > options.workers * _PENDING_PER_WORKER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {options.workers} worker processes died while reading {name_of(options.inputs[0])} and what "
                "follows. It was killed or ran out of memory: use fewer --workers or smaller documents."
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _check(options: PreprocessOptions) -> int | None:
    """Return the size of the input, None for standard input, or raise before any work is done."""
    if options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; give 1 or more.")
    if not options.inputs:
        raise ConfigError("no input file was given; name one or more with --input.")
    if STDIN in options.inputs and len(options.inputs) > 1:
        raise ConfigError(
            f"--input names {len(options.inputs)} inputs, but '-', standard input, stands alone; drop one."
        )
    size = 0
    for path in options.inputs:
        if path == STDIN:
            continue
        if not path.is_file():
            state = "is not a file" if path.exists() else "does not exist"
            raise DataError(f"the input {path} {state}. Give text or JSON lines files, also with {GZIP_SUFFIX}.")
        size += path.stat().st_size
    folder = options.output_prefix.parent
    if not folder.is_dir():
        raise ConfigError(f"the output folder {folder} of {options.output_prefix} does not exist. Create it first.")
    outputs = (bin_path(options.output_prefix), idx_path(options.output_prefix))
    existing = next((path for path in outputs if path.exists()), None)
    if existing is not None and not options.overwrite:
        raise ConfigError(f"the output {existing} exists already. Choose another --output-prefix or add --overwrite.")
    return None if STDIN in options.inputs else size


def preprocess(
    options: PreprocessOptions, report: Callable[[PreprocessCounts], None] = lambda counts: None
) -> PreprocessCounts:
    """Write the dataset and return the counts; ``report`` is called twice a second with those so far.

    The files are the same for any number of workers. When this raises, whatever was at the output prefix is unchanged
    and nothing was added to it. Documents without text, or with nothing but white space, are counted and left out.
    """
    counts = PreprocessCounts(input_size=_check(options))
    tokenizer = _build_tokenizer(options)
    about = (tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.describe()["sha256"])
    try:
        with IndexedDatasetWriter(options.output_prefix, best_dtype(tokenizer.vocab_size), *about) as writer:
            _write(options, tokenizer, writer, counts, report)
    except OSError as error:
        raise DataError(
            f"{error.filename or options.output_prefix} cannot be read or written: {error.strerror}. Check the rights "
            "and the free space, then run again."
        ) from error
    return counts


def _write(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    writer: IndexedDatasetWriter,
    counts: PreprocessCounts,
    report: Callable[[PreprocessCounts], None],
) -> None:
    reported = time.monotonic()
    for encoded in _encode_all(options, tokenizer):
        writer.add_documents(encoded.tokens, encoded.lengths)
        counts.documents, counts.tokens = writer.num_documents, writer.num_tokens
        counts.bytes_read += encoded.bytes_read
        counts.empty_documents += encoded.empty_documents
        _name_bad_lines(encoded.bad_lines, counts.bad_lines)
        counts.bad_lines += len(encoded.bad_lines)
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            report(counts)
    if counts.documents == 0:
        raise DataError(
            f"the {len(options.inputs)} input files hold no text: {counts.empty_documents} empty documents, "
            f"{counts.bad_lines} bad lines. Nothing was written; check --input and --json-key."
        )
    writer.finalize()


def _name_bad_lines(problems: list[str], before: int) -> None:
    for number, problem in enumerate(problems, before + 1):
        if number <= _NAMED_BAD_LINES:
            logger.warning("%s; the line is left out", problem)
        elif number == _NAMED_BAD_LINES + 1:
            logger.warning("more lines are left out and only counted from here on")
