"""The section that says where tokens come from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.config.blend import parse_blend
from megalite.config.checks import require, require_at_least, require_at_most_one

DEFAULT_SPLIT = "969,30,1"
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_SHARED = ("data_path", "data_args_path")
_WITH_MODEL = ("HFTokenizer", "SentencePieceTokenizer")


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """Where tokens come from. There is exactly one source: data_path, a path for each split, or mock_data.

    A list of prefixes may hold weights: weight, prefix, weight, prefix, and so on. Without weights the lengths decide.
    """

    data_path: list[str] | None = None
    """Prefixes of ``.bin`` and ``.idx`` files, with or without weights. All splits are cut from them, by split."""

    data_args_path: Path | None = None
    """File that holds the entries of data_path, separated by white space."""

    train_data_path: list[str] | None = None
    """Prefixes that are all training data, with or without weights."""

    valid_data_path: list[str] | None = None
    """Prefixes that are all validation data, with or without weights. Needs train_data_path."""

    test_data_path: list[str] | None = None
    """Prefixes that are all test data, with or without weights. Needs train_data_path."""

    per_split_data_args_path: Path | None = None
    """JSON file with the lists train, valid and test, in place of the three settings above."""

    multiple_validation_sets: bool = False
    """Make a validation set of its own of each prefix for validation, instead of one blend."""

    split: str | None = None
    """Relative sizes of training, validation and test data; missing ones are 0. Left out, 969,30,1; not given with
    paths for each split."""

    mid_level_dataset_surplus: float = 0.005
    """Part by which a source in a blend with weights is prepared for more samples than its share."""

    data_cache_path: Path | None = None
    """Folder for sample indices; left out, a folder beside the data."""

    mock_data: bool = False
    """Train on generated tokens."""

    mmap_bin_files: bool = True
    """Map the ``.bin`` file into memory instead of reading pieces of it."""

    num_workers: int = 0
    """Processes that prepare batches on each rank; 0 prepares them in the training process."""

    eod_mask_loss: bool = False
    """Leave positions that hold the end-of-document token out of the loss."""

    reset_position_ids: bool = False
    """Count positions from 0 again behind each end-of-document token."""

    reset_attention_mask: bool = False
    """Let positions attend to their own document only, which ends with its end-of-document token."""

    tokenizer_type: Literal["ByteTokenizer", "NullTokenizer", "HFTokenizer", "SentencePieceTokenizer"] = "ByteTokenizer"
    """ByteTokenizer makes one token of each byte; NullTokenizer reads numbers and needs model.vocab_size; the others
    read tokenizer_model."""

    tokenizer_model: Path | None = None
    """HFTokenizer: a tokenizer.json, or a folder with one. SentencePieceTokenizer: a .model file."""

    tokenizer_eod: str | None = None
    """Text of the token that ends documents; left out, the end-of-sequence token that the tokenizer's files name."""

    def __post_init__(self) -> None:
        require_at_least("data.num_workers", self.num_workers, 0)
        require_at_least("data.mid_level_dataset_surplus", self.mid_level_dataset_surplus, 0)
        self._check_source()
        for name in ("data_path", *_PER_SPLIT):
            if getattr(self, name) is not None:
                parse_blend(getattr(self, name), f"data.{name}")
        self._check_split()
        self._check_tokenizer()

    @property
    def has_paths_per_split(self) -> bool:
        return self.per_split_data_args_path is not None or any(getattr(self, name) is not None for name in _PER_SPLIT)

    @property
    def split_text(self) -> str:
        """The weights of the splits, as text."""
        return DEFAULT_SPLIT if self.split is None else self.split

    def split_weights(self) -> tuple[float, float, float]:
        """Weights of training, validation and test data as given, not normalised."""
        numbers = [float(part) for part in self.split_text.split(",")]
        train, valid, test = numbers + [0.0] * (3 - len(numbers))
        return train, valid, test

    def _check_source(self) -> None:
        per_split = next((name for name in _PER_SPLIT if getattr(self, name) is not None), _PER_SPLIT[0])
        sources = (*_SHARED, per_split, "per_split_data_args_path", "mock_data")
        are_set = tuple(getattr(self, name) not in (None, False) for name in sources)
        require_at_most_one("data", sources, are_set, "a run has one source of tokens")
        require(
            any(are_set),
            "data.data_path, data.train_data_path and data.mock_data are all left out, but the run needs tokens; set "
            "one of them",
            "data.data_path",
            "data.mock_data",
        )
        require(
            per_split == "train_data_path" or self.train_data_path is not None,
            f"data.{per_split} is set, but data.train_data_path is not; set it too, or use data_path with split",
            f"data.{per_split}",
            "data.train_data_path",
        )
        require(
            not self.multiple_validation_sets
            or self.valid_data_path is not None
            or self.per_split_data_args_path is not None,
            "data.multiple_validation_sets is on, but needs data.valid_data_path or data.per_split_data_args_path (now "
            "both left out); set one of them, or switch it off",
            "data.multiple_validation_sets",
            "data.valid_data_path",
        )

    def _check_split(self) -> None:
        if self.split is None:
            return
        require(
            not self.has_paths_per_split,
            f"data.split is {self.split!r}, but each split has paths of its own, which are not cut; leave split out",
            "data.split",
            "data.train_data_path",
            "data.per_split_data_args_path",
        )
        parts = [part.strip() for part in self.split.split(",")]
        is_readable = len(parts) <= 3 and all(re.fullmatch(r"\d+\.?\d*|\.\d+", part, re.ASCII) for part in parts)
        require(
            is_readable and 0 < sum(map(float, parts)) < math.inf,
            f"data.split is {self.split!r}, but must be one to three numbers that are not negative and not all 0, "
            "separated by commas; write for example 969,30,1",
            "data.split",
        )
        require(
            float(parts[0]) > 0,
            f"data.split is {self.split!r}, which leaves nothing for training; make its first number greater than 0",
            "data.split",
        )

    def _check_tokenizer(self) -> None:
        has_model = self.tokenizer_type in _WITH_MODEL
        require(
            not has_model or self.tokenizer_model is not None,
            f"data.tokenizer_type is {self.tokenizer_type!r}, which reads a file, but data.tokenizer_model is left "
            "out; set it",
            "data.tokenizer_type",
            "data.tokenizer_model",
        )
        for name in ("tokenizer_model", "tokenizer_eod"):
            value = getattr(self, name)
            require(
                value is None or has_model,
                f"data.{name} is {str(value)!r}, but data.tokenizer_type is {self.tokenizer_type!r}, which has no use "
                f"for it; leave it out, or choose one of {' and '.join(_WITH_MODEL)}",
                f"data.{name}",
                "data.tokenizer_type",
            )
