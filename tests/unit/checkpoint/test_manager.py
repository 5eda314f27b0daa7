"""One save: the order of its file operations, and what a failure or a crash at any of them leaves behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import load_checkpoint, read_common
from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.paths import TRACKER, iteration_folder, read_tracker
from megalite.checkpoint.resolve import LoadDecision, LoadMode
from megalite.checkpoint.state import TrainState
from megalite.dist_checkpointing.core import is_complete
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, ConfigError, SaveError
from megalite.utils.files import FaultHook, no_fault
from tests.unit.samples import fill, small_config, train_state

OLD, NEW = 5, 6
READABLE = {Path("config.yaml"): b"a: 1\n", Path("tokenizer/megalite.json"): b"{}\n"}

Operation = tuple[str, str]


@pytest.fixture(scope="module")
def state() -> TrainState:
    return train_state(small_config({"model": {"num_layers": 1}}))


def _manager(root: Path, hook: FaultHook = no_fault) -> CheckpointManager:
    return CheckpointManager(small_config({"checkpoint": {"save": str(root)}}).checkpoint, SINGLE, hook)


def _save(state: TrainState, root: Path, iteration: int, hook: FaultHook = no_fault) -> CheckpointManager:
    fill(state, iteration)
    manager = _manager(root, hook)
    manager.resolve_start()
    manager.save(state, READABLE)
    return manager


def _assert_loads(root: Path, iteration: int, state: TrainState) -> None:
    """Load a step into ``state`` and compare it with what ``_save`` put there."""
    fill(state, iteration)
    expected = [tensor.clone() for _, _, tensor in state.optimizer.state_tensors()]
    fill(state, 77)
    decision = LoadDecision(iteration_folder(root, iteration), iteration, LoadMode.RESUME)
    load_checkpoint(state, decision, read_common(decision, SINGLE))
    actual = [tensor for _, _, tensor in state.optimizer.state_tensors()]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert state.progress.iteration == iteration


@pytest.fixture(scope="module")
def published_once(state: TrainState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published") / "run"
    _save(state, root, OLD)
    return root


@pytest.fixture
def root(published_once: Path, tmp_path: Path) -> Path:
    """A save folder in which OLD is published."""
    return Path(shutil.copytree(published_once, tmp_path / "run"))


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Recorder:
    """Notes every operation, repeated ones once; raises ``error`` before the one with number ``at``."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        self.operations: list[Operation] = []
        self.at, self.error = at, error

    def __call__(self, point: str, path: Path) -> None:
        if self.operations and self.operations[-1] == (point, path.name):
            return
        if len(self.operations) == self.at:
            raise self.error
        self.operations.append((point, path.name))


# Operations of a save of NEW beside a published OLD; a test below compares the number with a recorded save.
COUNT = 28
POINTS = range(COUNT)


def test_a_save_is_published_and_loads(state: TrainState, tmp_path: Path) -> None:
    manager = _save(state, tmp_path / "run", OLD)
    folder = iteration_folder(tmp_path / "run", OLD)
    assert read_tracker(tmp_path / "run") == OLD and is_complete(folder)
    assert manager.is_published(OLD) and not manager.is_published(NEW)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "config.yaml",
        "integrity_xxh3.npz",
        "metadata.json",
        "tokenizer/megalite.json",
    }
    assert (folder / "config.yaml").read_bytes() == b"a: 1\n"
    _assert_loads(tmp_path / "run", OLD, state)


def test_the_report_says_how_long_training_stood_still(state: TrainState, tmp_path: Path) -> None:
    fill(state, OLD)
    report = _manager(tmp_path).save(state, {})
    assert report.iteration == OLD and 0.0 < report.stall_seconds == report.save_seconds


def test_order_of_operations(state: TrainState, root: Path) -> None:
    recorder = _Recorder()
    _save(state, root, NEW, recorder)
    operations = recorder.operations
    assert len(operations) == COUNT
    position = {operation: index for index, operation in enumerate(operations)}
    assert operations[0] == ("mkdir", "iter_0000006")
    marker, tracker = position["rename", "metadata.json"], position["rename", TRACKER]
    # Everything of the step is durable before the marker, the marker before the tracker, and nothing comes after it.
    for name in ("common.pt", "__0_0.distcp", "config.yaml", "megalite.json"):
        assert position["fsync", name] < marker
    assert position["fsync", "__0_0.distcp"] < position["rename", ".metadata"] < marker < tracker
    assert [name for point, name in operations[marker + 1 :] if point == "write"] == [f".{TRACKER}.{os.getpid()}.tmp"]
    assert operations[tracker:] == [("rename", TRACKER), ("fsync_directory", root.name)]
    for index, (point, _) in enumerate(operations):
        assert point != "rename" or operations[index + 1][0] == "fsync_directory"


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operation]]:
    """Flushes and renames that are really made, as (call, absolute path)."""
    made: list[Operation] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        made.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        made.append(("from", str(source)))
        made.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    yield made


def test_everything_is_flushed_before_it_counts(
    state: TrainState, tmp_path: Path, system_calls: list[Operation]
) -> None:
    root = tmp_path / "run"
    _save(state, root, NEW)
    folder = iteration_folder(root, NEW)
    marker = system_calls.index(("rename", str(folder / "metadata.json")))
    tracker = system_calls.index(("rename", str(root / TRACKER)))
    before_marker = {path for call, path in system_calls[:marker] if call == "fsync"}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("metadata.json", ".metadata", "integrity_xxh3.npz"):
            assert str(path) in before_marker and str(path.parent) in before_marker, path
    assert str(root) in before_marker, "the folder's own entry"
    for index, (call, path) in enumerate(system_calls):
        if call == "rename":
            assert ("fsync", system_calls[index - 1][1]) in system_calls[:index], f"{path}: content before the name"
            assert system_calls[index + 1] == ("fsync", str(Path(path).parent)), f"{path}: the name itself"
    assert marker < tracker == len(system_calls) - 2


def _check_what_is_left(root: Path, published: Path) -> None:
    named = read_tracker(root)
    assert named in (OLD, NEW)
    assert is_complete(iteration_folder(root, named)), "the tracker names an incomplete step"
    assert _bytes(iteration_folder(root, OLD)) == _bytes(iteration_folder(published, OLD))
    assert _manager(root).resolve_start().iteration == named


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_point_loses_nothing_published(
    state: TrainState, root: Path, published_once: Path, point: int
) -> None:
    manager = _manager(root, _Recorder(point, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    manager.resolve_start()
    fill(state, NEW)
    with pytest.raises(SaveError, match=f"iteration {NEW} could not be saved to .*No space left.*start the same"):
        manager.save(state, READABLE)
    assert manager.is_published(OLD)
    _check_what_is_left(root, published_once)
    _assert_loads(root, OLD, state)


class _Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_loses_nothing_published(
    state: TrainState, root: Path, published_once: Path, point: int
) -> None:
    with pytest.raises(_Crash):
        _save(state, root, NEW, _Recorder(point, _Crash()))
    _check_what_is_left(root, published_once)
    # The same command again finds the place in any state.
    again = _save(state, root, NEW)
    assert read_tracker(root) == NEW and again.is_published(NEW)
    _assert_loads(root, NEW, state)


def test_a_disk_that_fills_up_within_a_file(state: TrainState, root: Path, published_once: Path) -> None:
    writes = 0

    def hook(point: str, path: Path) -> None:
        nonlocal writes
        writes += path.suffix == ".distcp" and point == "write"
        if writes == 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SaveError, match="No space left"):
        _save(state, root, NEW, hook)
    assert (iteration_folder(root, NEW) / "__0_0.distcp").stat().st_size > 0
    _check_what_is_left(root, published_once)


def test_p2_debris_is_cleared_before_the_place_is_used(state: TrainState, tmp_path: Path) -> None:
    folder = iteration_folder(tmp_path, NEW)
    (folder / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", "__7_0.distcp", "inner/x", ".metadata"):
        (folder / name).write_bytes(b"left over" * 1000)
    recorder = _Recorder()
    _save(state, tmp_path, NEW, recorder)
    assert recorder.operations[:2] == [("rmtree", folder.name), ("mkdir", folder.name)]
    assert not (folder / "__7_0.distcp").exists() and not (folder / "inner").exists()
    _assert_loads(tmp_path, NEW, state)


def test_p2_an_unpublished_complete_step_loses_its_marker_first(state: TrainState, root: Path) -> None:
    _save(state, root, NEW)
    (root / TRACKER).write_text(str(OLD))
    recorder = _Recorder(1, _Crash())
    with pytest.raises(_Crash):
        _save(state, root, NEW, recorder)
    assert recorder.operations == [("unlink", "metadata.json")]
    assert not is_complete(iteration_folder(root, NEW)), "half removed, it must not look complete"
    _save(state, root, NEW)
    _assert_loads(root, NEW, state)


def test_what_is_published_is_known_from_the_start(root: Path) -> None:
    manager = _manager(root)
    assert not manager.is_published(OLD)
    decision = manager.resolve_start()
    assert decision.iteration == OLD and manager.is_published(OLD)


def test_the_save_folder_is_made_at_the_start(tmp_path: Path) -> None:
    manager = _manager(tmp_path / "a" / "b")
    assert manager.resolve_start() is None
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        _manager(tmp_path / "file" / "run").resolve_start()


def test_notes_are_logged(state: TrainState, root: Path, megalite_log: pytest.LogCaptureFixture) -> None:
    _save(state, root, NEW)
    (root / TRACKER).write_text(str(OLD))
    assert _manager(root).resolve_start().iteration == OLD
    assert f"unpublished iteration {NEW}" in megalite_log.text


def test_without_a_folder_nothing_can_be_saved() -> None:
    manager = CheckpointManager(small_config().checkpoint, SINGLE)
    assert not manager.can_save and manager.resolve_start() is None


def test_a_damaged_step_is_refused_on_load(state: TrainState, root: Path) -> None:
    data = iteration_folder(root, OLD) / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="__0_0.distcp is cut short"):
        _assert_loads(root, OLD, state)


def test_a_tracker_that_becomes_unreadable_is_a_save_that_failed(state: TrainState, tmp_path: Path) -> None:
    manager = _save(state, tmp_path, OLD)
    (tmp_path / TRACKER).write_text("what")
    fill(state, NEW)
    with pytest.raises(SaveError, match="could not be saved .*neither an iteration nor 'release'"):
        manager.save(state, READABLE)


def test_hashes_that_cannot_be_computed_are_said_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = small_config({"checkpoint": {"save": str(tmp_path / "run"), "verify_integrity": "xxh3"}})
    with pytest.raises(ConfigError, match="pip install xxhash"):
        CheckpointManager(config.checkpoint, SINGLE).resolve_start()
    assert not (tmp_path / "run").exists()
