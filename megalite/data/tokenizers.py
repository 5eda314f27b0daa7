"""Tokenizers without files: text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megalite.utils.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """What the data part asks of a tokenizer; ``name`` and ``eod`` are written beside the data and compared later."""

    name: str
    vocab_size: int
    eod: int

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``, without an end-of-document id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``."""


class ByteTokenizer:
    """The UTF-8 bytes of the text, and 256 for the end of a document."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; ends of documents vanish, cut characters become U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


class NullTokenizer:
    """Text that already is ids: numbers below ``num_ids`` between spaces, and ``num_ids`` for the end of a document.

    As Megatron's tokenizer of this name, so ``vocab_size`` is one more than the number given.
    """

    name = "NullTokenizer"

    def __init__(self, num_ids: int) -> None:
        self.eod = num_ids
        self.vocab_size = num_ids + 1

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers in ``text``; DataError where something is not a number below the vocabulary size."""
        words = text.split()
        try:
            ids = np.array(words, dtype=np.int64) if words else np.empty(0, np.int64)
        except (ValueError, OverflowError) as error:
            wrong = next((w for w in words if not w.isdigit()), "a number beyond int64")
            raise DataError(
                f"{wrong[:40]!r} is not a token id. {self.name} reads numbers separated by spaces; use another "
                "tokenizer for text."
            ) from error
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            raise DataError(
                f"token id {ids[outside][0]} is outside the vocabulary of {self.vocab_size}. Give {self.name} a larger "
                "vocabulary size."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


TOKENIZER_TYPES = (ByteTokenizer.name, NullTokenizer.name)


def build_tokenizer(tokenizer_type: str, vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer of that type; ``vocab_size`` is NullTokenizer's number of ids, its end id not counted."""
    if tokenizer_type == ByteTokenizer.name:
        return ByteTokenizer()
    if tokenizer_type == NullTokenizer.name:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"NullTokenizer needs a vocabulary size of at least 1, got {vocab_size}; set vocab_size.")
        return NullTokenizer(vocab_size)
    raise ConfigError(f"unknown tokenizer type {tokenizer_type!r}; choose one of {', '.join(TOKENIZER_TYPES)}.")
