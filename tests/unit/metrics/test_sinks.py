from __future__ import annotations

import json
import math
import sys
from io import FileIO
from pathlib import Path
from types import ModuleType

import pytest

from megalite.metrics.sinks import JsonlSink, TensorBoardSink
from megalite.utils.errors import ConfigError


def _lines(path: Path) -> list[dict]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_call_is_one_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(3, {"train/loss": 2.5, "tp": 2, "checkpoint/event": "saved"})
    # Read before the sink is closed: a killed run loses no line.
    assert _lines(path) == [{"iteration": 3, "train/loss": 2.5, "tp": 2, "checkpoint/event": "saved"}]
    sink.write(4, {"train/loss": 2.25})
    sink.close()
    assert [line["iteration"] for line in _lines(path)] == [3, 4]


def test_a_restart_appends(tmp_path: Path) -> None:
    for iteration in (1, 2):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.write(iteration, {})
        sink.close()
    assert [line["iteration"] for line in _lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_json_does_not_know_is_null(tmp_path: Path, value: float | None) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"train/grad_norm": value, "train/lr": 0.5})
    sink.close()
    assert _lines(tmp_path / "metrics.jsonl") == [{"iteration": 1, "train/grad_norm": None, "train/lr": 0.5}]


def test_a_full_disk_ends_the_metrics_and_not_the_run(megalite_log: pytest.LogCaptureFixture) -> None:
    # A device of Linux that opens and never takes a byte.
    sink = JsonlSink(Path("/dev/full"))
    for iteration in (5, 6):
        sink.write(iteration, {"train/loss": 1.0})
    sink.close()
    (warning,) = megalite_log.messages
    assert "/dev/full, from iteration 5 on: No space left" in warning


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {})

    class Half:
        def __init__(self, file: FileIO) -> None:
            self.file = file

        def write(self, line: bytes) -> int:
            return self.file.write(line[:5])

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    sink._file = Half(sink._file)
    sink.write(2, {})
    assert _lines(path) == [{"iteration": 1}]


def test_a_file_that_cannot_be_opened_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened for writing: Is a directory.*logging.metrics_jsonl"):
        JsonlSink(tmp_path)


def test_tensorboard_gets_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []
    events: list[str] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            events.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            events.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = TensorBoardSink(tmp_path)
    sink.write(7, {"train/loss": 1.5, "tp": 2, "checkpoint/event": "saved", "train/lr": None})
    sink.close()
    assert written == [("train/loss", 1.5, 7), ("tp", 2, 7)]
    assert events == [str(tmp_path), "closed"]


def test_missing_tensorboard_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"logging.tensorboard_dir is .* pip install 'megalite\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
