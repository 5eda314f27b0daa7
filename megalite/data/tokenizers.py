"""Tokenizers: text to token ids and back. Two need no file, two read the file of a library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megalite.config.schema import DataConfig
from megalite.utils.errors import ConfigError, DataError

_EOD_OPTIONS = "data.tokenizer_eod (--tokenizer-eod of tools/preprocess_data.py)"


class Tokenizer(Protocol):
    """What the data part asks of a tokenizer. What ``describe`` returns is kept beside the data and compared later."""

    name: str
    vocab_size: int
    eod: int

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``, without an end-of-document id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``."""

    def describe(self) -> dict[str, Any]:
        """Return name, vocab_size, eod and sha256 (of the tokenizer's file, None without one) as plain values."""

    def asset_files(self) -> list[Path]:
        """Return the files that are needed to build the tokenizer again."""


class _WithoutFiles:
    """What tokenizers that are code alone have in common."""

    name: str
    vocab_size: int
    eod: int

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": None}

    def asset_files(self) -> list[Path]:
        return []


class ByteTokenizer(_WithoutFiles):
    """The UTF-8 bytes of the text, and 256 for the end of a document."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; ends of documents vanish, cut characters become U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


class NullTokenizer(_WithoutFiles):
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


class _WithFile:
    """What tokenizers that read a file have in common: the file is part of what they are."""

    name: str
    vocab_size: int
    eod: int

    def __init__(self, file: Path) -> None:
        self._file = file
        self._sha256 = hashlib.sha256(_content(file)).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": self._sha256}

    def asset_files(self) -> list[Path]:
        return [self._file]


class HFTokenizer(_WithFile):
    """A ``tokenizer.json`` of the library tokenizers, or a folder that holds one.

    Documents end with the token ``eod`` (its text), or with the ``eos_token`` of a ``tokenizer_config.json`` beside the
    file. ConfigError if neither is there: a token that other tokenizers use is never assumed.
    """

    name = "HFTokenizer"

    def __init__(self, model: Path, eod: str | None = None) -> None:
        super().__init__(model / "tokenizer.json" if model.is_dir() else model)
        library = _import("tokenizers", self.name)
        try:
            self._tokenizer = library.Tokenizer.from_file(str(self._file))
        # The library raises nothing more special.
        except Exception as error:
            raise DataError(
                f"{self._file} is not a tokenizer.json: {error}. Set data.tokenizer_model to one, or to its folder."
            ) from error
        self._settings = self._file.with_name("tokenizer_config.json")
        # Ids may have gaps; the embedding needs a row for the largest.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        text = eod if eod is not None else self._end_in_settings()
        if text is None:
            raise ConfigError(
                f"{self._file} does not say which token ends a document, and {self._settings} names no eos_token. Set "
                f"{_EOD_OPTIONS} to the text of that token."
            )
        self.eod = _id_of_end(self._tokenizer.token_to_id(text), text, self._file)

    def _end_in_settings(self) -> str | None:
        try:
            settings = json.loads(_content(self._settings)) if self._settings.exists() else {}
            token = settings.get("eos_token")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{self._settings} is not a JSON object: {error}. Correct or remove it.") from error
        return token.get("content") if isinstance(token, dict) else token

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``; the text of a special token in it becomes that token."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens vanish."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def asset_files(self) -> list[Path]:
        return [self._file, *([self._settings] if self._settings.exists() else [])]


class SentencePieceTokenizer(_WithFile):
    """A ``.model`` file of the library sentencepiece.

    Documents end with the piece ``eod`` (its text), or with the model's end-of-sequence piece; ConfigError without one.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model: Path, eod: str | None = None) -> None:
        super().__init__(model)
        library = _import("sentencepiece", self.name)
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_content(model))
        except RuntimeError as error:
            raise DataError(
                f"{model} is not a model of sentencepiece: {error}. Set data.tokenizer_model to a .model file."
            ) from error
        self.vocab_size = int(self._processor.vocab_size())
        if eod is not None:
            found = int(self._processor.piece_to_id(eod))
            # What is no piece has the id of the unknown piece.
            self.eod = _id_of_end(found if self._processor.id_to_piece(found) == eod else None, eod, model)
            return
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise ConfigError(
                f"{model} has no end-of-sequence piece, so that nothing ends a document. Set {_EOD_OPTIONS} to the "
                "text of the piece to use."
            )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text, out_type=int), dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; ends of documents vanish."""
        return self._processor.decode([i for i in map(int, ids) if i != self.eod])


TOKENIZER_TYPES = (ByteTokenizer.name, NullTokenizer.name, HFTokenizer.name, SentencePieceTokenizer.name)


def build_tokenizer(
    tokenizer_type: str, vocab_size: int | None = None, *, model: Path | None = None, eod: str | None = None
) -> Tokenizer:
    """Return the tokenizer of that type.

    ``vocab_size`` is NullTokenizer's number of ids, its end id not counted. ``model`` and ``eod``, the text of the
    token that ends documents, are for the types that read a file.
    """
    if tokenizer_type == NullTokenizer.name:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"NullTokenizer needs a vocabulary size of at least 1, got {vocab_size}; set vocab_size.")
        return NullTokenizer(vocab_size)
    if tokenizer_type == ByteTokenizer.name:
        return ByteTokenizer()
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(f"unknown tokenizer type {tokenizer_type!r}; choose one of {', '.join(TOKENIZER_TYPES)}.")
    if model is None:
        raise ConfigError(f"{tokenizer_type} reads a file, but none is given; set tokenizer_model.")
    kind = HFTokenizer if tokenizer_type == HFTokenizer.name else SentencePieceTokenizer
    return kind(model, eod)


def resolve_tokenizer(data: DataConfig, vocab_size: int | None) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a run and its number of token ids.

    ``vocab_size`` is the model's, None to take the tokenizer's. ConfigError when the model has fewer ids than it.
    """
    # NullTokenizer has the model's ids, the last of them for ends of documents.
    num_ids = None if vocab_size is None else vocab_size - 1
    tokenizer = build_tokenizer(data.tokenizer_type, num_ids, model=data.tokenizer_model, eod=data.tokenizer_eod)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}, fewer than the {tokenizer.vocab_size} ids of {tokenizer.name}; raise "
            "it, or leave it out to take the tokenizer's"
        )
    return tokenizer, vocab_size or tokenizer.vocab_size


def _id_of_end(found: int | None, text: str, file: Path) -> int:
    if found is None:
        raise ConfigError(
            f"{text!r} is to end documents, but {file} has no token of that text. Set {_EOD_OPTIONS} to one that it "
            "has."
        )
    return int(found)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"the tokenizer file {file} cannot be read: {error.strerror}. Set data.tokenizer_model to a file that can."
        ) from error


def _import(package: str, name: str) -> Any:
    try:
        if package == "tokenizers":
            import tokenizers

            return tokenizers
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer_type {name} needs the package {package}, which is not installed: pip install "
            "'megalite[tokenizers]'"
        ) from error
    return sentencepiece
