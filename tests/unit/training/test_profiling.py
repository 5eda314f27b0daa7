from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalite.config.schema import ProfilingConfig
from megalite.training.profiling import Profiler


def _config(folder: Path) -> ProfilingConfig:
    return ProfilingConfig(
        profile=True, profile_step_start=1, profile_step_end=3, profile_ranks=[0, 2], profile_dir=folder
    )


def _run(profiler: Profiler, iterations: range) -> None:
    for iteration in iterations:
        profiler.before_iteration(iteration)
        with torch.profiler.record_function(f"iteration_{iteration}"):
            torch.ones(2).add(1.0)


def _recorded(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("iteration_")}


@pytest.mark.parametrize("end", [5, 3], ids=["closed by the run", "closed at the end"])
def test_the_asked_iterations_are_recorded(tmp_path: Path, end: int) -> None:
    profiler = Profiler(_config(tmp_path / "traces"), rank=2)
    _run(profiler, range(end))
    profiler.close()
    profiler.close()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["trace_rank2.json"]
    assert _recorded(tmp_path / "traces" / "trace_rank2.json") == {"iteration_1", "iteration_2"}


def test_a_run_resumed_behind_the_end_records_nothing(tmp_path: Path) -> None:
    profiler = Profiler(_config(tmp_path / "traces"), rank=0)
    _run(profiler, range(3, 6))
    profiler.close()
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize("config", [ProfilingConfig(), None], ids=["switched off", "other rank"])
def test_nothing_is_recorded_unasked(tmp_path: Path, config: ProfilingConfig | None) -> None:
    profiler = Profiler(config or _config(tmp_path / "traces"), rank=1)
    _run(profiler, range(4))
    profiler.close()
    assert not (tmp_path / "traces").exists()
