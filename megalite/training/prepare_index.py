"""Index tables built ahead of a run, so that its ranks find them at their start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megalite.checkpoint.state import TrainProgress
from megalite.config.derive import derive
from megalite.config.loader import UnresolvedConfig
from megalite.config.schema import Config
from megalite.data.build import build_datasets
from megalite.data.tokenizers import resolve_tokenizer
from megalite.training.setup import samples_per_split
from megalite.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class IndexReport:
    """The tables of one set, whether they were built now or were there."""

    name: str
    num_samples: int
    num_sources: int
    size: int
    """In bytes."""

    seconds: float


def build_index(config: Config | UnresolvedConfig, world_size: int | None = None) -> Iterator[IndexReport]:
    """Build what a new run of ``config`` needs, set by set, and yield a report of each.

    ``world_size`` may be left out unless it decides the length of the run, which it does when the global batch is left
    out. A run that resumes needs the tables of its checkpoint's index sizes as well; it builds those itself.
    """
    if isinstance(config, UnresolvedConfig):
        raise ConfigError(
            "checkpoint.use_checkpoint_args is on, but tables are built without looking at a checkpoint; switch it off "
            "and give model.seq_length, and model.vocab_size if the tokenizer has none"
        )
    if config.data.mock_data and config.data.data_cache_path is None:
        raise ConfigError(
            "data.mock_data is on and data.data_cache_path is left out, so that no table is kept; set a folder, or "
            "build nothing ahead"
        )
    progress = TrainProgress()
    wanted = samples_per_split(config, derive(config, _world_size(config, world_size)), progress)
    tokenizer, vocab_size = resolve_tokenizer(config.data, config.model.vocab_size)
    for split, num_samples in wanted.items():
        started = time.monotonic()
        datasets = build_datasets(
            config.data,
            num_samples={split: num_samples},
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )
        for name, dataset in datasets.by_name.items():
            if not all(isinstance(table, np.memmap) for table in dataset.tables):
                raise DataError(
                    f"the index tables of the {name} data could not be kept (a warning says why). Set "
                    "data.data_cache_path to a folder that can be written."
                )
            size = sum(table.nbytes for table in dataset.tables)
            num_sources = len(getattr(dataset, "datasets", (dataset,)))
            yield IndexReport(name, len(dataset), num_sources, size, time.monotonic() - started)
            started = time.monotonic()


def _world_size(config: Config, given: int | None) -> int:
    if given is not None:
        return given
    if config.training.global_batch_size is None:
        raise ConfigError(
            "training.global_batch_size is left out, so that the number of samples depends on the number of ranks; set "
            "it, or say the number with --world-size"
        )
    parallel = config.parallel
    # One data-parallel rank: a global batch that is given is the same for any number of them.
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
