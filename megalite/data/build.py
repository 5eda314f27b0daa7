"""From settings to datasets: opens the files, checks that they fit the run, cuts the splits and mixes the sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.blend import Blend
from megalite.config.schema import DataConfig
from megalite.data.blended import BlendedDataset, BlendSource, build_blended, fitting_sizes
from megalite.data.content import check_content
from megalite.data.gpt_dataset import GPTDataset, SampleFields, split_ranges
from megalite.data.gpt_indices import plan_indices
from megalite.data.index_cache import default_cache_folder
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mock import NUM_SEQUENCES, MockGPTDataset
from megalite.data.sources import resolve_sources, split_of
from megalite.data.tokenizers import Tokenizer
from megalite.utils.errors import DataError

AnyDataset = GPTDataset | BlendedDataset


@dataclass(frozen=True)
class Datasets:
    """The three splits; one that was asked for no samples is None, or empty."""

    train: AnyDataset | None = None
    valid: dict[str, AnyDataset] = field(default_factory=dict)
    """By name: "valid" alone, or "valid/NAME" for each of several validation sets, in the order of the settings."""

    test: AnyDataset | None = None

    @property
    def by_name(self) -> dict[str, AnyDataset]:
        """All sets that have samples: "train", those of ``valid``, "test"."""
        named = {"train": self.train, **self.valid, "test": self.test}
        return {name: dataset for name, dataset in named.items() if dataset is not None}

    @property
    def index_sizes(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values, so that the order survives a change of the run's length."""
        return {name: dataset.index_sizes for name, dataset in self.by_name.items()}

    @property
    def definitions(self) -> dict[str, dict[str, Any]]:
        """What defines the order of each set besides ``index_sizes``, as plain values."""
        return {name: dataset.definition for name, dataset in self.by_name.items()}


def build_datasets(
    data: DataConfig,
    *,
    num_samples: Mapping[str, int],
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    index_sizes: Mapping[str, Any] | None = None,
) -> Datasets:
    """Return the datasets of "train", "valid" and "test" with ``num_samples`` each; 0 or left out gives none.

    Local to a rank: every rank builds or reads the index cache by itself. ``vocab_size`` is the model's (None: the
    tokenizer's); a token beyond it is a DataError here, not a failure in the embedding. ``index_sizes`` come from the
    checkpoint that is resumed. Each of several validation sets has the samples of "valid".
    """
    builder = _Builder(data, seq_length, seed, tokenizer, vocab_size or tokenizer.vocab_size, index_sizes or {})
    named = builder.mock(num_samples) if data.mock_data else builder.from_files(num_samples)
    valid = {name: dataset for name, dataset in named.items() if split_of(name) == "valid"}
    return Datasets(named.get("train"), valid, named.get("test"))


@dataclass
class _Builder:
    data: DataConfig
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    vocab_size: int
    index_sizes: Mapping[str, Any]
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def mock(self, num_samples: Mapping[str, int]) -> dict[str, AnyDataset]:
        built: dict[str, AnyDataset] = {}
        ranges = split_ranges(self.data.split_text, NUM_SEQUENCES)
        for (split, wanted), sequences in zip(_all_splits(num_samples), ranges, strict=True):
            if wanted:
                self._require_sequences(split, wanted, sequences, "mock data", NUM_SEQUENCES)
                built[split] = MockGPTDataset(
                    self.vocab_size,
                    self.tokenizer.eod,
                    sequences=sequences,
                    num_samples=wanted,
                    cache_folder=self.data.data_cache_path,
                    defined_sizes=fitting_sizes(self.index_sizes.get(split), None, split) or (),
                    **self._common(split),
                )
        return built

    def from_files(self, num_samples: Mapping[str, int]) -> dict[str, AnyDataset]:
        wanted = dict(_all_splits(num_samples))
        sources = resolve_sources(self.data)
        # Also the data of splits that are asked for nothing: a wrong prefix should not wait for a later run.
        for blend in sources.blends.values():
            for prefix in blend.prefixes:
                self._open(prefix)
        missing = [split for split in wanted if wanted[split] and split not in map(split_of, sources.blends)]
        if missing:
            raise DataError(
                f"the {missing[0]} split is asked for {wanted[missing[0]]} samples but has no data: neither "
                f"data.{missing[0]}_data_path nor data.per_split_data_args_path names any. Add it, or ask for no "
                f"{missing[0]} samples."
            )
        return {
            name: self._build(name, blend, sources.split, wanted[split_of(name)])
            for name, blend in sources.blends.items()
            if wanted[split_of(name)]
        }

    def _build(self, name: str, blend: Blend, split: str | None, num_samples: int) -> AnyDataset:
        parts = [self._cut(prefix, name, split, num_samples) for prefix in blend.prefixes]
        is_single = len(parts) == 1 and blend.weights is None
        stored = fitting_sizes(self.index_sizes.get(name), None if is_single else len(parts), name)
        if is_single:
            return self._dataset(name, *parts[0], num_samples, stored or ())
        first = self.opened[blend.prefixes[0]].prefix
        return build_blended(
            [self._source(name, *part) for part in parts],
            blend.weights,
            num_samples=num_samples,
            surplus=self.data.mid_level_dataset_surplus,
            split=split_of(name),
            cache_folder=self.data.data_cache_path or default_cache_folder(first),
            defined_sizes=stored,
        )

    def _cut(self, prefix: str, name: str, split: str | None, num_samples: int) -> tuple[IndexedDataset, range]:
        indexed = self._open(prefix)
        if split is None:
            return indexed, range(len(indexed))
        ranges = dict(zip(("train", "valid", "test"), split_ranges(split, len(indexed)), strict=True))
        sequences = ranges[split_of(name)]
        self._require_sequences(name, num_samples, sequences, indexed.name, len(indexed))
        return indexed, sequences

    def _source(self, name: str, indexed: IndexedDataset, sequences: range) -> BlendSource:
        # A first look, before it is known how many samples are drawn. Too little data is told by the dataset itself.
        tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        per_epoch = max(1, plan_indices(max(1, tokens), None, self.seq_length).num_samples)
        return BlendSource(
            lambda count, defined: self._dataset(name, indexed, sequences, count, defined), samples_per_epoch=per_epoch
        )

    def _dataset(
        self, name: str, indexed: IndexedDataset, sequences: range, num_samples: int, defined: Sequence[int]
    ) -> GPTDataset:
        return GPTDataset(
            indexed,
            sequences,
            num_samples=num_samples,
            cache_folder=self._cache_folder(indexed),
            defined_sizes=defined,
            **self._common(split_of(name)),
        )

    def _common(self, split: str) -> dict[str, Any]:
        fields = SampleFields(
            eod_id=self.tokenizer.eod,
            eod_mask_loss=self.data.eod_mask_loss,
            reset_position_ids=self.data.reset_position_ids,
            reset_attention_mask=self.data.reset_attention_mask,
        )
        return {"seq_length": self.seq_length, "seed": self.seed, "split": split, "fields": fields}

    def _cache_folder(self, indexed: IndexedDataset) -> Path:
        return self.data.data_cache_path or default_cache_folder(indexed.prefix)

    def _open(self, prefix: str) -> IndexedDataset:
        """Open and check the files of a prefix once, however many sets read them."""
        if prefix not in self.opened:
            indexed = IndexedDataset(Path(prefix), self.data.mmap_bin_files)
            check_content(indexed, self.tokenizer, self.vocab_size, self._cache_folder(indexed))
            self.opened[prefix] = indexed
        return self.opened[prefix]

    def _require_sequences(self, name: str, wanted: int, sequences: range, source: str, total: int) -> None:
        if len(sequences) == 0:
            raise DataError(
                f"{source}: the {name} split is asked for {wanted} samples but has no data: data.split "
                f"{self.data.split_text!r} gives it none of the {total} sequences. Raise its weight, add documents, or "
                f"ask for no {name} samples."
            )


def _all_splits(num_samples: Mapping[str, int]) -> list[tuple[str, int]]:
    unknown = set(num_samples) - {"train", "valid", "test"}
    assert not unknown, f"unknown splits {unknown}"
    return [(split, num_samples.get(split, 0)) for split in ("train", "valid", "test")]
