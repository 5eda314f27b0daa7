"""A damaged newest step: which one is taken in its place, how loudly, and what becomes of the damaged one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import load as load_module
from megalite.checkpoint.paths import TRACKER, complete_iterations, iteration_folder, read_tracker
from megalite.config.loader import config_from_dict, config_to_dict
from megalite.config.schema import Config
from megalite.dist_checkpointing.core import is_complete
from megalite.training.exit import save_checkpoint
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.errors import CheckpointError, DamagedCheckpointError
from tests.unit.samples import only_model, small_config

FALLBACK = {"checkpoint": {"fallback": "newest_complete"}}
DROPOUT = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}


def _config(save: Path, *changes: dict[str, dict[str, Any]]) -> Config:
    saving = {"checkpoint": {"save": str(save), "save_interval": 1}}
    return small_config(DROPOUT, {"training": {"train_iters": 4, "exit_interval": 3}}, saving, *changes)


def _tensors(ctx: Any) -> list[torch.Tensor]:
    weights = [p.detach().clone() for p in only_model(ctx.state).parameters()]
    return weights + [tensor.clone() for _, _, tensor in ctx.state.optimizer.state_tensors()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder with steps 1, 2 and 3."""
    save = tmp_path_factory.mktemp("made") / "run"
    with training_run(_config(save)) as ctx:
        train(ctx)
    return save


@pytest.fixture
def save(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def _contents(folder: Path) -> dict[str, bytes]:
    """What the folder holds, but for the metrics, which say of every start that there was one."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "metrics.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": shutil.rmtree,
    "no marker": lambda step: (step / "metadata.json").unlink(),
    "broken marker": lambda step: _cut(step / "metadata.json"),
    "flipped common part": lambda step: _flip(step / "common.pt"),
    "flipped data": lambda step: _flip(step / "__0_0.distcp"),
    "cut data": lambda step: _cut(step / "__0_0.distcp"),
    "no data": lambda step: (step / "__0_0.distcp").unlink(),
    "flipped index": lambda step: _flip(step / ".metadata"),
    "no index": lambda step: (step / ".metadata").unlink(),
    "no common part": lambda step: (step / "common.pt").unlink(),
    "common part of another step": lambda step: shutil.copy(step.parent / "iter_0000001" / "common.pt", step),
}


def _warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelname == "WARNING"]


@pytest.fixture
def quiet_setup(monkeypatch: pytest.MonkeyPatch, megalite_log: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of runs, which otherwise go to a console of their own."""
    monkeypatch.setattr("megalite.training.setup.setup_logging", lambda *args: None)
    return megalite_log


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_next_older_step_is_taken_and_the_refused_one_is_named(
    save: Path, quiet_setup: pytest.LogCaptureFixture, kind: str
) -> None:
    damaged = iteration_folder(save, 3)
    DAMAGE[kind](damaged)
    before = _contents(save)
    with training_run(_config(save, FALLBACK)) as ctx:
        assert (ctx.progress.iteration, ctx.progress.consumed_train_samples) == (2, 16)
        assert (ctx.state.optimizer.num_steps, ctx.state.scheduler.num_steps) == (2, 16)
    (warning,) = _warnings(quiet_setup)
    assert warning.startswith(f"iteration 3 in {damaged} is damaged and not used: ")
    assert "missing" in warning or "incomplete" in warning or str(damaged) in warning
    assert _contents(save) == before


@pytest.mark.parametrize("kind", DAMAGE)
def test_nothing_falls_back_unless_asked_to(save: Path, kind: str) -> None:
    DAMAGE[kind](iteration_folder(save, 3))
    before = _contents(save)
    with pytest.raises(DamagedCheckpointError, match="iter_0000003|iteration 3 of"), training_run(_config(save)):
        pass
    assert _contents(save) == before


@pytest.fixture
def damaged_items(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Steps of which a file turns out to be damaged when half of the state has been read and overwritten."""
    damaged: set[int] = set()
    real = load_module.load

    def load(request: dict, folder: Path, **options: Any) -> dict:
        result = real(request, folder, **options)
        if int(folder.name.removeprefix("iter_")) in damaged:
            for leaf in [*request["model"].values(), *sum(request["optimizer_state"].values(), [])]:
                leaf.data.fill_(float("nan"))
            raise DamagedCheckpointError(f"{folder / '__0_0.distcp'} is damaged; use another checkpoint")
        return result

    monkeypatch.setattr(load_module, "load", load)
    return damaged


def test_what_a_failed_attempt_has_left_is_overwritten(
    save: Path, damaged_items: set[int], quiet_setup: pytest.LogCaptureFixture
) -> None:
    plain = Path(shutil.copytree(save, save.parent / "plain"))
    (plain / TRACKER).write_text("1")
    with training_run(_config(plain)) as ctx:
        expected, expected_random = _tensors(ctx), torch.get_rng_state()
        expected_stream = ctx.state.tracker.get_states()
        batch = next(ctx.train_batches)["tokens"]
    damaged_items |= {3, 2}
    quiet_setup.clear()
    with training_run(_config(save, FALLBACK)) as ctx:
        assert all(torch.equal(a, b) for a, b in zip(_tensors(ctx), expected, strict=True))
        assert torch.equal(torch.get_rng_state(), expected_random)
        for name, state in ctx.state.tracker.get_states().items():
            assert torch.equal(state, expected_stream[name])
        assert torch.equal(next(ctx.train_batches)["tokens"], batch)
        assert (ctx.progress.iteration, ctx.state.scheduler.num_steps) == (1, 8)
    assert [warning.split(" is damaged")[0] for warning in _warnings(quiet_setup)] == [
        f"iteration {iteration} in {iteration_folder(save, iteration)}" for iteration in (3, 2)
    ]


def test_the_run_goes_on_over_the_damaged_step_as_the_unbroken_one(save: Path, made: Path) -> None:
    _flip(iteration_folder(save, 3) / "common.pt")
    with training_run(_config(save, FALLBACK)) as ctx:
        train(ctx)
        # Reached again, written anew and published.
        assert (ctx.progress.iteration, read_tracker(save)) == (3, 3)
        again = _tensors(ctx)
    assert complete_iterations(save) == [1, 2, 3]
    with training_run(_config(save)) as ctx, training_run(_config(made)) as unbroken:
        assert ctx.progress.iteration == 3
        assert all(torch.equal(a, b) for a, b in zip(_tensors(ctx), _tensors(unbroken), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(_tensors(ctx), again, strict=True))


def test_the_step_that_was_taken_is_not_endangered_by_a_save_of_its_own_iteration(save: Path) -> None:
    _flip(iteration_folder(save, 3) / "common.pt")
    before = _contents(iteration_folder(save, 2))
    with training_run(_config(save, FALLBACK)) as ctx:
        assert ctx.checkpoints.is_published(2) and not ctx.checkpoints.is_published(3)
        save_checkpoint(ctx)
    assert _contents(iteration_folder(save, 2)) == before
    # The tracker names the damaged step until there is a newer one: what it says was true once.
    assert read_tracker(save) == 3


def test_the_tracker_may_go_back_to_a_step_before_the_damaged_one(tmp_path: Path, made: Path) -> None:
    save = Path(shutil.copytree(made, tmp_path / "run"))
    for iteration in (2, 3):
        _flip(iteration_folder(save, iteration) / "common.pt")
    with training_run(_config(save, FALLBACK, {"training": {"exit_interval": 2}})) as ctx:
        train(ctx)
    assert (read_tracker(save), complete_iterations(save)) == (2, [1, 2, 3])
    # The damaged one is now newer than what is published: not used, whatever the setting says.
    with training_run(_config(save)) as ctx:
        assert ctx.progress.iteration == 2


@pytest.mark.parametrize("kind", ["flipped common part", "broken marker"])
def test_pub07_nothing_usable_is_an_error_and_nothing_is_overwritten(save: Path, kind: str) -> None:
    for iteration in (1, 2, 3):
        DAMAGE[kind](iteration_folder(save, iteration))
    before = _contents(save)
    for changes in ((FALLBACK,), ()):
        with (
            pytest.raises(CheckpointError, match="can be loaded: 3, 2, 1 are damaged|iter_0000003|iteration 3 of"),
            training_run(_config(save, *changes)),
        ):
            pass
        assert _contents(save) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {"hidden_size": 32}}, "hidden_size is 16 in the checkpoint"),
        ({"model": {"add_bias_linear": False}}, "keys of .*iter_0000003 and of the run differ"),
        ({"optimizer": {"lr": 0.5}}, "schedule of learning rate"),
    ],
    ids=["model", "keys", "schedule"],
)
def test_a_step_that_does_not_fit_is_no_damaged_one(
    save: Path, quiet_setup: pytest.LogCaptureFixture, change: dict, text: str
) -> None:
    with (
        pytest.raises(CheckpointError, match=text) as caught,
        training_run(_config(save, FALLBACK, change)),
    ):
        pass
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert not any("not used" in warning for warning in _warnings(quiet_setup))


def test_a_first_start_from_elsewhere_does_not_fall_back(save: Path, tmp_path: Path) -> None:
    _flip(iteration_folder(save, 3) / "common.pt")
    config = _config(tmp_path / "new", FALLBACK, {"checkpoint": {"load": str(save)}})
    with pytest.raises(DamagedCheckpointError, match="iter_0000003/common.pt is damaged"), training_run(config):
        pass
    assert is_complete(iteration_folder(save, 3))


def test_model_settings_come_from_the_step_that_is_taken_and_a_refusal_is_said_once(
    save: Path, quiet_setup: pytest.LogCaptureFixture
) -> None:
    _flip(iteration_folder(save, 3) / "common.pt")
    values = config_to_dict(_config(save, FALLBACK, {"checkpoint": {"load": str(save)}})) | {"model": {}}
    values["checkpoint"]["use_checkpoint_args"] = True
    with training_run(config_from_dict(values)) as ctx:
        assert (ctx.progress.iteration, ctx.config.model.hidden_dropout) == (2, 0.1)
    assert len(_warnings(quiet_setup)) == 1
