from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manager import SaveReport
from megalite.checkpoint.state import TrainProgress
from megalite.config.schema import LoggingConfig
from megalite.metrics.sinks import JsonlSink
from megalite.metrics.timers import Timers
from megalite.training import report
from megalite.training.report import Reporter
from megalite.training.step import StepOutput
from megalite.utils.dist import Group
from tests.unit.samples import CPU, place

STEP = StepOutput(loss=3.412907, lr=2.95e-4, grad_norm=0.871, updated=True, batch_size=8)


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(report.time, "perf_counter", made)
    return made


class _World(Group):
    """Eight ranks; the others have twice of everything this one has."""

    def gather_object(self, value: dict[str, float], target: int = 0) -> list[dict[str, float]] | None:
        if self.rank != target:
            return None
        return [value, *[{name: 2.0 * number for name, number in value.items()}] * 7]


def _reporter(
    tmp_path: Path,
    log_interval: int = 1,
    train_iters: int = 2000,
    seq_length: int = 512,
    rank: int = 0,
    **settings: Any,
) -> Reporter:
    settings = LoggingConfig(log_interval=log_interval, **settings)
    return Reporter(
        replace(place(tp=(2, 0), dp=(4, 0)), world=_World(tuple(range(8)), rank, None)),
        [JsonlSink(tmp_path / "metrics.jsonl")],
        settings,
        train_iters=train_iters,
        seq_length=seq_length,
        flops_per_sequence=1e12,
        timers=Timers(settings.timing_log_level, CPU),
    )


def _metrics(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_console_line(tmp_path: Path, clock: _Clock, megalite_log: pytest.LogCaptureFixture) -> None:
    reporter = _reporter(tmp_path)
    clock.now += 0.4123
    reporter.iteration(TrainProgress(120), STEP)
    (line,) = [message for message in megalite_log.messages if not message.startswith("memory")]
    assert line == (
        "iteration      120/    2000 | loss 3.412907 | lr 2.950e-04 | grad norm 0.871 | 412.3 ms | 9.9k tok/s | "
        "skipped 0"
    )


@pytest.mark.parametrize(("seconds", "text"), [(1e-3, "4.1M"), (0.1, "41.0k"), (4.0, "1.0k"), (10.0, "410")])
def test_tokens_per_second_are_short(
    tmp_path: Path, clock: _Clock, megalite_log: pytest.LogCaptureFixture, seconds: float, text: str
) -> None:
    reporter = _reporter(tmp_path)
    clock.now += seconds
    reporter.iteration(TrainProgress(1), STEP)
    assert f"| {text} tok/s |" in megalite_log.text


def test_tokens_of_batches_of_different_sizes_are_added_up(tmp_path: Path, clock: _Clock) -> None:
    reporter = _reporter(tmp_path, log_interval=10, seq_length=100)
    reporter.iteration(TrainProgress(8), STEP)
    for iteration, batch_size in ((9, 2), (10, 6)):
        clock.now += 2.0
        reporter.iteration(TrainProgress(iteration), replace(STEP, batch_size=batch_size))
    assert [line["perf/tokens_per_s"] for line in _metrics(tmp_path)][1:] == [pytest.approx(800 / 4.0)]


def test_numbers_for_machines(tmp_path: Path, clock: _Clock) -> None:
    reporter = _reporter(tmp_path)
    clock.now += 0.5
    reporter.iteration(TrainProgress(120, consumed_train_samples=960, skipped_iterations=2), STEP)
    (line,) = _metrics(tmp_path)
    assert line == {
        "iteration": 120,
        "consumed_samples": 960,
        "tp": 2,
        "pp": 1,
        "dp": 4,
        "train/loss": 3.412907,
        "train/lr": 2.95e-4,
        "train/grad_norm": 0.871,
        "train/loss_scale": 1.0,
        "train/skipped": 2,
        "perf/step_ms": pytest.approx(500.0),
        "perf/tokens_per_s": pytest.approx(8192.0),
        # 8 sequences of 1 teraflop in half a second on 8 ranks.
        "perf/tflops_per_rank": pytest.approx(2.0),
    }


def test_throughput_is_shown_if_asked_for(
    tmp_path: Path, clock: _Clock, megalite_log: pytest.LogCaptureFixture
) -> None:
    reporter = _reporter(tmp_path, log_throughput=True)
    clock.now += 0.4123
    reporter.iteration(TrainProgress(120), STEP)
    assert megalite_log.messages[-1].endswith("| skipped 0 | 2.43 TFLOP/s")


def test_memory_is_shown_for_the_first_iterations_and_saves(
    tmp_path: Path, megalite_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "memory_in_use", lambda device: {"host_mib": 100.2, "host_peak_mib": 0.1})
    reporter = _reporter(tmp_path, log_interval=100)
    for iteration in range(7, 11):
        reporter.iteration(TrainProgress(iteration), STEP)
        reporter.memory_around_save("before")
        reporter.memory_around_save("after")
    lines = [message for message in megalite_log.messages if message.startswith("memory")]
    assert [line.partition(" in MiB")[0] for line in lines] == [
        "memory after iteration 7",
        "memory before the save",
        "memory after the save",
        "memory after iteration 8",
        "memory before the save",
        "memory after the save",
    ]
    # One number where all ranks have it.
    assert lines[0] == "memory after iteration 7 in MiB: host 100 .. 200, host_peak 0"


def test_sections_are_shown_with_their_spread_over_the_ranks(
    tmp_path: Path, clock: _Clock, megalite_log: pytest.LogCaptureFixture
) -> None:
    reporter = _reporter(tmp_path, log_interval=2, timing_log_level=1)
    for iteration in (1, 2, 3, 4):
        with reporter.timers.section("optimizer", level=1):
            clock.now += 0.010
        reporter.iteration(TrainProgress(iteration), STEP)
    lines = [message for message in megalite_log.messages if message.startswith("time since")]
    prefix = "time since the last line, least .. most over the ranks, in ms: optimizer"
    # Of one iteration after the start, then of two.
    assert lines == [f"{prefix} 10.0 .. 20.0", f"{prefix} 10.0 .. 20.0", f"{prefix} 20.0 .. 40.0"]
    values = [line["timers/optimizer_ms"] for line in _metrics(tmp_path) if "timers/optimizer_ms" in line]
    assert values == [pytest.approx(20.0), pytest.approx(20.0), pytest.approx(40.0)]


def test_other_ranks_take_part_and_say_nothing(tmp_path: Path, megalite_log: pytest.LogCaptureFixture) -> None:
    reporter = _reporter(tmp_path, timing_log_level=1, rank=3)
    reporter.iteration(TrainProgress(1), STEP)
    reporter.memory_around_save("before")
    assert not any(message.startswith(("memory", "time since")) for message in megalite_log.messages)


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, megalite_log: pytest.LogCaptureFixture) -> None:
    reporter = _reporter(tmp_path)
    reporter.iteration(TrainProgress(1), StepOutput(math.nan, 1e-3, math.inf, updated=False, batch_size=8))
    (line,) = _metrics(tmp_path)
    assert line["train/loss"] is None and line["train/grad_norm"] is None
    assert "loss nan" in megalite_log.text


def test_due_are_the_first_every_nth_and_the_last(tmp_path: Path) -> None:
    reporter = _reporter(tmp_path, log_interval=5, train_iters=12)
    for iteration in range(3, 13):
        reporter.iteration(TrainProgress(iteration), STEP)
    assert [line["iteration"] for line in _metrics(tmp_path)] == [3, 5, 10, 12]


def test_step_time_is_a_mean_without_saving_and_validating(tmp_path: Path, clock: _Clock) -> None:
    reporter = _reporter(tmp_path, log_interval=2, train_iters=4)
    clock.now += 1.0
    reporter.iteration(TrainProgress(2), STEP)
    clock.now += 7.0
    reporter.evaluation(TrainProgress(2), {"valid": 3.0}, seconds=7.0)
    clock.now += 20.0
    reporter.saved(TrainProgress(2), SaveReport(2, 30.0, 20.0), tmp_path)
    clock.now += 0.25
    reporter.iteration(TrainProgress(3), STEP)
    clock.now += 0.75
    reporter.iteration(TrainProgress(4), STEP)
    times = [line["perf/step_ms"] for line in _metrics(tmp_path) if "perf/step_ms" in line]
    assert times == [pytest.approx(1000.0), pytest.approx(500.0)]


def test_validation_and_save_lines(tmp_path: Path, megalite_log: pytest.LogCaptureFixture) -> None:
    reporter = _reporter(tmp_path)
    reporter.evaluation(TrainProgress(120), {"valid": 3.25}, 1.5)
    reporter.saved(TrainProgress(120), SaveReport(120, 0.414, 0.0189), "runs/debug/iter_0000120")
    reporter.state_hash(TrainProgress(120), "saved", "abc", 119)
    first, second, third = megalite_log.messages
    assert re.fullmatch(r"validation at iteration 120 \| loss 3\.250000 \| 1\.5 s", first)
    assert second == "saved iteration 120 to runs/debug/iter_0000120 in 0.41 s (stalled training for 0.02 s)"
    assert "saved" in third and "abc" in third and "119" in third
    evaluation, saved, state = _metrics(tmp_path)
    assert evaluation["eval/loss"] == 3.25
    assert (saved["checkpoint/save_s"], saved["checkpoint/stall_s"]) == (0.414, 0.0189)
    assert (state["checkpoint/event"], state["checkpoint/state_hash"], state["optimizer/adam_step"]) == (
        "saved",
        "abc",
        119,
    )


def test_closing_closes_the_sinks(tmp_path: Path) -> None:
    closed: list[int] = []

    class Sink:
        def write(self, iteration: int, metrics: Any) -> None: ...

        def close(self) -> None:
            closed.append(1)

    reporter = _reporter(tmp_path)
    reporter.sinks = [Sink(), Sink()]
    reporter.close()
    assert closed == [1, 1]
