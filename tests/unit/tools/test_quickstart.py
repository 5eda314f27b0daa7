from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("quickstart", TOOL)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quickstart", module)
        spec.loader.exec_module(module)
        yield module


def _leg(first: int, last: int, loaded: str | None, saved: str, loss: float) -> list[dict[str, Any]]:
    def hashed(event: str, value: str, step: int) -> dict[str, Any]:
        return {"checkpoint/event": event, "checkpoint/state_hash": value, "optimizer/adam_step": step}

    metrics = [] if loaded is None else [hashed("loaded", loaded, first - 1)]
    metrics += [{"iteration": i, "train/loss": 5.0 - i / 100} for i in (first, last)]
    return [*metrics, {"iteration": last, "eval/loss": loss}, hashed("saved", saved, last)]


@pytest.mark.parametrize(
    ("loaded", "loss", "status"),
    [(("aa", "bb"), 2.0, 0), (("aa", "xx"), 2.0, 1), (("xx", "bb"), 2.0, 1), (("aa", "bb"), 3.1, 1)],
    ids=["good", "third leg differs", "second leg differs", "learned too little"],
)
def test_status_says_whether_state_survived_and_the_model_learned(
    quickstart: ModuleType, capsys: pytest.CaptureFixture[str], loaded: tuple[str, str], loss: float, status: int
) -> None:
    records = [
        _leg(1, 180, None, "aa", 3.0),
        _leg(181, 350, loaded[0], "bb", 2.5),
        _leg(351, 500, loaded[1], "cc", loss),
    ]
    assert quickstart.report(records, entropy=4.0) == status
    shown = capsys.readouterr().out
    assert ("DIFFERENT" in shown) == (loaded != ("aa", "bb"))
    for leg in quickstart.LEGS:
        assert leg.name in shown
    assert "181-350" in shown and "180 -> 350" in shown


def test_a_line_that_is_being_written_is_not_read(quickstart: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert quickstart.read_metrics(path) == []
    path.write_text(json.dumps({"iteration": 1}) + '\n{"iterat')
    assert quickstart.read_metrics(path) == [{"iteration": 1}]


def test_waiting_ends_with_the_iteration_or_with_the_process(quickstart: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 180}\n')
    running, ended = SimpleNamespace(poll=lambda: None), SimpleNamespace(poll=lambda: 1)
    quickstart.wait_for_iteration(path, 180, running, time.monotonic() + 5.0)
    with pytest.raises(SystemExit, match="iteration 181 was not reached"):
        quickstart.wait_for_iteration(path, 181, ended, time.monotonic() + 5.0)
    with pytest.raises(SystemExit, match="was not reached"):
        quickstart.wait_for_iteration(path, 181, running, time.monotonic() - 1.0)


def test_legs_stop_where_the_next_begins(quickstart: ModuleType) -> None:
    assert [leg.ranks for leg in quickstart.LEGS] == [4, 4, 1]
    assert quickstart.LEGS[0].signal_at is not None and quickstart.LEGS[-1].signal_at is None
