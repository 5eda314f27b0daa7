from __future__ import annotations

import pytest
import torch

from megalite.metrics import timers
from megalite.metrics.memory import memory_in_use
from megalite.metrics.timers import Timers, spread
from tests.unit.samples import CPU


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of one number."""
    now = [100.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    return now


def test_times_of_a_section_are_added_up_until_they_are_taken(seconds: list[float]) -> None:
    made = Timers(1, CPU)
    for duration in (2.0, 3.0):
        with made.section("forward", level=1):
            seconds[0] += duration
        seconds[0] += 50.0
    with made.section("save", level=1):
        seconds[0] += 1.0
    assert made.take() == {"forward": 5.0, "save": 1.0}
    assert made.take() == {}


def test_a_section_that_fails_is_measured(seconds: list[float]) -> None:
    made = Timers(1, CPU)
    with pytest.raises(RuntimeError), made.section("save", level=1):
        seconds[0] += 4.0
        raise RuntimeError
    assert made.take() == {"save": 4.0}


@pytest.mark.parametrize(("level", "names"), [(0, set()), (1, {"large"}), (2, {"large", "small"})])
def test_only_sections_of_the_level_are_measured(level: int, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    made = Timers(level, torch.device("cuda", 0))
    for name, own in (("large", 1), ("small", 2)):
        with made.section(name, level=own):
            pass
    assert set(made.take()) == names
    assert len(waits) == 2 * len(names), "what is not measured does not wait for the device"


def test_spread_over_the_ranks_that_have_a_section() -> None:
    ranks = [{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0, "c": 0.5}]
    assert spread(ranks) == {"a": (1.0, 3.0), "b": (5.0, 5.0), "c": (0.5, 0.5)}
    assert list(spread(ranks)) == ["a", "b", "c"]


def test_memory_of_the_host_is_plausible() -> None:
    report = memory_in_use(CPU)
    assert set(report) == {"host_mib", "host_peak_mib"}
    assert 10.0 < report["host_mib"] < 1.1 * report["host_peak_mib"] < 1e6
