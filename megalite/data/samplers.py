"""Which sample goes where: arithmetic on the number of consumed samples, and the loader that follows it.

A micro-step takes ``micro_batch_size * dp_size`` samples that follow each other, and rank r the r-th part of them. So a
global batch is the samples [consumed, consumed + global batch size) whatever the sizes of micro-batch and DP, and the
position in the data is one number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megalite.utils.errors import DataError

_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SampleDataset(Protocol):
    """A dataset of samples that are dicts of tensors of equal shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


def sample_indices(
    consumed_samples: int, micro_batch_index: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Return the samples of one micro-batch of a DP rank in the step that begins at ``consumed_samples``."""
    start = consumed_samples + (micro_batch_index * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


class _Positions(Sampler[list[int]]):
    """The micro-batches of one rank from ``start`` to the end of the data; the last incomplete step is left out."""

    def __init__(self, num_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        self.start = 0
        self.step = micro_batch_size * dp_size
        self._num_samples = num_samples
        self._place = (micro_batch_size, dp_rank, dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        # All ranks stop at the same step, also when a part of the last one would still fill this rank's micro-batch.
        for position in range(self.start, self._num_samples - self.step + 1, self.step):
            yield list(sample_indices(position, 0, *self._place))


class _WithOrdinals(Dataset):
    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self._dataset[index], "sample_ordinals": torch.tensor(index, dtype=torch.int64)}


def _stack(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _start_worker(worker: int) -> None:
    # A scheduler signals all processes of a job. The rank decides what a signal means, and needs data until then.
    for number in _LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    # SIGTERM cannot just be ignored: a rank that exits sends it to its workers and waits for them. So it counts when it
    # comes from the rank; where the system does not tell the sender (macOS) it always does.
    if rank is not None and hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_exit_when_told_by, args=(rank.pid,), daemon=True).start()


def _exit_when_told_by(pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)


class BatchLoader:
    """The micro-batches of one DP rank in order: stacked samples, and int64 ``sample_ordinals`` [micro_batch_size].

    An ordinal is the sample's place in the order of the run. What is returned depends on the position alone, never on
    ``num_workers`` or on batches drawn before; no random number of the process is used. Each item is one micro-batch,
    so a step draws as many as it accumulates. DataError when the samples are used up.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        name: str = "train",
    ) -> None:
        self._name = name
        self._num_samples = len(dataset)
        self._positions = _Positions(len(dataset), micro_batch_size, dp_rank, dp_size)
        self._loader = DataLoader(
            _WithOrdinals(dataset),
            batch_sampler=self._positions,
            num_workers=num_workers,
            collate_fn=_stack,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=_start_worker,
            # DataLoader draws a seed at every start; from the default generator that would change dropout masks.
            generator=torch.Generator(),
        )
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None
        self._position = consumed_samples

    @property
    def position(self) -> int:
        """The first sample of the next micro-step, over all DP ranks."""
        return self._position

    def set_position(self, consumed_samples: int) -> None:
        """Go on at ``consumed_samples``; free when already there, else what workers fetched ahead is dropped."""
        if consumed_samples != self._position:
            self._position = consumed_samples
            self._batches = None

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        end = self._position + self._positions.step
        if end > self._num_samples:
            raise DataError(
                f"the {self._name} data has {self._num_samples} samples, the micro-batches at sample {self._position} "
                f"need {end}. Ask for more samples when the dataset is built (train_iters or train_samples)."
            )
        if self._batches is None:
            self._positions.start = self._position
            self._batches = iter(self._loader)
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a loader process of the {self._name} data died at sample {self._position} ({error}). It was killed "
                "or ran out of memory: set data.num_workers lower, 0 loads in the training process."
            ) from error
        self._position = end
        return batch
