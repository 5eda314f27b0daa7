"""train.py: what a rank's exit status says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import train as program
from megalite.training.exit import ExitReason
from megalite.utils.errors import CheckpointError, ConfigError, DataError, MegaliteError, PeerError, SaveError
from tests.unit.config.samples import MINIMAL

ARGUMENTS = [f"--{key}={value}" for key, value in MINIMAL.items()]


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger("megalite")
    before = (root.handlers[:], root.level, root.propagate)
    monkeypatch.delenv("RANK", raising=False)
    yield
    root.handlers[:], root.level, root.propagate = before


def _runs(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> list[Any]:
    """Let the program run nothing but ``error``; return the configurations it was asked to run."""
    asked: list[Any] = []

    @contextlib.contextmanager
    def training_run(config: Any) -> Iterator[Any]:
        asked.append(config)
        yield SimpleNamespace(progress=SimpleNamespace(iteration=7))

    def train(ctx: Any) -> ExitReason:
        if error is not None:
            raise error
        return ExitReason.SIGNAL

    monkeypatch.setattr(program, "training_run", training_run)
    monkeypatch.setattr(program, "train", train)
    return asked


def test_a_run_that_ends_as_asked_has_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _runs(monkeypatch, None)
    assert program.main(ARGUMENTS) == 0
    assert asked[0].model.num_layers == 4
    assert "stopped at iteration 7: asked by a signal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (CheckpointError("x"), 3),
        (SaveError("x"), 4),
        (MegaliteError("x"), 1),
        (PeerError("x", 3), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_explained_error_is_one_line_and_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: MegaliteError, status: int
) -> None:
    _runs(monkeypatch, error)
    assert program.main(ARGUMENTS) == status
    assert capsys.readouterr().err == "[rank 0] ERROR: x\n"


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(monkeypatch, RuntimeError("bug"))
    with pytest.raises(RuntimeError, match="bug"):
        program.main(ARGUMENTS)


def test_a_wrong_setting_has_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = _runs(monkeypatch, None)
    assert program.main([*ARGUMENTS, "--training.train_iter=5"]) == 2
    assert asked == [] and "train_iters" in capsys.readouterr().err


def test_help_is_printed_by_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = _runs(monkeypatch, None)
    assert program.main(["--help"]) == 0
    assert "checkpoint" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert program.main(["--help"]) == 0
    assert capsys.readouterr().out == "" and asked == []
