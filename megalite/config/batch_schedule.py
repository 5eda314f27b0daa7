"""The global batch size as a function of consumed samples: constant, ramped up, or in steps. Pure arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalite.config.checks import require
from megalite.config.schema import Config

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d+)([KMBT]?):(\d+)")
_STEPS_KEY = "training.step_batch_size_schedule"
_RAMP_KEY = "training.rampup_batch_size"


@dataclass(frozen=True)
class BatchSchedule:
    """Steps of (consumed samples from which on, global batch size); the first begins at 0."""

    steps: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        """The size that is reached at the end."""
        return self.steps[-1][1]

    def batch_size(self, consumed_samples: int) -> int:
        """Return the size of the global batch that begins at ``consumed_samples``."""
        return next(size for start, size in reversed(self.steps) if start <= consumed_samples)

    def sizes_from(self, consumed_samples: int) -> list[int]:
        """Return the sizes of this and all later global batches, without repetition."""
        later = [size for start, size in self.steps if start > consumed_samples]
        return list(dict.fromkeys([self.batch_size(consumed_samples), *later]))

    def samples_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the consumed samples when ``iterations`` more were done."""
        consumed = consumed_samples
        ends = [start for start, _ in self.steps[1:]] + [None]
        for (_, size), end in zip(self.steps, ends, strict=True):
            if end is not None and consumed >= end:
                continue
            count = iterations if end is None else min(iterations, -(-(end - consumed) // size))
            consumed += count * size
            iterations -= count
        return consumed

    def iterations_until(self, samples: int, consumed_samples: int = 0) -> int:
        """Return how many whole iterations fit between ``consumed_samples`` and ``samples``."""
        consumed, iterations = consumed_samples, 0
        ends = [start for start, _ in self.steps[1:]] + [None]
        for (_, size), end in zip(self.steps, ends, strict=True):
            if end is not None and consumed >= end:
                continue
            fitting = max(0, samples - consumed) // size
            count = fitting if end is None else min(fitting, -(-(end - consumed) // size))
            consumed += count * size
            iterations += count
            if end is not None and consumed < end:
                break
        return iterations


def batch_schedule(config: Config, data_parallel_size: int) -> BatchSchedule:
    """Return the schedule that the settings describe. Raises SettingError for one that cannot be followed."""
    training = config.training
    if training.step_batch_size_schedule is not None:
        return _in_steps(training.step_batch_size_schedule, config.model.seq_length)
    total = training.global_batch_size
    if total is None:
        total = training.micro_batch_size * data_parallel_size
    if training.rampup_batch_size is None:
        return BatchSchedule(((0, total),))
    return _ramped(training.rampup_batch_size, total)


def _ramped(ramp: list[int], total: int) -> BatchSchedule:
    """Return Megatron's ramp: k = (total - start) / increment equal stretches over the given samples."""
    start, increment, samples = ramp
    require(
        start < total and (total - start) % increment == 0,
        f"{_RAMP_KEY} starts at {start} and grows by {increment}, which does not lead to training.global_batch_size "
        f"{total}; make the difference a multiple of the increment",
        _RAMP_KEY,
        "training.global_batch_size",
    )
    count = (total - start) // increment
    return BatchSchedule(tuple((-(-step * samples // count), start + step * increment) for step in range(count + 1)))


def _in_steps(text: str, seq_length: int) -> BatchSchedule:
    """Parse "0:768 250B:1536": thresholds in tokens with K, M, B or T, turned into samples of ``seq_length``."""
    steps = []
    for word in text.split():
        match = _STEP.fullmatch(word)
        require(
            match is not None,
            f"{_STEPS_KEY} has the entry {word!r}, which is not like 250B:1536 (tokens with K, M, B or T, and a batch "
            "size); correct it",
            _STEPS_KEY,
        )
        steps.append((int(match[1]) * _UNITS[match[2]] // seq_length, int(match[3])))
    starts = [start for start, _ in steps]
    require(
        bool(steps) and starts[0] == 0 and all(a < b for a, b in zip(starts, starts[1:], strict=False)),
        f"{_STEPS_KEY} is {text!r}, whose thresholds are {starts} in samples; the first has to be 0, and each later "
        "one larger than the one before",
        _STEPS_KEY,
    )
    require(
        all(size > 0 for _, size in steps), f"{_STEPS_KEY} is {text!r}, with a batch size of 0; raise it", _STEPS_KEY
    )
    return BatchSchedule(tuple(steps))
