"""Several sources mixed in given shares, with the sizes and the order that Megatron gives them."""

from __future__ import annotations

import bisect
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.data.blend_indices import (
    MAX_SOURCES,
    BlendIndices,
    build_blending_indices,
    build_exhaustive_blending_indices,
    count_draws,
    normalize,
)
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import Tables, load_or_build
from megalite.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlendSource:
    """A dataset that is built when it is known how many samples the blend draws from it."""

    build: Callable[[int, Sequence[int]], GPTDataset]
    """Called with the number of samples and the index sizes in the checkpoint."""

    samples_per_epoch: int


@dataclass(frozen=True)
class BlendRule:
    """What defines a blend table: normalised weights, or with ``size`` None the sizes of sources that are used up."""

    weights: tuple[float, ...]
    size: int | None

    @property
    def num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def build(self) -> BlendIndices:
        if self.size is None:
            return build_exhaustive_blending_indices([int(size) for size in self.weights])
        return build_blending_indices(self.weights, self.size)


def plan_segment(
    weights: Sequence[float] | None, num_samples: int | None, samples_per_epoch: Sequence[int], surplus: float
) -> tuple[BlendRule, list[int]]:
    """Return the rule of a table and how many samples each source is asked for.

    Weights that are None are the lengths of the sources. Then a number of samples within one epoch of all sources takes
    one epoch of each, as Megatron does, and None takes all samples once; beyond that, where Megatron's data would end,
    the lengths are weights like others.
    """
    if num_samples is None:
        assert weights is None, "a blend with weights has no end of its own"
        return BlendRule(tuple(samples_per_epoch), None), list(samples_per_epoch)
    if weights is None and num_samples <= sum(samples_per_epoch):
        return BlendRule(tuple(normalize(samples_per_epoch)), num_samples), list(samples_per_epoch)
    shares = normalize(samples_per_epoch if weights is None else weights)
    used = [math.ceil(num_samples * share) for share in shares]
    # Normalised a second time, as in Megatron: it may change the last bits, and with them who wins a close choice.
    rule = BlendRule(tuple(normalize(shares)), sum(used))
    return rule, [math.ceil(count * (1 + surplus)) for count in used]


@dataclass(frozen=True)
class _Segment:
    """A table, and for each source the number of its samples that earlier segments have drawn."""

    rule: BlendRule
    indices: BlendIndices
    starts: tuple[int, ...]


class BlendedDataset:
    """``num_samples`` or more samples from several sources, each with its number in the field ``dataset_id``.

    As for a single source, the order is made of segments whose sizes the checkpoint keeps; a longer run appends one, in
    which every source goes on where it stopped. A source is asked for more than its share when the table draws more
    from it, so that no source runs out.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        segments: Sequence[_Segment],
        sizes: Sequence[int | None],
        *,
        weights: Sequence[float] | None,
        split: str,
        cache_folder: Path | None,
    ) -> None:
        self.datasets, self.split = list(datasets), split
        self._weights, self._cache_folder = weights, cache_folder
        self._segments, self._sizes = list(segments), list(sizes)
        self._starts = [0]
        for segment in segments:
            self._starts.append(self._starts[-1] + segment.rule.num_samples)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def seq_length(self) -> int:
        return self.datasets[0].seq_length

    @property
    def index_sizes(self) -> dict[str, list[Any]]:
        """The sizes that define the order, as plain values for the checkpoint."""
        return {"blend": list(self._sizes), "sources": [dataset.index_sizes for dataset in self.datasets]}

    @property
    def definition(self) -> dict[str, Any]:
        """What defines the order besides ``index_sizes``: when it changes between two runs, so do the samples."""
        return {
            "class": "BlendedDataset",
            "weights": None if self._weights is None else list(self._weights),
            "sources": [dataset.definition for dataset in self.datasets],
        }

    @property
    def tables(self) -> list[np.ndarray]:
        """All index tables; those that are kept in the cache are mapped files."""
        own = [table for segment in self._segments for table in vars(segment.indices).values()]
        return own + [table for dataset in self.datasets for table in dataset.tables]

    def __reduce__(self) -> tuple[Callable[..., BlendedDataset], tuple[list[GPTDataset], list[Any], list[Any]]]:
        # Spawned workers open the cached tables themselves: mapped arrays would be pickled as copies.
        plans = [(segment.rule, segment.starts) for segment in self._segments]
        options = {"weights": self._weights, "split": self.split, "cache_folder": self._cache_folder}
        return functools.partial(_reopen, **options), (self.datasets, plans, self._sizes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one sample; they are the caller's own and may be changed."""
        source, place = self.locate(index)
        return {"dataset_id": torch.tensor(source, dtype=torch.int64), **self.datasets[source][place]}

    def read_text(self, index: int) -> np.ndarray:
        """Return the ``seq_length + 1`` token ids of a sample as int64; IndexError outside the dataset."""
        source, place = self.locate(index)
        return self.datasets[source].read_text(place)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of a sample and which of its samples it is; IndexError outside the dataset."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside the {self.split} data with {len(self)} samples")
        number = bisect.bisect_right(self._starts, index) - 1
        segment, row = self._segments[number], index - self._starts[number]
        source = int(segment.indices.dataset_index[row])
        return source, segment.starts[source] + int(segment.indices.dataset_sample_index[row])


def build_blended(
    sources: Sequence[BlendSource],
    weights: Sequence[float] | None,
    *,
    num_samples: int | None,
    surplus: float,
    split: str = "train",
    cache_folder: Path | None = None,
    defined_sizes: Any = None,
) -> BlendedDataset:
    """Return a blend of ``num_samples`` or more samples; None is one epoch of all sources, without weights only.

    ``surplus`` is the part by which a source is asked for more samples than its share. ``defined_sizes`` are the
    ``index_sizes`` of the run that is continued.
    """
    if len(sources) > MAX_SOURCES:
        raise ConfigError(
            f"the {split} blend has {len(sources)} sources, the tables number at most {MAX_SOURCES}. Merge "
            "some of them."
        )
    if num_samples is None and weights is not None:
        raise ConfigError(
            f"the {split} blend has weights but no number of samples, so that it has no end. Leave the weights out to "
            "take every sample of its sources once, or ask for a number."
        )
    per_epoch = [source.samples_per_epoch for source in sources]
    sizes, source_sizes = _sizes_of_checkpoint(defined_sizes, len(sources), split)
    segments: list[_Segment] = []
    drawn, needed, length = [0] * len(sources), [1] * len(sources), 0
    pending = list(sizes)
    while pending or not segments or (num_samples is not None and length < num_samples):
        is_new = not pending
        size = pending.pop(0) if pending else num_samples if num_samples is None else num_samples - length
        rule, requests = plan_segment(weights, size, per_epoch, surplus)
        indices = _load_or_build(rule, split, cache_folder)
        if is_new:
            if segments:
                logger.info("%s data: samples 0 to %d keep their order, %d more follow", split, length - 1, size)
            sizes.append(size)
            # What was defined before is in the sizes of the sources already.
            needed = [start + request for start, request in zip(drawn, requests, strict=True)]
        segments.append(_Segment(rule, indices, tuple(drawn)))
        drawn = [start + draws for start, draws in zip(drawn, count_draws(indices, len(sources)), strict=True)]
        length += rule.num_samples
    datasets = []
    for source, own, enough, total in zip(sources, source_sizes, needed, drawn, strict=True):
        datasets.append(source.build(max(1, enough, total), own))
    return BlendedDataset(datasets, segments, sizes, weights=weights, split=split, cache_folder=cache_folder)


def fitting_sizes(stored: Any, num_sources: int | None, split: str) -> Any:
    """Return the index sizes of a checkpoint if they are of this kind of data, else None after a WARNING.

    ``num_sources`` is None for data that is no blend.
    """
    if not stored:
        return None
    is_blend = isinstance(stored, Mapping)
    sources = stored.get("sources") if is_blend else None
    then = len(sources) if isinstance(sources, (list, tuple)) else None
    if is_blend == (num_sources is not None) and (then is None or then == num_sources):
        return stored
    logger.warning(
        "the %s data of the checkpoint is %s, this run's is %s: its samples come in a new order, and samples that were "
        "trained on may come again. To keep the order, set the data as it was.",
        split,
        _kind(then),
        _kind(num_sources),
    )
    return None


def _kind(num_sources: int | None) -> str:
    return "a single source" if num_sources is None else f"a blend of {num_sources} sources"


def _sizes_of_checkpoint(stored: Any, num_sources: int, split: str) -> tuple[list[int | None], list[list[int]]]:
    """Return the sizes of the blend and of its sources; empty ones for a new order."""
    stored = fitting_sizes(stored, num_sources, split)
    if stored is None:
        return [], [[] for _ in range(num_sources)]
    try:
        blend, sources = list(stored["blend"]), [list(sizes) for sizes in stored["sources"]]
        is_sound = len(blend) > 0 and all(type(size) is int and size > 0 for size in blend if size is not None)
    except (TypeError, KeyError):
        is_sound = False
    if not is_sound or None in blend[1:]:
        raise DataError(
            f"the index sizes of the {split} data in the checkpoint are {str(stored)[:200]}, not those of a blend: "
            "'blend' and 'sources' with positive integers. Resume from an undamaged checkpoint."
        )
    return blend, sources


def _reopen(
    datasets: list[GPTDataset],
    plans: Sequence[tuple[BlendRule, tuple[int, ...]]],
    sizes: list[int | None],
    **options: Any,
) -> BlendedDataset:
    split, folder = options["split"], options["cache_folder"]
    segments = [_Segment(rule, _load_or_build(rule, split, folder), starts) for rule, starts in plans]
    return BlendedDataset(datasets, segments, sizes, **options)


def _load_or_build(rule: BlendRule, split: str, cache_folder: Path | None) -> BlendIndices:
    shapes = {
        "dataset_index": ((rule.num_samples,), np.dtype(np.int16)),
        "dataset_sample_index": ((rule.num_samples,), np.dtype(np.int64)),
    }

    def build() -> Tables:
        started = time.monotonic()
        tables = vars(rule.build())
        elapsed = time.monotonic() - started
        logger.info("%s data: blended %d samples of %d sources in %.2f s", split, *_extent(rule), elapsed)
        return tables

    definition = {"class": "BlendedDataset", "weights": list(rule.weights), "size": rule.size, "format": 1}
    return BlendIndices(**load_or_build(cache_folder, f"BlendedDataset-{split}", definition, shapes, build))


def _extent(rule: BlendRule) -> tuple[int, int]:
    return rule.num_samples, len(rule.weights)
