"""What the loop works with, built once by setup."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.manager import CheckpointManager, SaveReport
from megalite.checkpoint.state import TrainProgress, TrainState
from megalite.config.derive import Derived
from megalite.config.schema import Config
from megalite.data.samplers import BatchLoader
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
    valid_batches: BatchLoader | None
    checkpoints: CheckpointManager
    readable_copies: Callable[[], dict[Path, bytes]]
    """Makes the files that people read beside a step, by path."""
    exit_signal: ExitSignal
    reporter: Reporter
    profiler: Profiler
    started: float = field(default_factory=time.monotonic)
    flops_per_iteration: float = 0.0
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
        return self.progress.iteration >= self.derived.train_iters
