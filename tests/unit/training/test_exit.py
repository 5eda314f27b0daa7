"""The end of an iteration: what decides first, and when something is saved."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.checkpoint.manager import SaveReport
from megalite.checkpoint.state import TrainProgress
from megalite.metrics.timers import Timers
from megalite.training.exit import ExitReason, checkpoint_and_decide_exit, is_stop_requested, save_checkpoint
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import CPU, on_threads

SIGNAL, DURATION, INTERVAL = ExitReason.SIGNAL, ExitReason.DURATION, ExitReason.INTERVAL


class _Signal:
    def __init__(self, raised: bool) -> None:
        self.raised = raised
        self.is_followed = False

    def is_raised(self) -> bool:
        return self.raised

    def describe(self) -> str:
        return "SIGUSR1"

    def follow(self) -> None:
        self.is_followed = True


class _Manager:
    """Counts saves; publishes what it saves."""

    is_saving = False

    def __init__(self, can_save: bool, published: int | None) -> None:
        self.can_save = can_save
        self.published = published
        self.saved: list[int] = []

    def is_published(self, iteration: int) -> bool:
        return iteration == self.published

    def save(self, state: Any, readable: Any) -> SaveReport:
        self.saved.append(state.iteration)
        self.published = state.iteration
        return SaveReport(state.iteration, 0.5, 0.25)


def _context(
    iteration: int,
    *,
    signalled: bool = False,
    save_interval: int | None = None,
    minutes: float | None = None,
    elapsed_minutes: float = 0.0,
    exit_interval: int | None = None,
    can_save: bool = True,
    published: int | None = None,
    world: Group = SINGLE,
) -> Any:
    progress = TrainProgress(iteration)
    reports: list[SaveReport] = []
    save = Path("run") if can_save else None
    return SimpleNamespace(
        config=SimpleNamespace(
            training=SimpleNamespace(exit_duration_in_mins=minutes, exit_interval=exit_interval),
            checkpoint=SimpleNamespace(
                save=save,
                save_interval=save_interval,
                log_state_hash=False,
                async_save=False,
                async_save_on_busy="wait",
            ),
        ),
        state=progress,
        progress=progress,
        checkpoints=_Manager(can_save, published),
        readable_copies=dict,
        exit_signal=_Signal(signalled),
        reporter=SimpleNamespace(
            saved=lambda progress, report, folder: reports.append((report, folder)),
            memory_around_save=lambda when: None,
        ),
        timers=Timers(0, CPU),
        reports=reports,
        started=time.monotonic() - 60.0 * elapsed_minutes,
        parallel=SimpleNamespace(world=world),
        last_save=None,
    )


@pytest.mark.parametrize(
    ("situation", "reason", "saved"),
    [
        ({"iteration": 10}, None, []),
        ({"iteration": 10, "save_interval": 5}, None, [10]),
        ({"iteration": 10, "save_interval": 4}, None, []),
        ({"iteration": 10, "exit_interval": 5}, INTERVAL, [10]),
        ({"iteration": 10, "exit_interval": 3}, None, []),
        ({"iteration": 10, "minutes": 1.0, "elapsed_minutes": 0.5}, None, []),
        ({"iteration": 10, "minutes": 1.0, "elapsed_minutes": 1.5}, DURATION, [10]),
        ({"iteration": 10, "signalled": True}, SIGNAL, [10]),
        # The earlier reason wins, and one step is saved once.
        ({"iteration": 10, "signalled": True, "save_interval": 5, "exit_interval": 5}, SIGNAL, [10]),
        ({"iteration": 10, "save_interval": 5, "exit_interval": 5}, INTERVAL, [10]),
        (
            {"iteration": 10, "save_interval": 5, "minutes": 1.0, "elapsed_minutes": 2.0, "exit_interval": 5},
            DURATION,
            [10],
        ),
        # What is published is not written again.
        ({"iteration": 10, "signalled": True, "published": 10}, SIGNAL, []),
        ({"iteration": 10, "save_interval": 5, "published": 10}, None, []),
        ({"iteration": 10, "save_interval": 5, "published": 5}, None, [10]),
        # Without a folder the run still stops as asked.
        ({"iteration": 10, "signalled": True, "can_save": False}, SIGNAL, []),
        ({"iteration": 10, "exit_interval": 5, "can_save": False}, INTERVAL, []),
    ],
    ids=str,
)
def test_decisions(situation: dict[str, Any], reason: ExitReason | None, saved: list[int]) -> None:
    ctx = _context(**situation)
    assert checkpoint_and_decide_exit(ctx) is reason
    assert ctx.checkpoints.saved == saved
    assert ctx.exit_signal.is_followed == (reason is SIGNAL)


def test_a_signal_says_what_it_does(megalite_log: pytest.LogCaptureFixture) -> None:
    checkpoint_and_decide_exit(_context(10, signalled=True))
    checkpoint_and_decide_exit(_context(10, signalled=True, can_save=False))
    first, second = megalite_log.messages
    assert first == "asked to stop by SIGUSR1: saving iteration 10 and leaving"
    assert "nothing is saved, as checkpoint.save is not set" in second


def test_what_one_rank_knows_decides_for_all() -> None:
    def body(group: Group) -> tuple[ExitReason | None, ExitReason | None, bool]:
        signal = _context(10, signalled=group.rank == 2, world=group)
        late = _context(10, minutes=1.0, elapsed_minutes=2.0 * (group.rank == 1), world=group)
        asked = _context(10, signalled=group.rank == 0, world=group)
        return checkpoint_and_decide_exit(signal), checkpoint_and_decide_exit(late), is_stop_requested(asked)

    assert on_threads(3, body) == [(SIGNAL, DURATION, True)] * 3


def test_a_save_is_reported_and_remembered() -> None:
    ctx = _context(10)
    save_checkpoint(ctx)
    report = SaveReport(10, 0.5, 0.25)
    assert ctx.reports == [(report, Path("run") / "iter_0000010")] and ctx.last_save == report
    save_checkpoint(ctx)
    assert ctx.checkpoints.saved == [10], "it is published now"
