"""Whether token files fit the run: the tokenizer they were made with, and their largest token id."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import numpy as np

from megalite.data.index_cache import store
from megalite.data.indexed_dataset import IndexedDataset, bin_path
from megalite.data.meta import DatasetMeta, meta_path
from megalite.data.tokenizers import Tokenizer
from megalite.utils.errors import DataError

logger = logging.getLogger(__name__)

_SCAN_TOKENS = 1 << 24


def check_content(indexed: IndexedDataset, tokenizer: Tokenizer, vocab_size: int, cache_folder: Path) -> None:
    """Raise DataError when the files are empty, were made with another tokenizer, or hold an id that is too large."""
    if indexed.num_tokens == 0:
        raise DataError(
            f"{indexed.prefix} is empty: it has {len(indexed)} sequences and no token. Run tools/preprocess_data.py on "
            "documents with text."
        )
    meta = indexed.meta()
    if meta is not None:
        check_tokenizer(meta, tokenizer, meta_path(indexed.prefix))
    check_token_range(indexed, vocab_size, cache_folder, meta)


def check_tokenizer(meta: DatasetMeta, tokenizer: Tokenizer, where: Path) -> None:
    """Raise DataError when the data was made with another tokenizer, end-of-document id or tokenizer file."""
    if meta.tokenizer is not None and meta.tokenizer != tokenizer.name:
        raise DataError(
            f"{where} says the data was made with {meta.tokenizer}, this run uses {tokenizer.name}. Set "
            f"data.tokenizer_type to {meta.tokenizer} or make the data again."
        )
    if meta.eod is not None and meta.eod != tokenizer.eod:
        raise DataError(
            f"{where} says documents end with token {meta.eod}, {tokenizer.name} of this run ends them with "
            f"{tokenizer.eod}. Use the vocabulary size of the data ({meta.vocab_size}) or make the data again."
        )
    now = tokenizer.describe()
    compared = (
        ("a tokenizer file with sha256", meta.tokenizer_sha256, now["sha256"]),
        ("a vocabulary of", meta.vocab_size, tokenizer.vocab_size),
    )
    for what, then, current in compared:
        if None not in (then, current) and then != current:
            raise DataError(
                f"{where} says the data was made with {what} {then}, the {tokenizer.name} of this run has {current}. "
                "Set data.tokenizer_model to the file that the data was made with, or make the data again."
            )


def check_token_range(
    indexed: IndexedDataset, vocab_size: int, cache_folder: Path | None = None, meta: DatasetMeta | None = None
) -> None:
    """Raise DataError when a token id is not below ``vocab_size``.

    Free for data with a ``.meta.json`` (``meta``); the files of other tools are read once, and what was found is kept
    in ``cache_folder``.
    """
    if indexed.dtype.kind not in "ui":
        raise DataError(
            f"{indexed.prefix} holds {indexed.dtype.name} values, which are not token ids. "
            "Set data.data_path to token data."
        )
    limits = np.iinfo(indexed.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    low, high = (0, meta.max_token_id) if meta is not None else _token_range(indexed, cache_folder)
    if low >= 0 and high < vocab_size:
        return
    token, sequence = _first_outside(indexed, vocab_size)
    made_for = f" (the data was made for {meta.vocab_size})" if meta is not None and meta.vocab_size else ""
    raise DataError(
        f"{bin_path(indexed.prefix)} holds token id {token} in document {indexed.document_of(sequence)} (sequence "
        f"{sequence}), the vocabulary has {vocab_size} ids{made_for}; the largest id is {high}. Set model.vocab_size "
        f"to at least {high + 1} or make the data again with the run's tokenizer."
    )


def _token_range(indexed: IndexedDataset, cache_folder: Path | None) -> tuple[int, int]:
    path = None if cache_folder is None else cache_folder / f"{_file_digest(indexed)}-token_range.json"
    if path is not None:
        try:
            low, high = json.loads(path.read_bytes())
            return int(low), int(high)
        except (OSError, ValueError, TypeError):
            # Missing or damaged: found again below, at the price of reading the data once.
            pass
    started = time.monotonic()
    low, high = 0, 0
    tokens = np.memmap(bin_path(indexed.prefix), dtype=indexed.dtype, mode="r")
    for start in range(0, len(tokens), _SCAN_TOKENS):
        chunk = tokens[start : start + _SCAN_TOKENS]
        low, high = min(low, int(chunk.min())), max(high, int(chunk.max()))
    logger.info(
        "%s has no %s: read its %d tokens in %.2f s to find the largest id, %d",
        indexed.prefix,
        meta_path(indexed.prefix).name,
        len(tokens),
        time.monotonic() - started,
        high,
    )
    if path is not None:
        try:
            store(path, lambda file: file.write(json.dumps([low, high]).encode()))
        except OSError as error:
            logger.warning(
                "the token range of %s cannot be kept in %s (%s); the data is read again at every start. Set "
                "data.data_cache_path to a folder that can be written.",
                indexed.prefix,
                cache_folder,
                error.strerror,
            )
    return low, high


def _file_digest(indexed: IndexedDataset) -> str:
    path = bin_path(indexed.prefix)
    status = path.stat()
    identity = [str(path.resolve()), status.st_size, status.st_mtime_ns, indexed.dtype.name]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _first_outside(indexed: IndexedDataset, vocab_size: int) -> tuple[int, int]:
    for sequence in range(len(indexed)):
        tokens = indexed.get(sequence)
        outside = (tokens < 0) | (tokens >= vocab_size)
        if outside.any():
            return int(tokens[np.argmax(outside)]), sequence
    raise DataError(
        f"{meta_path(indexed.prefix)} speaks of a token id beyond {vocab_size - 1}, but {bin_path(indexed.prefix)} has "
        "none. The files do not belong together: remove the first one or make the data again."
    )
