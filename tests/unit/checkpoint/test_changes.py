from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalite.checkpoint.changes import changed_data, changed_settings
from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.paths import TRACKER, complete_iterations, iteration_folder, read_tracker
from megalite.training.exit import save_checkpoint
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, ConfigError, SaveError
from tests.unit.samples import small_config

RUN = {"training": {"train_iters": 3}}


def test_settings_that_matter_are_named_with_both_values() -> None:
    saved = {
        "optimizer": {"adam_beta1": 0.9, "lr": 1e-3},
        "training": {"seed": 1, "train_iters": 5},
        "logging": {"a": 1},
    }
    now = {"optimizer": {"adam_beta1": 0.5, "lr": 1e-3}, "training": {"seed": 2, "train_iters": 9}, "logging": {"a": 2}}
    assert changed_settings(saved, now) == ["optimizer.adam_beta1 0.9 -> 0.5", "training.seed 1 -> 2"]


def test_how_data_is_read_does_not_matter() -> None:
    saved = {"data": {"num_workers": 0, "split": "1,0,0"}}
    assert changed_settings(saved, {"data": {"num_workers": 2, "split": "1,0,0"}}) == []
    assert changed_settings(saved, {"data": {"num_workers": 0, "split": "1,1,0"}}) == ["data.split 1,0,0 -> 1,1,0"]


def test_other_files_under_the_same_settings_are_named() -> None:
    saved = {"train": {"seed": 1, "sequences": "a" * 64}, "valid": {"seed": 1}}
    now = {"train": {"seed": 2, "sequences": "b" * 64}, "valid": {"seed": 1}, "test": {}}
    assert changed_data(saved, now) == ["train data (seed 1 -> 2, sequences)"]


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"seed": 99}},
        {"model": {"hidden_dropout": 0.25}},
        {"optimizer": {"adam_beta1": 0.5}},
        {"precision": {"bf16": True}},
        {"data": {"split": "3,1,996"}},
    ],
    ids=str,
)
def test_a_resume_with_another_setting_says_so(
    tmp_path: Path, change: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    with training_run(small_config(RUN, save)) as ctx:
        train(ctx)
    with training_run(small_config(RUN, save)):
        pass
    assert "other settings" not in capsys.readouterr().err
    with training_run(small_config(RUN, save, change)):
        pass
    (section, settings), *_ = change.items()
    shown = capsys.readouterr().err
    assert shown.count("goes on with other settings") == 1
    assert f"{section}.{next(iter(settings))} " in shown


def test_another_epsilon_is_refused(tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    with training_run(small_config(RUN, save)) as ctx:
        train(ctx)
    with (
        pytest.raises(CheckpointError, match="norm_epsilon is 1e-05"),
        training_run(small_config(RUN, save, {"model": {"norm_epsilon": 0.1}})),
    ):
        pass


# What else may be in the save folder


def test_a_second_run_in_the_folder_is_noticed_before_anything_is_removed(tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    with training_run(small_config(RUN, save)) as ctx:
        ctx.progress.iteration = 2
        save_checkpoint(ctx)
        # Another attempt goes on and publishes the step that this one reaches later.
        other = iteration_folder(tmp_path / "run", 3)
        os.rename(iteration_folder(tmp_path / "run", 2), other)
        (tmp_path / "run" / TRACKER).write_text("3")
        ctx.progress.iteration = 3
        with pytest.raises(SaveError, match="another run writes into the folder"):
            save_checkpoint(ctx)
    assert complete_iterations(tmp_path / "run") == [3] and read_tracker(tmp_path / "run") == 3


def test_a_lost_tracker_is_not_a_first_start(tmp_path: Path) -> None:
    config = small_config(RUN, {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 1}})
    with training_run(config) as ctx:
        train(ctx)
    (tmp_path / "run" / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="is missing, but iterations 1, 2, 3 are complete"), training_run(config):
        pass
    assert complete_iterations(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_foreign_entry_in_the_place_of_a_step_is_replaced(tmp_path: Path, kind: str) -> None:
    save = tmp_path / "run"
    config = small_config(RUN, {"checkpoint": {"save": str(save)}})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    with training_run(config) as ctx:
        place = iteration_folder(save, 3)
        if kind == "file":
            place.write_text("in the way")
        else:
            place.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
        train(ctx)
    assert complete_iterations(save) == [3] and not place.is_symlink()
    assert (elsewhere / "kept").read_text() == "kept"


@pytest.mark.parametrize("text", ["1" * 5000, "\u0661\u0660", "-1", "1.0"])
def test_what_is_no_plain_number_is_no_tracker(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="is neither an iteration nor 'release'"):
        read_tracker(tmp_path)


def test_a_name_that_is_too_long_is_one_error(tmp_path: Path) -> None:
    config = small_config({"checkpoint": {"save": str(tmp_path / ("n" * 300))}})
    with pytest.raises(ConfigError, match="cannot be used"):
        CheckpointManager(config.checkpoint, SINGLE).resolve_start()
