"""What a load takes and leaves: releases, schedules without an optimizer, masters from weights, random states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import manager as manager_module
from megalite.checkpoint.load import LoadReport, is_left_out, load_checkpoint, plan_load, progress_at_start, read_common
from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.paths import TRACKER, iteration_folder, read_tracker
from megalite.checkpoint.resolve import LoadDecision, LoadMode
from megalite.checkpoint.save import state_to_save
from megalite.checkpoint.state import (
    TrainProgress,
    TrainState,
    common_state,
    main_params_request,
    model_state,
    state_tensor,
)
from megalite.config.loader import config_from_dict
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megalite.dist_checkpointing.serialization import load_common_state_dict, load_plain_tensors, read_index
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, DamagedCheckpointError
from tests.helpers.fixtures import checkpoint_of, megatron_fixture
from tests.unit.samples import fill, place, small_config, train_state

RESUME, START, RELEASE, WEIGHTS = LoadMode.RESUME, LoadMode.START_FROM, LoadMode.RELEASE, LoadMode.WEIGHTS


def _saved(folder: Path, *changes: dict[str, dict[str, Any]], seed: int = 5) -> TrainState:
    """Save a run with values of its own as iteration ``seed``, and return it."""
    state = train_state(small_config({"checkpoint": {"save": str(folder)}}, *changes))
    fill(state, seed)
    state.optimizer.num_steps = 4
    state.scheduler.step(32)
    CheckpointManager(state.config.checkpoint, SINGLE).save(state, {})
    return state


def _decision(folder: Path, mode: LoadMode, iteration: int = 5) -> LoadDecision:
    return LoadDecision(iteration_folder(folder, iteration), iteration, mode)


def _load(state: TrainState, decision: LoadDecision) -> LoadReport:
    return load_checkpoint(state, decision, read_common(decision, SINGLE))


def _masters(state: TrainState) -> list[torch.Tensor]:
    return [piece.master.detach().clone() for piece in state.optimizer.pieces]


# Releases


@pytest.fixture
def release(tmp_path: Path) -> Path:
    _saved(tmp_path / "run")
    iteration_folder(tmp_path / "run", 5).rename(tmp_path / "run" / "release")
    (tmp_path / "run" / TRACKER).write_text("release")
    return tmp_path / "run"


def test_a_release_gives_weights_and_the_position_in_the_data(release: Path) -> None:
    run = train_state(small_config())
    streams, run_id = run.tracker.get_states(), run.run_id
    report = _load(run, LoadDecision(release / "release", 0, RELEASE))
    assert run.progress == TrainProgress(consumed_train_samples=40)
    assert (run.optimizer.num_steps, run.scheduler.num_steps, run.run_id) == (0, 0, run_id)
    stored = load_plain_tensors(release / "release", ["decoder.final_layernorm.weight"])
    (piece,) = (piece for piece in run.optimizer.pieces if piece.name == "decoder.final_layernorm.weight")
    assert torch.equal(piece.values, stored["decoder.final_layernorm.weight"])
    assert all(not t.any() for _, word, t in run.optimizer.state_tensors() if word != "param")
    assert all(torch.equal(streams[name], state) for name, state in run.tracker.get_states().items())
    assert report.restored == ("weights", "progress")
    assert str(report).startswith("loaded the release from ") and "(a release, from which a run begins)" in str(report)


def test_the_model_of_a_release_is_compared(release: Path) -> None:
    run = train_state(small_config({"model": {"norm_epsilon": 0.1}}))
    with pytest.raises(CheckpointError, match="norm_epsilon is 1e-05 in the checkpoint"):
        _load(run, LoadDecision(release / "release", 0, RELEASE))


@pytest.mark.parametrize("key", ["save", "load"])
def test_a_run_begins_with_a_release_and_replaces_it_in_the_tracker(release: Path, tmp_path: Path, key: str) -> None:
    settings = {"checkpoint": {"save": str(tmp_path / "new")} | {key: str(release)}}
    with training_run(small_config(settings, {"training": {"train_iters": 2}})) as ctx:
        assert (ctx.progress.iteration, ctx.progress.consumed_train_samples) == (0, 40)
        train(ctx)
        save = ctx.config.checkpoint.save
    assert read_tracker(save) == 2
    assert (release / "release" / "metadata.json").is_file()


def test_progress_of_each_mode() -> None:
    own = {"iteration": 3, "consumed_train_samples": 24, "skipped_iterations": 1, "skipped_train_samples": 8}
    common = {"megalite": {"progress": own}}
    whole = TrainProgress(3, 24, {}, 8, 1)
    expected = {RESUME: whole, START: whole, RELEASE: replace(whole, iteration=0, skipped_iterations=0)}
    for mode in LoadMode:
        assert progress_at_start(LoadDecision(Path("x"), 3, mode), common) == expected.get(mode, TrainProgress())
    assert progress_at_start(None, {}) == TrainProgress()


# Optimizer and schedule apart


def test_p7_a_step_without_optimizer_has_its_schedule_and_gives_it_back(tmp_path: Path) -> None:
    saved = _saved(tmp_path, {"checkpoint": {"no_save_optim": True}})
    common = load_common_state_dict(iteration_folder(tmp_path, 5))
    assert "optimizer" not in common and common["opt_param_scheduler"]["num_steps"] == 32
    assert not any(key.startswith("optimizer") for key in read_index(iteration_folder(tmp_path, 5)).keys)
    run = train_state(small_config({"checkpoint": {"load": str(tmp_path), "no_load_optim": True}}))
    report = _load(run, _decision(tmp_path, START))
    assert report.restored == ("weights", "scheduler", "random states", "progress")
    assert (run.scheduler.num_steps, run.progress.iteration, run.optimizer.num_steps) == (32, 5, 0)
    assert all(torch.equal(a, b) for a, b in zip(_masters(run), _masters(saved), strict=True))


def test_p7_a_step_with_optimizer_keeps_both_back_if_asked_to(tmp_path: Path) -> None:
    _saved(tmp_path)
    run = train_state(small_config({"checkpoint": {"load": str(tmp_path), "no_load_optim": True}}))
    report = _load(run, _decision(tmp_path, START))
    assert report.restored == ("weights", "random states", "progress")
    assert (run.scheduler.num_steps, run.optimizer.num_steps) == (0, 0)


def test_p7_a_resume_without_optimizer_state_is_one_clear_message_before_anything_is_loaded(tmp_path: Path) -> None:
    config = small_config(
        {"checkpoint": {"save": str(tmp_path), "no_save_optim": True}, "training": {"train_iters": 2}}
    )
    with training_run(config) as ctx:
        train(ctx)
    text = "saved with no_save_optim and holds no optimizer state.*no_load_optim or .*finetune and another .*save"
    with pytest.raises(CheckpointError, match=text), training_run(config):
        pass


def test_p7_finetune_is_four_things_at_once(tmp_path: Path) -> None:
    _saved(tmp_path, {"precision": {"bf16": True}})
    run = train_state(small_config({"precision": {"bf16": True}}))
    streams = run.tracker.get_states()
    _load(run, _decision(tmp_path, WEIGHTS))
    # No optimizer, and masters that are the weights.
    assert run.optimizer.num_steps == 0
    for piece, word, tensor in run.optimizer.state_tensors():
        assert torch.equal(tensor, piece.values.float()) if word == "param" else not tensor.any()
    # No schedule, no random states, no progress.
    assert run.scheduler.num_steps == 0
    assert all(torch.equal(streams[name], state) for name, state in run.tracker.get_states().items())
    assert run.progress == TrainProgress()


# Masters from the weights of the file


@pytest.mark.parametrize("is_distributed", [True, False])
@pytest.mark.parametrize("mode", [START, WEIGHTS])
def test_masters_have_the_digits_of_the_stored_weights(tmp_path: Path, is_distributed: bool, mode: LoadMode) -> None:
    saved = _saved(tmp_path)
    settings = {"load": str(tmp_path), "no_load_optim": True, "finetune": mode is WEIGHTS}
    others = ({"precision": {"bf16": True}}, {"parallel": {"use_distributed_optimizer": is_distributed}})
    rounded = train_state(small_config({"checkpoint": settings}, *others))
    _load(rounded, _decision(tmp_path, mode))
    exact = train_state(small_config({"checkpoint": {**settings, "load_main_params_from_ckpt": True}}, *others))
    report = _load(exact, _decision(tmp_path, mode))
    pairs = list(zip(_masters(exact), _masters(saved), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(_masters(rounded), _masters(saved), strict=True))
    # The weights themselves are rounded the same in both.
    for a, b, piece in zip(_masters(rounded), _masters(exact), exact.optimizer.pieces, strict=True):
        assert torch.equal(a, b.bfloat16().float()) and torch.equal(piece.values.float(), a)
    assert "main parameters" in report.restored


def test_masters_that_are_the_weights_are_not_read_twice(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    settings = {"load": str(tmp_path), "no_load_optim": True, "load_main_params_from_ckpt": True}
    run = train_state(small_config({"checkpoint": settings}))
    assert main_params_request(run, model_state(run)) == {}
    _load(run, _decision(tmp_path, START))
    assert all(torch.equal(a, b) for a, b in zip(_masters(run), _masters(saved), strict=True))


def test_blocks_that_are_only_read_are_no_main_replicas() -> None:
    run = train_state(small_config({"precision": {"bf16": True}}))
    blocks = sum(main_params_request(run, model_state(run)).values(), [])
    assert blocks and not any(is_main_replica(block.replica_id) for block in blocks)


def test_a_resume_takes_its_masters_from_the_optimizer(tmp_path: Path) -> None:
    settings = {"load": Path("x"), "no_load_optim": True, "load_main_params_from_ckpt": True}
    run = train_state(small_config())
    plan = plan_load(RESUME, CheckpointConfig(**settings), _common(), run)
    assert plan.optimizer and not plan.main_params
    assert plan_load(START, CheckpointConfig(**settings), _common(), run).main_params


def _common() -> dict[str, Any]:
    return common_state(train_state(small_config()))


# Keys that are knowingly not asked for


@pytest.mark.parametrize(
    ("key", "needs"),
    [
        ("rerun_state_machine_state/shard_0_4", ()),
        ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", ()),
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", ("optimizer",)),
        ("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", ("optimizer",)),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(x, y).bucket_idx_0.param", ("optimizer",)),
        ("chained_1.optimizer.state.param.x", ("optimizer",)),
        ("rng_state/shard_0.0_1.1", ("random_states",)),
        ("decoder.final_layernorm.weight", None),
        ("my_optimizer.weight", None),
        ("rng_states", None),
    ],
)
def test_which_keys_may_be_left_out(key: str, needs: tuple[str, ...] | None) -> None:
    plan = plan_load(RESUME, CheckpointConfig(), _common(), train_state(small_config()))
    assert plan.optimizer and plan.random_states
    assert is_left_out(key, plan) == (needs == ())
    without = replace(plan, optimizer=False, random_states=False)
    assert is_left_out(key, without) == (needs is not None)


@pytest.fixture
def save_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Callable[[dict], None]], None]:
    """Save a run whose state dict a function has changed before."""

    def save(folder: Path, change: Callable[[dict], None]) -> None:
        def changed(state: TrainState) -> dict:
            contents = state_to_save(state)
            change(contents)
            return contents

        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "state_to_save", changed)
            _saved(folder)

    return save


def test_extra_states_may_be_there_or_not(tmp_path: Path, save_with: Callable[..., None]) -> None:
    def without(contents: dict) -> None:
        extra = [name for name, leaf in contents["model"].items() if isinstance(leaf, ShardedObject)]
        assert extra
        for name in extra:
            del contents["model"][name]

    def more(contents: dict) -> None:
        key = "decoder.layers.self_attention.core_attention._extra_state"
        contents["model"][key] = ShardedObject(key, None, (1,), (0,))
        contents["rerun"] = ShardedObject("rerun_state_machine_state", {"mode": 1}, (1,), (0,))

    for name, change in (("without", without), ("more", more)):
        save_with(tmp_path / name, change)
        run = train_state(small_config())
        _load(run, _decision(tmp_path / name, RESUME))
        assert run.progress.iteration == 5


def test_anything_else_that_is_missing_or_not_asked_for_is_an_error(
    tmp_path: Path, save_with: Callable[..., None]
) -> None:
    def rename(contents: dict) -> None:
        leaf = contents["model"]["decoder.final_layernorm.weight"]
        contents["model"]["decoder.final_layernorm.weight"] = replace(leaf, key="decoder.last_layernorm.weight")

    save_with(tmp_path, rename)
    with pytest.raises(CheckpointError, match="not stored: decoder.final_.*not asked for: decoder.last_layernorm"):
        _load(train_state(small_config()), _decision(tmp_path, RESUME))


def test_common_parts_that_are_no_trainers_or_mixed_up(tmp_path: Path) -> None:
    _saved(tmp_path)
    path = iteration_folder(tmp_path, 5) / "common.pt"
    common = load_common_state_dict(path.parent)
    torch.save(common | {"iteration": 6}, path)
    with pytest.raises(DamagedCheckpointError, match="is that of iteration 6, its folder that of iteration 5"):
        read_common(_decision(tmp_path, RESUME), SINGLE)
    # Weights may be taken from a folder that somebody has renamed.
    read_common(_decision(tmp_path, WEIGHTS), SINGLE)
    torch.save(common | {"args": {"num_layers": 2}}, path)
    with pytest.raises(DamagedCheckpointError, match="has 'args' of type dict, expected a Namespace"):
        read_common(_decision(tmp_path, RESUME), SINGLE)


# Random states


def _change_states(change: Callable[[dict], None]) -> Callable[[dict], None]:
    def changed(contents: dict) -> None:
        (states,) = contents["rng_state"].data
        change(states)

    return changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda states: states["rng_tracker_states"].clear(), r"without rng_tracker_states\['data-parallel-rng'\], "),
        (
            lambda states: states["rng_tracker_states"].pop("model-parallel-rng"),
            r"without .*\['model-parallel-rng'\], so",
        ),
        (lambda states: states.pop("np_rng_state"), "without np_rng_state, so"),
        (lambda states: states.pop("rng_tracker_states"), r"without rng_tracker_states, rng_tracker_states\["),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("mode", [RESUME, START])
def test_p8_random_states_without_streams_are_refused_with_the_way_out(
    tmp_path: Path, save_with: Callable[..., None], change: Callable[[dict], None], text: str, mode: LoadMode
) -> None:
    save_with(tmp_path, _change_states(change))
    run = train_state(small_config())
    streams = run.tracker.get_states()
    with pytest.raises(CheckpointError, match=f"{text}.*checkpoint.no_load_rng.*checkpoint.finetune") as caught:
        _load(run, _decision(tmp_path, mode))
    assert ("another checkpoint.save" in str(caught.value)) == (mode is RESUME)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert all(torch.equal(streams[name], state) for name, state in run.tracker.get_states().items())
    # The way out.
    run = train_state(small_config({"checkpoint": {"load": str(tmp_path), "no_load_rng": True}}))
    _load(run, _decision(tmp_path, START))
    assert run.progress.iteration == 5


def test_p8_generators_in_memory_are_stored_and_restored_as_their_states(tmp_path: Path) -> None:
    config = small_config({"checkpoint": {"save": str(tmp_path)}})
    saved = train_state(config)
    fill(saved, 5)
    generator = torch.Generator().manual_seed(77)
    expected = generator.get_state()
    assert torch.equal(state_tensor(generator), expected) and state_tensor(expected) is expected

    def states() -> dict[str, Any]:
        return {**saved.tracker.states, "model-parallel-rng": generator}

    saved.tracker.get_states = states
    CheckpointManager(config.checkpoint, SINGLE).save(saved, {})
    run = train_state(config)
    _load(run, _decision(tmp_path, RESUME))
    assert torch.equal(run.tracker.get_states()["model-parallel-rng"], expected)
    assert all(isinstance(state, torch.Tensor) for state in run.tracker.states.values())


def test_states_of_another_kind_of_device_are_derived_anew(
    tmp_path: Path, save_with: Callable[..., None], megalite_log: pytest.LogCaptureFixture
) -> None:
    def on_a_gpu(states: dict) -> None:
        short = torch.zeros(16, dtype=torch.uint8)
        states["cuda_rng_state"] = short
        states["rng_tracker_states"] = dict.fromkeys(states["rng_tracker_states"], short)

    save_with(tmp_path, _change_states(on_a_gpu))
    run = train_state(small_config())
    start = run.tracker.get_states()
    report = _load(run, _decision(tmp_path, RESUME))
    assert dict(report.not_restored) == {"random states": "saved on another kind of device"}
    assert "random states" not in report.restored
    assert not torch.equal(run.tracker.get_states()["model-parallel-rng"], start["model-parallel-rng"])
    assert "random states are not restored: saved on another kind of device. New ones" in megalite_log.text


def test_p6_a_changed_grid_has_new_streams_that_follow_from_the_place(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    plan = plan_load(RESUME, saved.config.checkpoint, read_common(_decision(tmp_path, RESUME), SINGLE), saved)
    assert plan.random_states
    saved.parallel = place(pp=(2, 0))
    plan = plan_load(RESUME, saved.config.checkpoint, read_common(_decision(tmp_path, RESUME), SINGLE), saved)
    assert dict(plan.left_out) == {"random states": "saved at TP=1 PP=1, this run has TP=1 PP=2"}


def test_random_states_that_are_no_list_are_damaged(tmp_path: Path, save_with: Callable[..., None]) -> None:
    save_with(tmp_path, lambda contents: contents.update(rng_state=replace(contents["rng_state"], data={"a": 1})))
    with pytest.raises(DamagedCheckpointError, match="rng_state of .* is not a list of the states of each rank"):
        _load(train_state(small_config()), _decision(tmp_path, RESUME))


def test_a_run_starts_from_a_checkpoint_of_megatron_without_its_optimizer() -> None:
    """Its keys of optimizer and random states are left out, whatever their layout."""
    folder = checkpoint_of(megatron_fixture("optim_dp_reshardable_bf16_tp1dp2"))
    settings = {"load": str(folder.parent), "no_load_optim": True, "no_load_rng": True, "use_checkpoint_args": True}
    values = {"model": {}, "checkpoint": settings, "data": {"mock_data": True, "tokenizer_type": "NullTokenizer"}}
    values |= {"training": {"micro_batch_size": 1, "train_iters": 5}, "optimizer": {"lr": 1e-3}}
    with training_run(config_from_dict(values)) as ctx:
        assert (ctx.progress.iteration, ctx.progress.consumed_train_samples) == (3, 24)
        assert ctx.config.model.hidden_size == 32
