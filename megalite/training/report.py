"""What the run says about itself: one console line per logged iteration, and the same numbers for machines."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megalite.checkpoint.manager import SaveReport
from megalite.checkpoint.state import TrainProgress
from megalite.metrics.sinks import Metrics, Sink
from megalite.parallel.state import ParallelState
from megalite.training.step import StepOutput

logger = logging.getLogger(__name__)


class Reporter:
    """Writes to the console and to ``sinks``; the sinks are given on rank 0 only.

    Time spent in saving and validating is taken out of the step time.
    """

    def __init__(
        self, parallel: ParallelState, sinks: Sequence[Sink], log_interval: int, train_iters: int, seq_length: int
    ) -> None:
        self.parallel = parallel
        self.sinks = list(sinks)
        self.log_interval = log_interval
        self.train_iters = train_iters
        self.seq_length = seq_length
        self._tokens = 0
        self._interval_started = time.perf_counter()
        self._paused = 0.0
        self._iterations = 0
        self._is_first = True

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` out of the step time of the present interval."""
        self._paused += seconds

    def iteration(self, progress: TrainProgress, step: StepOutput) -> None:
        """Log the iteration that has just been done, if it is due: its own loss, the mean step time since the last.

        Due are every ``log_interval``-th, the first after a start, which shows how a resumed run goes on, and the last.
        """
        self._iterations += 1
        self._tokens += step.batch_size * self.seq_length
        is_due = self._is_first or progress.iteration % self.log_interval == 0
        if not is_due and progress.iteration != self.train_iters:
            return
        self._is_first = False
        now = time.perf_counter()
        elapsed = max(now - self._interval_started - self._paused, 1e-9)
        seconds, tokens_per_s = elapsed / self._iterations, self._tokens / elapsed
        self._interval_started, self._paused, self._iterations, self._tokens = now, 0.0, 0, 0
        logger.info(
            "iteration %8d/%8d | loss %.6f | lr %.3e | grad norm %.3f | %.1f ms | %s tok/s | skipped %d",
            progress.iteration,
            self.train_iters,
            step.loss,
            step.lr,
            step.grad_norm,
            1000.0 * seconds,
            _short(tokens_per_s),
            progress.skipped_iterations,
        )
        self._write(
            progress,
            {
                "train/loss": step.loss,
                "train/lr": step.lr,
                "train/grad_norm": step.grad_norm,
                "train/loss_scale": step.loss_scale,
                "train/skipped": progress.skipped_iterations,
                "perf/step_ms": 1000.0 * seconds,
                "perf/tokens_per_s": tokens_per_s,
            },
        )

    def evaluation(self, progress: TrainProgress, loss: float, seconds: float) -> None:
        """Log a validation."""
        self.pause(seconds)
        logger.info("validation at iteration %d | loss %.6f | %.1f s", progress.iteration, loss, seconds)
        self._write(progress, {"eval/loss": loss})

    def saved(self, progress: TrainProgress, report: SaveReport, folder: object) -> None:
        """Log a published step."""
        self.pause(report.stall_seconds)
        logger.info(
            "saved iteration %d to %s in %.2f s (stalled training for %.2f s)",
            report.iteration,
            folder,
            report.save_seconds,
            report.stall_seconds,
        )
        self._write(progress, {"checkpoint/save_s": report.save_seconds, "checkpoint/stall_s": report.stall_seconds})

    def state_hash(self, progress: TrainProgress, event: str, value: str, adam_step: int) -> None:
        """Log a fingerprint of the global state; ``event`` is "saved" or "loaded"."""
        logger.info("state hash when %s at iteration %d: %s, Adam step %d", event, progress.iteration, value, adam_step)
        self._write(
            progress, {"checkpoint/event": event, "checkpoint/state_hash": value, "optimizer/adam_step": adam_step}
        )

    def _write(self, progress: TrainProgress, metrics: Metrics) -> None:
        tp, pp, dp = self.parallel.topology
        place = {"consumed_samples": progress.consumed_train_samples, "tp": tp, "pp": pp, "dp": dp}
        for sink in self.sinks:
            sink.write(progress.iteration, {**place, **metrics})

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
