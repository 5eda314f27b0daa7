from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from megalite.resilience.signals import ExitSignal

Listener = Callable[..., ExitSignal]


@pytest.fixture
def listen() -> Iterator[Listener]:
    """Make listeners that are taken down at the end, the last one first."""
    made: list[ExitSignal] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}

    def make(*args: object, **kwargs: object) -> ExitSignal:
        made.append(ExitSignal(*args, **kwargs))
        return made[-1]

    yield make
    for listener in reversed(made):
        listener.restore()
    # A signal that was followed stays ignored, which no other test must see.
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_noted_by_name(listen: Listener, name: str) -> None:
    asked = listen(name)
    assert not asked.is_raised()
    signal.raise_signal(signal.Signals[name])
    assert asked.is_raised()
    assert asked.describe() == name


def test_more_signals_change_nothing(listen: Listener) -> None:
    asked = listen("SIGUSR1")
    for _ in range(3):
        signal.raise_signal(signal.SIGUSR1)
    assert asked.received == 3
    assert asked.is_raised()


def test_another_signal_is_none(listen: Listener) -> None:
    asked, other = listen("SIGUSR1"), listen("SIGUSR2")
    signal.raise_signal(signal.SIGUSR2)
    assert not asked.is_raised() and other.is_raised()


def test_the_previous_handler_is_put_back() -> None:
    previous = signal.getsignal(signal.SIGUSR1)
    asked = ExitSignal("SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) != previous
    asked.restore()
    assert signal.getsignal(signal.SIGUSR1) == previous


def test_a_followed_signal_is_ignored_to_the_end(listen: Listener) -> None:
    asked = listen("SIGUSR1")
    signal.raise_signal(signal.SIGUSR1)
    asked.follow()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.raise_signal(signal.SIGUSR1)
    asked.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert asked.received == 1 and asked.is_raised()


def test_without_handling_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.getsignal(signal.SIGUSR1)
    asked = ExitSignal("SIGUSR1", handle=False)
    assert signal.getsignal(signal.SIGUSR1) == previous
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not asked.is_raised(), "who does not listen does not stop for its launcher's death either"
    asked.follow()
    asked.restore()
    assert signal.getsignal(signal.SIGUSR1) == previous


def test_the_launchers_death_counts_as_being_asked(listen: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 4321)
    asked = listen()
    assert not asked.parent_is_gone and not asked.is_raised()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert asked.parent_is_gone and asked.is_raised()
    assert "death" in asked.describe()
    signal.raise_signal(signal.SIGTERM)
    assert asked.describe() == "SIGTERM"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError):
        ExitSignal("SIGNOTHING")
