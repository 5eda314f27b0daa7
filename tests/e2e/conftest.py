from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import train

DEADLINE_S = 240
"""For a test with several starts of torchrun, on a machine that others use too."""

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Fail a test that hangs in this process; jobs have shorter deadlines of their own."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError(f"the test did not end within {DEADLINE_S} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sequence[str]], int]]:
    """``train.main`` in this process, which gets back its signal handlers, logger and number of threads."""
    for name in _RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(os.path.dirname(train.__file__))
    logger = logging.getLogger("megalite")
    kept = (logger.handlers[:], logger.level, logger.propagate)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads = torch.get_num_threads()
    yield train.main
    logger.handlers[:], logger.propagate = kept[0], kept[2]
    logger.setLevel(kept[1])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
