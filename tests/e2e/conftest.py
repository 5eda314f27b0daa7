from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import train

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


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
