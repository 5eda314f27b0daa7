"""Samples of equal length for GPT training, in an order that configuration, seed and index sizes fix."""

from __future__ import annotations

import bisect
import functools
import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from megalite.data.gpt_indices import (
    EXTRA_TOKENS,
    GPTIndices,
    IndexPlan,
    build_indices,
    document_index_dtype,
    plan_indices,
    sample_index_dtype,
    shuffle_index_dtype,
)
from megalite.data.index_cache import Tables, load_or_build
from megalite.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

SPLIT_NAMES = ("train", "valid", "test")


class TokenSource(Protocol):
    """What a dataset reads from: ``IndexedDataset``, or generated sequences. ``name`` is for messages."""

    name: str
    sequence_lengths: np.ndarray

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class SampleFields:
    """What ends of documents do to a sample; without ``eod_id`` nothing."""

    eod_id: int | None = None
    eod_mask_loss: bool = False
    """Loss mask 0 where the input is an end of document: it would predict an unrelated document's first token."""

    reset_position_ids: bool = False
    """Positions count from 0 again behind an end of document."""

    reset_attention_mask: bool = False
    """Add ``document_ids``: position i may attend to j if j <= i and both have the same number."""

    def of(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields that go with int64 ``tokens`` [L]."""
        fields = {
            "loss_mask": np.ones(len(tokens), dtype=np.float32),
            "position_ids": np.arange(len(tokens), dtype=np.int64),
        }
        if self.eod_id is None:
            return fields
        is_end = tokens == self.eod_id
        if self.eod_mask_loss:
            fields["loss_mask"][is_end] = 0.0
        if not (self.reset_position_ids or self.reset_attention_mask):
            return fields
        # An end of document belongs to the document that it ends.
        document_ids = np.zeros(len(tokens), dtype=np.int32)
        np.cumsum(is_end[:-1], dtype=np.int32, out=document_ids[1:])
        if self.reset_position_ids:
            starts = np.concatenate(([0], np.flatnonzero(is_end) + 1))
            fields["position_ids"] -= starts[document_ids]
        if self.reset_attention_mask:
            fields["document_ids"] = document_ids
        return fields


def split_ranges(split: str, num_sequences: int) -> tuple[range, range, range]:
    """Return the sequences of train, valid and test for weights such as "969,30,1", cut where Megatron cuts."""
    numbers = re.findall(r"[.0-9]+", split)
    try:
        weights = [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(
            f"data.split {split!r} is not a list of weights; write up to three like '969,30,1'."
        ) from error
    if not 0 < len(weights) <= len(SPLIT_NAMES) or sum(weights) <= 0 or "-" in split:
        raise ConfigError(
            f"data.split {split!r} needs one to three weights for {', '.join(SPLIT_NAMES)}, none below 0 and not all "
            "0; write '969,30,1'."
        )
    weights += [0.0] * (len(SPLIT_NAMES) - len(weights))
    total = float(np.sum(np.array(weights)))
    edges = [0.0]
    for weight in weights:
        edges.append(edges[-1] + weight / total)
    # round() is banker's rounding, as in Megatron; a weight of 0 gives equal edges and so an empty range.
    cuts = [min(num_sequences, int(round(edge * float(num_sequences)))) for edge in edges]
    train, valid, test = (range(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
    return train, valid, test


def segment_seed(seed: int, segment: int) -> int:
    """Return the seed of an index segment; the first has the run's own, so that it equals Megatron's order."""
    if segment == 0:
        return seed
    return int(np.random.SeedSequence([seed, segment]).generate_state(1)[0])


class GPTDataset:
    """``num_samples`` or more samples of ``seq_length`` tokens from the given sequences of a source.

    The order is made of segments, each with tables of its own. A new run has one, built for ``num_samples`` (None: one
    epoch). Its size is in ``index_sizes``, belongs into the checkpoint, and comes back as ``defined_sizes``: then these
    segments are built as they were, and a run that wants more samples than they hold gets a further segment for the
    rest, with a seed made of ``seed`` and the segment's number. A run that wants fewer gets the same order unchanged.
    So what sample i is never changes within a run and its continuations.

    Tables are kept in ``cache_folder``, where any number of ranks and jobs may build them at once; with None, or a
    folder that cannot be written, they stay in memory. Raises DataError when the sequences do not fill one sample.
    """

    def __init__(
        self,
        source: TokenSource,
        sequences: np.ndarray | range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        split: str = "train",
        fields: SampleFields | None = None,
        cache_folder: Path | None = None,
        defined_sizes: Sequence[int] = (),
    ) -> None:
        assert num_samples is None or num_samples > 0, "a split without samples has no dataset"
        self.source, self.split, self.seq_length, self.seed = source, split, seq_length, seed
        self._fields, self._cache_folder = fields or SampleFields(), cache_folder
        self._sequences = np.asarray(sequences, dtype=document_index_dtype(len(source)))
        lengths = source.sequence_lengths[self._sequences]
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch < seq_length + EXTRA_TOKENS:
            raise DataError(
                f"{source.name}: the {split} split has {len(self._sequences)} sequences with {self.tokens_per_epoch} "
                f"tokens, one sample needs {seq_length + EXTRA_TOKENS}. Add data, lower model.seq_length, or change "
                "data.split."
            )
        self._longest_of_source = int(source.sequence_lengths.max())
        content = hashlib.sha256(np.ascontiguousarray(lengths).view(np.uint8))
        content.update(np.ascontiguousarray(self._sequences, dtype=np.int64).view(np.uint8))
        self._content = content.hexdigest()
        self._index_sizes: list[int] = []
        self._segments: list[GPTIndices] = []
        self._starts = [0]
        for size in defined_sizes:
            self._add_segment(size)
        wanted = num_samples or self.samples_per_epoch
        if wanted > len(self):
            self._add_segment(wanted - len(self))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over the sequences."""
        return plan_indices(self.tokens_per_epoch, None, self.seq_length).num_samples

    @property
    def tables(self) -> list[np.ndarray]:
        """All index tables; those that are kept in the cache are mapped files."""
        return [table for segment in self._segments for table in vars(segment).values()]

    @property
    def index_sizes(self) -> list[int]:
        """The sizes that define the order, as plain integers for the checkpoint."""
        return list(self._index_sizes)

    @property
    def definition(self) -> dict[str, int | str]:
        """What defines the order besides ``index_sizes``: when it changes between two runs, so do the samples."""
        return {
            "class": "GPTDataset",
            "seed": self.seed,
            "seq_length": self.seq_length,
            "split": self.split,
            "sequences": self._content,
            "extra_tokens": EXTRA_TOKENS,
        }

    def __reduce__(self) -> tuple[Callable[..., GPTDataset], tuple[TokenSource, np.ndarray]]:
        # Spawned workers open the cached tables themselves: mapped arrays would be pickled as copies.
        options = {
            "num_samples": len(self),
            "seq_length": self.seq_length,
            "seed": self.seed,
            "split": self.split,
            "fields": self._fields,
            "cache_folder": self._cache_folder,
            "defined_sizes": self.index_sizes,
        }
        return functools.partial(GPTDataset, **options), (self.source, self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one sample; they are the caller's own and may be changed."""
        text = self.read_text(index)
        # A copy, or tokens and labels would share a buffer.
        sample = {"tokens": text[:-1].copy(), "labels": text[1:], **self._fields.of(text[:-1])}
        return {name: torch.from_numpy(array) for name, array in sample.items()}

    def read_text(self, index: int) -> np.ndarray:
        """Return the ``seq_length + 1`` token ids of a sample as int64; IndexError outside the dataset."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside the {self.split} data with {len(self)} samples")
        number = bisect.bisect_right(self._starts, index) - 1
        tables = self._segments[number]
        row = int(tables.shuffle_index[index - self._starts[number]])
        (first, begin), (last, end) = tables.sample_index[row].tolist(), tables.sample_index[row + 1].tolist()
        text = np.empty(self.seq_length + EXTRA_TOKENS, dtype=np.int64)
        filled = 0
        for place in range(first, last + 1):
            sequence = int(tables.document_index[place])
            offset = begin if place == first else 0
            length = end + EXTRA_TOKENS - offset if place == last else None
            piece = self.source.get(sequence, offset, length)
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
        assert filled == len(text), "the sample index does not belong to this data"
        return text

    def _add_segment(self, size: int) -> None:
        number = len(self._segments)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DataError(
                f"the {self.split} data cannot be indexed for {size!r} samples (segment {number} of the index sizes in "
                "the checkpoint). A size is a positive integer: resume from an undamaged checkpoint."
            )
        plan = plan_indices(self.tokens_per_epoch, size, self.seq_length)
        if number > 0:
            logger.info(
                "%s, %s data: samples 0 to %d keep their order, %d epochs are appended for %d more",
                self.source.name,
                self.split,
                len(self) - 1,
                plan.num_epochs,
                size,
            )
        self._segments.append(self._load_or_build(number, size, plan))
        self._index_sizes.append(size)
        self._starts.append(len(self) + plan.num_samples)

    def _load_or_build(self, number: int, size: int, plan: IndexPlan) -> GPTIndices:
        seed = segment_seed(self.seed, number)
        places = plan.num_epochs * len(self._sequences)
        shapes = {
            "document_index": ((places,), document_index_dtype(int(self._sequences.max()))),
            "sample_index": ((plan.num_samples + 1, 2), sample_index_dtype(places, self._longest_of_source)),
            "shuffle_index": ((plan.num_samples,), shuffle_index_dtype(plan.num_samples)),
        }

        def build() -> Tables:
            started = time.monotonic()
            tables = build_indices(self.source.sequence_lengths, self._sequences, plan, self.seq_length, seed)
            elapsed = time.monotonic() - started
            logger.info(
                "%s, %s data: indexed %d samples in %d epochs in %.2f s",
                self.source.name,
                self.split,
                plan.num_samples,
                plan.num_epochs,
                elapsed,
            )
            return vars(tables)

        definition = {**self.definition, "seed": seed, "num_samples": size, "format": 1}
        return GPTIndices(**load_or_build(self._cache_folder, f"GPTDataset-{self.split}", definition, shapes, build))
