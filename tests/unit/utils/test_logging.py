from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megalite.utils.logging import setup_logging


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    root = logging.getLogger("megalite")
    before = (root.handlers[:], root.level, root.propagate)
    yield capsys
    root.handlers[:], root.level, root.propagate = before


def _say_something() -> None:
    logger = logging.getLogger("megalite.training.loop")
    logger.debug("details")
    logger.info("iteration 1")
    logger.warning("disk is slow")
    logger.error("disk is full")


def test_rank_0_says_what_happens(console: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    _say_something()
    assert console.readouterr().err == "iteration 1\n[rank 0] WARNING: disk is slow\n[rank 0] ERROR: disk is full\n"


def test_other_ranks_only_warn_with_their_number(console: pytest.CaptureFixture[str]) -> None:
    setup_logging(3)
    _say_something()
    assert console.readouterr().err == "[rank 3] WARNING: disk is slow\n[rank 3] ERROR: disk is full\n"


def test_level_and_repeated_setup(console: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    setup_logging(0, "ERROR")
    _say_something()
    assert console.readouterr().err == "[rank 0] ERROR: disk is full\n"
