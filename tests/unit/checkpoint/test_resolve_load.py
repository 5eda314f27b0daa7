"""Where a start comes from: the table of what lies in the folders and what the settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.paths import TRACKER, iteration_folder
from megalite.checkpoint.resolve import LoadMode, resolve_load
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.serialization import write_marker
from megalite.utils.errors import CheckpointError, ConfigError, DamagedCheckpointError


def _steps(root: Path, *complete: int, tracker: int | None = None, incomplete: tuple[int, ...] = ()) -> Path:
    for iteration in (*complete, *incomplete):
        iteration_folder(root, iteration).mkdir(parents=True)
        if iteration in complete:
            write_marker(iteration_folder(root, iteration))
    root.mkdir(exist_ok=True)
    if tracker is not None:
        (root / TRACKER).write_text(str(tracker))
    return root


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "empty": _steps(tmp_path / "empty"),
        "run": _steps(tmp_path / "run", 10, 20, tracker=20),
        "other": _steps(tmp_path / "other", 5, 7, tracker=7),
        "base": _steps(tmp_path / "base", 900, tracker=900),
        "missing": tmp_path / "missing",
    }


RESUME, START, WEIGHTS = LoadMode.RESUME, LoadMode.START_FROM, LoadMode.WEIGHTS


@pytest.mark.parametrize(
    ("named", "settings", "expected"),
    [
        ({}, {}, None),
        ({"save": "empty"}, {}, None),
        ({"save": "missing"}, {}, None),
        ({"save": "run"}, {}, ("run", 20, RESUME)),
        # A published step in save wins over whatever describes the first start.
        ({"save": "run", "load": "other"}, {}, ("run", 20, RESUME)),
        ({"save": "run", "load": "other"}, {"ckpt_step": 5, "finetune": True}, ("run", 20, RESUME)),
        ({"save": "run", "load": "other"}, {"no_load_optim": True, "no_load_rng": True}, ("run", 20, RESUME)),
        ({"save": "run", "pretrained_checkpoint": "base"}, {}, ("run", 20, RESUME)),
        ({"save": "run", "load": "missing"}, {}, ("run", 20, RESUME)),
        # First starts.
        ({"save": "empty", "load": "other"}, {}, ("other", 7, START)),
        ({"load": "other"}, {}, ("other", 7, START)),
        ({"load": "other"}, {"ckpt_step": 5}, ("other", 5, START)),
        ({"load": "other"}, {"finetune": True}, ("other", 7, WEIGHTS)),
        ({"load": "other"}, {"finetune": True, "ckpt_step": 5}, ("other", 5, WEIGHTS)),
        ({"load": "other", "pretrained_checkpoint": "base"}, {}, ("other", 7, START)),
        ({"load": "empty", "pretrained_checkpoint": "base"}, {}, ("base", 900, WEIGHTS)),
        ({"save": "empty", "pretrained_checkpoint": "base"}, {}, ("base", 900, WEIGHTS)),
        ({"load": "empty"}, {"exit_on_missing_checkpoint": False}, None),
        ({"pretrained_checkpoint": "missing"}, {"exit_on_missing_checkpoint": False}, None),
    ],
    ids=str,
)
def test_decisions(folders: dict[str, Path], named: dict[str, str], settings: dict[str, Any], expected: Any) -> None:
    config = CheckpointConfig(**{key: folders[name] for key, name in named.items()}, **settings)
    decision = resolve_load(config)
    if expected is None:
        assert decision is None
        return
    root, iteration, mode = expected
    assert (decision.iteration, decision.mode) == (iteration, mode)
    assert decision.folder == iteration_folder(folders[root], iteration)
    assert decision.notes == ()


@pytest.mark.parametrize("key", ["load", "pretrained_checkpoint"])
@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_named_folder_without_a_checkpoint_is_an_error(folders: dict[str, Path], key: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in .*{name} .*exit_on_missing_checkpoint"):
        resolve_load(CheckpointConfig(**{key: folders[name]}))


def test_starting_from_random_weights_as_configured_is_said(
    folders: dict[str, Path], megalite_log: pytest.LogCaptureFixture
) -> None:
    resolve_load(CheckpointConfig(load=folders["empty"], exit_on_missing_checkpoint=False))
    assert [(r.levelname, "starting from random weights" in r.message) for r in megalite_log.records] == [
        ("WARNING", True)
    ]


def test_a_step_instead_of_its_folder(folders: dict[str, Path]) -> None:
    step = iteration_folder(folders["other"], 5)
    with pytest.raises(CheckpointError, match=f"{step} is a single iteration.*parent {folders['other']} .*ckpt_step"):
        resolve_load(CheckpointConfig(load=step))


def test_the_folder_above_the_right_one(folders: dict[str, Path]) -> None:
    for name in ("run", "base"):
        (folders[name] / TRACKER).unlink()
    with pytest.raises(CheckpointError, match=f"no checkpoint of its own, but {folders['other']} has"):
        resolve_load(CheckpointConfig(load=folders["other"].parent))


def test_a_file_instead_of_a_folder(folders: dict[str, Path]) -> None:
    path = folders["empty"] / "file"
    path.touch()
    with pytest.raises(ConfigError, match=f"checkpoint.save is {path}, which is a file"):
        resolve_load(CheckpointConfig(save=path))
    with pytest.raises(ConfigError, match=f"but {path} is a file"):
        resolve_load(CheckpointConfig(save=path / "run"))
    with pytest.raises(CheckpointError, match=f"no checkpoint in {path}"):
        resolve_load(CheckpointConfig(load=path))


def test_newer_unpublished_steps_are_named_and_not_used(tmp_path: Path) -> None:
    root = _steps(tmp_path / "run", 10, 20, 30, 40, tracker=20, incomplete=(50,))
    decision = resolve_load(CheckpointConfig(save=root))
    assert decision.iteration == 20
    (note,) = decision.notes
    # The whole sentence: a number of its own could also stand in the temporary folder's name.
    assert note == (
        f"{root} has complete but unpublished iterations 30, 40 (the tracker names 20): not used, "
        "and replaced when the run reaches them again"
    )


def test_steps_without_a_tracker_are_named_and_not_used(tmp_path: Path, megalite_log: pytest.LogCaptureFixture) -> None:
    root = _steps(tmp_path / "run", 10)
    assert resolve_load(CheckpointConfig(save=root)) is None
    assert "unpublished iteration 10 (there is no tracker): not used" in megalite_log.text


@pytest.mark.parametrize("key", ["save", "load", "pretrained_checkpoint"])
def test_a_tracker_must_not_name_an_incomplete_step(tmp_path: Path, key: str) -> None:
    root = _steps(tmp_path / "run", 10, 20, tracker=30, incomplete=(30,))
    with pytest.raises(CheckpointError, match=r"iteration 30 of .* is incomplete .*complete there: 10, 20\. Choose"):
        resolve_load(CheckpointConfig(**{key: root}))


def test_missing_steps_are_refused(tmp_path: Path) -> None:
    root = _steps(tmp_path / "run", tracker=30)
    with pytest.raises(CheckpointError, match="iteration 30 of .* is missing; no iteration there is complete"):
        resolve_load(CheckpointConfig(save=root))
    other = _steps(tmp_path / "other", 7, tracker=7)
    with pytest.raises(CheckpointError, match="iteration 6 of .* is missing; complete there: 7"):
        resolve_load(CheckpointConfig(load=other, ckpt_step=6, exit_on_missing_checkpoint=False))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    root = _steps(tmp_path / "release_and_steps", 10, 20)
    (root / TRACKER).write_text("release")
    (root / "release").mkdir()
    write_marker(root / "release")
    return root


@pytest.mark.parametrize(
    ("key", "settings", "folder", "iteration", "mode"),
    [
        ("save", {}, "release", 0, LoadMode.RELEASE),
        ("load", {}, "release", 0, LoadMode.RELEASE),
        ("load", {"finetune": True}, "release", 0, WEIGHTS),
        ("pretrained_checkpoint", {}, "release", 0, WEIGHTS),
        # Any given number wins over the word in the tracker.
        ("load", {"ckpt_step": 10}, "iter_0000010", 10, START),
    ],
)
def test_a_release_is_loaded(
    release: Path, key: str, settings: dict[str, Any], folder: str, iteration: int, mode: LoadMode
) -> None:
    decision = resolve_load(CheckpointConfig(**{key: release}, **settings))
    assert (decision.folder, decision.iteration, decision.mode) == (release / folder, iteration, mode)
    assert decision.step == ("release" if folder == "release" else iteration)


def test_steps_beside_the_release_of_a_save_folder_are_named(release: Path) -> None:
    (note,) = resolve_load(CheckpointConfig(save=release)).notes
    assert "unpublished iterations 10, 20 (the tracker names release): not used" in note


def test_a_release_that_is_not_complete_is_refused(release: Path) -> None:
    (release / "release" / "metadata.json").unlink()
    for settings in ({}, {"fallback": "newest_complete"}):
        with pytest.raises(DamagedCheckpointError, match="the release of .* is incomplete .*complete there: 10, 20"):
            resolve_load(CheckpointConfig(save=release, **settings))


def test_ckpt_step_of_0_is_honoured(tmp_path: Path) -> None:
    root = _steps(tmp_path / "run", 0, 10, tracker=10)
    decision = resolve_load(CheckpointConfig(load=root, ckpt_step=0))
    assert (decision.folder, decision.iteration) == (iteration_folder(root, 0), 0)


def test_steps_to_start_from_without_a_tracker_are_not_nothing(tmp_path: Path) -> None:
    root = _steps(tmp_path / "run", 10, 20)
    for key in ("load", "pretrained_checkpoint"):
        config = CheckpointConfig(**{key: root}, exit_on_missing_checkpoint=False)
        with pytest.raises(CheckpointError, match=r"is missing, but iterations 10, 20 are complete\. Choose one"):
            resolve_load(config)


# Older steps in place of the tracker's


def test_older_complete_steps_may_take_the_place_newest_first(tmp_path: Path) -> None:
    root = _steps(tmp_path / "run", 10, 20, 40, 50, tracker=40, incomplete=(30,))
    decision = resolve_load(CheckpointConfig(save=root, fallback="newest_complete"))
    assert (decision.iteration, decision.older) == (40, (20, 10))
    assert [(d.folder, d.iteration, d.mode, d.older) for d in list(decision.alternatives())[1:]] == [
        (iteration_folder(root, iteration), iteration, RESUME, ()) for iteration in (20, 10)
    ]
    assert resolve_load(CheckpointConfig(save=root)).older == ()


@pytest.mark.parametrize("exists", [True, False])
def test_a_damaged_step_is_let_through_if_another_may_take_its_place(tmp_path: Path, exists: bool) -> None:
    root = _steps(tmp_path / "run", 10, tracker=30, incomplete=(30,) if exists else ())
    decision = resolve_load(CheckpointConfig(save=root, fallback="newest_complete"))
    assert (decision.iteration, decision.older) == (30, (10,))
    alone = _steps(tmp_path / "alone", 40, tracker=30, incomplete=(20,))
    with pytest.raises(DamagedCheckpointError, match="iteration 30 of .* is missing; complete there: 40"):
        resolve_load(CheckpointConfig(save=alone, fallback="newest_complete"))
