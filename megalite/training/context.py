"""What the loop works with, built once by setup."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megalite.checkpoint.manager import CheckpointManager, SaveReport
from megalite.checkpoint.state import TrainProgress, TrainState
from megalite.config.derive import Derived
from megalite.config.schema import Config
from megalite.data.samplers import BatchLoader
from megalite.metrics.timers import Timers
from megalite.parallel.p2p import StageLink
from megalite.parallel.state import ParallelState
from megalite.resilience.signals import ExitSignal
from megalite.training.profiling import Profiler
from megalite.training.report import Reporter


@dataclass
class TrainContext:
    """The run: its state, its data, and what watches it."""

    state: TrainState
    device: torch.device
    link: StageLink
    train_batches: BatchLoader | None
    """None on stages that see neither tokens nor labels."""
    valid_batches: dict[str, BatchLoader | None]
    """By name of the validation set; the names are known on all stages."""
    checkpoints: CheckpointManager
    readable_copies: Callable[[], dict[Path, bytes]]
    """Makes the files that people read beside a step, by path."""
    exit_signal: ExitSignal
    reporter: Reporter
    profiler: Profiler
    timers: Timers
    started: float = field(default_factory=time.monotonic)
    flops_per_sequence: float = 0.0
    last_batch_size: int | None = None
    """Global batch of the iteration before; None at the start."""
    last_save: SaveReport | None = None

    @property
    def config(self) -> Config:
        return self.state.config

    @property
    def derived(self) -> Derived:
        return self.state.derived

    @property
    def parallel(self) -> ParallelState:
        return self.state.parallel

    @property
    def progress(self) -> TrainProgress:
        return self.state.progress

    @property
    def is_finished(self) -> bool:
        if self.config.training.train_iters is not None:
            return self.progress.iteration >= self.config.training.train_iters
        return self.progress.consumed_train_samples + self.batch_size > self.derived.train_samples

    @property
    def batch_size(self) -> int:
        """Sequences in the next global batch."""
        return self.derived.batches.batch_size(self.progress.consumed_train_samples)

    def link_for(self, micro_batch_size: int) -> StageLink:
        """Return the link to the neighbouring stages for micro-batches of this size."""
        shape = self.state.chunks[0].module.activation_shape(micro_batch_size)
        return self.link if shape == self.link.shape else replace(self.link, shape=shape)
