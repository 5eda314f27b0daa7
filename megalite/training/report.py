"""What the run says about itself: one console line per logged iteration, and the same numbers for machines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from megalite.checkpoint.manager import SaveReport
from megalite.checkpoint.state import TrainProgress
from megalite.config.schema import LoggingConfig
from megalite.metrics.memory import memory_in_use
from megalite.metrics.sinks import Metrics, Sink
from megalite.metrics.timers import Timers, spread
from megalite.parallel.state import ParallelState
from megalite.training.step import StepOutput

logger = logging.getLogger(__name__)

MEMORY_REPORTS = 2
"""Iterations after a start, and saves, whose memory is reported: the second shows what the first left behind."""


class Reporter:
    """Writes to the console and to ``sinks``; the sinks are given on rank 0 only.

    Time spent in saving and validating is taken out of the step time.
    """

    def __init__(
        self,
        parallel: ParallelState,
        sinks: Sequence[Sink],
        settings: LoggingConfig,
        *,
        train_iters: int,
        seq_length: int,
        flops_per_sequence: float,
        timers: Timers,
    ) -> None:
        self.parallel = parallel
        self.sinks = list(sinks)
        self.settings = settings
        self.train_iters = train_iters
        self.seq_length = seq_length
        self.flops_per_sequence = flops_per_sequence
        self.timers = timers
        self._sequences = 0
        self._memory_reports = self._save_reports = 0
        self._interval_started = time.perf_counter()
        self._paused = 0.0
        self._iterations = 0
        self._is_first = True

    def started(self, progress: TrainProgress, run_id: str) -> None:
        """Note a start of the run; a resumed run keeps its id."""
        self._write(progress, {"run/event": "start", "run/id": run_id})

    def restart_clock(self) -> None:
        """Begin to measure iterations now: what came before is set-up."""
        self._interval_started = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` out of the step time of the present interval."""
        self._paused += seconds

    def iteration(self, progress: TrainProgress, step: StepOutput) -> None:
        """Log the iteration that has just been done, if it is due: its own loss, the mean step time since the last.

        Due are every ``log_interval``-th, the first after a start, which shows how a resumed run goes on, and the last.
        Collective over all ranks while timers or memory are reported.
        """
        self._iterations += 1
        self._sequences += 0 if step.is_left_out else step.batch_size
        if self._memory_reports < MEMORY_REPORTS:
            self._memory_reports += 1
            self.memory(f"after iteration {progress.iteration}")
        is_due = self._is_first or progress.iteration % self.settings.log_interval == 0
        if not is_due and progress.iteration != self.train_iters:
            return
        self._is_first = False
        self._line(progress, step)
        if self.timers.level > 0:
            self._sections(progress)

    def _line(self, progress: TrainProgress, step: StepOutput) -> None:
        now = time.perf_counter()
        elapsed = max(now - self._interval_started - self._paused, 1e-9)
        seconds, tokens_per_s = elapsed / self._iterations, self._sequences * self.seq_length / elapsed
        tflops = self._sequences * self.flops_per_sequence / elapsed / self.parallel.world.size / 1e12
        self._interval_started, self._paused, self._iterations, self._sequences = now, 0.0, 0, 0
        logger.info(
            "iteration %8d/%8d | loss %.6f | lr %.3e | grad norm %.3f | %.1f ms | %s tok/s | skipped %d%s",
            progress.iteration,
            self.train_iters,
            step.loss,
            step.lr,
            step.grad_norm,
            1000.0 * seconds,
            _short(tokens_per_s),
            progress.skipped_iterations,
            f" | {tflops:.3g} TFLOP/s" if self.settings.log_throughput else "",
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
                "perf/tflops_per_rank": tflops,
            },
        )

    def _sections(self, progress: TrainProgress) -> None:
        """Log the sections' times, least and most over the ranks. Collective over all ranks."""
        ranks = self.parallel.world.gather_object(self.timers.take())
        if ranks is None:
            return
        times = spread(ranks)
        shown = ", ".join(f"{name} {1e3 * low:.1f} .. {1e3 * high:.1f}" for name, (low, high) in times.items())
        logger.info("time since the last line, least .. most over the ranks, in ms: %s", shown)
        self._write(progress, {f"timers/{name}_ms": 1e3 * high for name, (_, high) in times.items()})

    def memory_around_save(self, when: str) -> None:
        """Log the memory in use before or after the first saves. Collective over all ranks."""
        if self._save_reports < 2 * MEMORY_REPORTS:
            self._save_reports += 1
            self.memory(f"{when} the save")

    def memory(self, when: str) -> None:
        """Log the memory in use, least and most over the ranks. Collective over all ranks."""
        ranks = self.parallel.world.gather_object(memory_in_use(self.timers.device))
        if ranks is not None:
            names = ranks[0]
            spreads = (f"{name[:-4]} {_range(rank[name] for rank in ranks)}" for name in names)
            logger.info("memory %s in MiB: %s", when, ", ".join(spreads))

    def evaluation(self, progress: TrainProgress, losses: Mapping[str, float], seconds: float) -> None:
        """Log a validation: the loss of each set, and their mean."""
        self.pause(seconds)
        loss = sum(losses.values()) / len(losses)
        metrics = {"eval/loss": loss}
        logger.info("validation at iteration %d | loss %.6f | %.1f s", progress.iteration, loss, seconds)
        if len(losses) > 1:
            for name, of_set in losses.items():
                short = name.removeprefix("valid/")
                logger.info("validation on %s | loss %.6f", short, of_set)
                metrics[f"eval/{short}/loss"] = of_set
        self._write(progress, metrics)

    def saved(self, progress: TrainProgress, report: SaveReport, folder: object) -> None:
        """Log a published step. The stall at the begin of an asynchronous save is its caller's to count."""
        self.pause(report.finalize_seconds or report.stall_seconds)
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


def _range(values: Iterable[float]) -> str:
    low, *_, high = sorted([*values] * 2)
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} .. {high:.0f}"


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
