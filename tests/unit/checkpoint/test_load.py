"""What is taken from a step: the plan, the comparison with the run, and what a load on one process restores."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.load import (
    LoadReport,
    check_model,
    load_checkpoint,
    plan_load,
    read_common,
    saved_progress,
)
from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.resolve import LoadDecision, LoadMode
from megalite.checkpoint.state import TrainProgress, TrainState, common_state
from megalite.config.schema import CheckpointConfig
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError
from tests.unit.samples import fill, only_model, place, small_config, train_state

RESUME, START, WEIGHTS = LoadMode.RESUME, LoadMode.START_FROM, LoadMode.WEIGHTS
ALL = ("optimizer", "scheduler", "random states", "progress")


@pytest.fixture(scope="module")
def run() -> TrainState:
    return train_state(small_config())


def _common(**args: Any) -> dict[str, Any]:
    values = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1}
    return {"args": argparse.Namespace(**values | args), "optimizer": {}, "opt_param_scheduler": {}}


@pytest.mark.parametrize(
    ("mode", "settings", "args", "left_out"),
    [
        (RESUME, {}, {}, {}),
        # The settings of a first start have no say in a resume.
        (RESUME, {"no_load_optim": True, "no_load_rng": True}, {}, {}),
        (START, {}, {}, {}),
        (START, {"no_load_optim": True}, {}, {"optimizer": "no_load_optim is set", "scheduler": "no_load_optim"}),
        (START, {"no_load_rng": True}, {}, {"random states": "no_load_rng is set"}),
        (WEIGHTS, {}, {}, dict.fromkeys(ALL, "weights only, a new run")),
        (RESUME, {}, {"no_save_rng": True}, {"random states": "saved with no_save_rng"}),
        (
            RESUME,
            {},
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
            {"random states": "saved at TP=2 PP=4, this run has TP=1 PP=1"},
        ),
        (RESUME, {}, {"data_parallel_size": 8}, {}),
        (
            RESUME,
            {},
            {"data_parallel_random_init": True, "data_parallel_size": 8},
            {"random states": "saved per rank at DP=8, this run has DP=1"},
        ),
        (
            RESUME,
            {},
            {"data_parallel_random_init": True},
            {"random states": "saved with data_parallel_random_init True"},
        ),
    ],
    ids=range(11),
)
def test_plans(
    run: TrainState, mode: LoadMode, settings: dict[str, bool], args: dict[str, Any], left_out: dict[str, str]
) -> None:
    config = CheckpointConfig(load=Path("x"), **settings)
    plan = plan_load(mode, config, _common(**args), run)
    taken = dict(zip(ALL, (plan.optimizer, plan.scheduler, plan.random_states, plan.progress), strict=True))
    assert taken == {part: part not in left_out for part in ALL}
    reasons = dict(plan.left_out)
    assert reasons.keys() == left_out.keys()
    assert all(text in reasons[part] for part, text in left_out.items())


def test_a_step_without_optimizer_state_can_only_give_weights(run: TrainState) -> None:
    common = _common()
    del common["optimizer"]
    config = CheckpointConfig(load=Path("x"))
    for mode in (RESUME, START):
        with pytest.raises(CheckpointError, match="saved with no_save_optim.*no_load_optim or checkpoint.finetune"):
            plan_load(mode, config, common, run)
    assert not plan_load(WEIGHTS, config, common, run).optimizer
    assert not plan_load(START, replace(config, no_load_optim=True), common, run).optimizer


SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 64, "kv_channels": 8}
SHAPE |= {"seq_length": 8, "max_position_embeddings": 8}


def test_an_equal_model_fits(run: TrainState) -> None:
    check_model(_common(**SHAPE), run, Path("step"), RESUME)
    check_model(_common(**SHAPE) | {"megalite": {"vocab_size": 20}}, run, Path("step"), RESUME)
    check_model(_common(), run, Path("step"), RESUME)


@pytest.mark.parametrize("name", SHAPE)
def test_each_number_of_the_model_is_compared(run: TrainState, name: str) -> None:
    text = rf"step does not fit the model: {name} is 99 in the checkpoint and {SHAPE[name]} in this run\. Set the"
    for mode in (RESUME, START):
        with pytest.raises(CheckpointError, match=text):
            check_model(_common(**SHAPE | {name: 99}), run, Path("step"), mode)


KIND = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [("position_embedding_type", "rope"), ("normalization", "RMSNorm"), ("swiglu", True)],
)
@pytest.mark.parametrize("mode", list(LoadMode))
def test_the_kind_of_model_is_compared(run: TrainState, mode: LoadMode, name: str, value: Any) -> None:
    check_model(_common(**SHAPE, **KIND), run, Path("step"), mode)
    with pytest.raises(CheckpointError, match=f"{name} is {value} in the checkpoint and {KIND[name]} in this run"):
        check_model(_common(**SHAPE, **KIND | {name: value}), run, Path("step"), mode)


def test_groups_of_heads_are_compared_where_they_were_in_force() -> None:
    grouped = train_state(small_config({"model": {"group_query_attention": True, "num_query_groups": 1}}))
    plain = train_state(small_config())
    check_model(_common(**SHAPE, group_query_attention=True, num_query_groups=1), grouped, Path("step"), RESUME)
    # The number that Megatron writes without groups is a default without effect.
    check_model(_common(**SHAPE, group_query_attention=False, num_query_groups=1), plain, Path("step"), RESUME)
    for args, run in (
        ({"group_query_attention": True, "num_query_groups": 1}, plain),
        ({"group_query_attention": False, "num_query_groups": 1}, grouped),
    ):
        with pytest.raises(CheckpointError, match=r"num_query_groups is \d in the checkpoint and \d in this run"):
            check_model(_common(**SHAPE, **args), run, Path("step"), RESUME)


@pytest.mark.parametrize(("name", "value"), [("rotary_base", 5e5), ("rotary_percent", 0.5)])
def test_angles_are_compared_but_for_weights_alone(run: TrainState, name: str, value: float) -> None:
    rope = train_state(small_config({"model": {"position_embedding_type": "rope"}}))
    common = _common(**SHAPE, position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0)
    check_model(common, rope, Path("step"), RESUME)
    setattr(common["args"], name, value)
    for mode in (RESUME, START):
        with pytest.raises(CheckpointError, match=f"{name} is .* in the checkpoint"):
            check_model(common, rope, Path("step"), mode)
    check_model(common, rope, Path("step"), WEIGHTS)
    # Without a rotation they say nothing.
    check_model(_common(**SHAPE, **{name: value}), run, Path("step"), RESUME)


@pytest.mark.parametrize("mode", list(LoadMode))
def test_kinds_of_models_that_are_not_built_are_refused_by_name(run: TrainState, mode: LoadMode) -> None:
    common = _common(**SHAPE, squared_relu=True, num_experts=8, rotary_interleaved=False)
    with pytest.raises(CheckpointError, match="of a model with num_experts 8, squared_relu True, which this version"):
        check_model(common, run, Path("step"), mode)


def test_the_table_of_a_foreign_vocabulary_must_be_large_enough(run: TrainState) -> None:
    for rows in (20, 64):
        check_model(_common(**SHAPE, padded_vocab_size=rows), run, Path("step"), RESUME)
    with pytest.raises(CheckpointError, match="has 16 rows in the checkpoint, vocab_size is 20 in this run"):
        check_model(_common(**SHAPE, padded_vocab_size=16), run, Path("step"), RESUME)


def test_all_differences_are_listed_with_the_vocabulary(run: TrainState) -> None:
    common = _common(**SHAPE | {"num_layers": 3, "hidden_size": 32}) | {"megalite": {"vocab_size": 25}}
    with pytest.raises(
        CheckpointError, match="num_layers .*; hidden_size .*; vocab_size is 25 in the checkpoint and 20"
    ):
        check_model(common, run, Path("step"), RESUME)


def test_weights_may_be_trained_on_shorter_samples(run: TrainState) -> None:
    check_model(_common(**SHAPE | {"seq_length": 4}), run, Path("step"), WEIGHTS)
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        check_model(_common(**SHAPE | {"max_position_embeddings": 4}), run, Path("step"), WEIGHTS)


def test_progress_of_a_foreign_trainer() -> None:
    args = {"consumed_train_samples": 80, "consumed_valid_samples": 16, "skipped_train_samples": 2}
    common = _common(**args, global_batch_size=4) | {"iteration": 10, "num_floating_point_operations_so_far": 5}
    assert saved_progress(common) == TrainProgress(10, 80, {"valid": 16}, 2, 0, 5.0)
    assert saved_progress(_common(global_batch_size=4) | {"iteration": 10}) == TrainProgress(
        10, 40, {"valid": 0}, 0, 0, 0.0
    )


def test_own_progress_wins() -> None:
    own = {"iteration": 3, "consumed_train_samples": 24, "skipped_iterations": 1}
    common = _common(consumed_train_samples=99) | {"iteration": 9, "megalite": {"progress": own}}
    assert saved_progress(common) == TrainProgress(3, 24, skipped_iterations=1)


# On one process, from files


def _saved(folder: Path, **checkpoint: Any) -> tuple[TrainState, LoadDecision]:
    """Return a run with values of its own, saved as iteration 5, and the decision to load it."""
    config = small_config({"checkpoint": {"save": str(folder), **checkpoint}})
    state = train_state(config)
    fill(state, 5)
    state.optimizer.num_steps = 4
    state.scheduler.step(32)
    manager = CheckpointManager(config.checkpoint, SINGLE)
    manager.save(state, {})
    return state, LoadDecision(folder / "iter_0000005", 5, RESUME)


def _tensors(state: TrainState) -> list[torch.Tensor]:
    optimizer = [tensor.clone() for _, _, tensor in state.optimizer.state_tensors()]
    return [p.detach().clone() for p in only_model(state).parameters()] + optimizer


def _load(state: TrainState, decision: LoadDecision) -> LoadReport:
    return load_checkpoint(state, decision, read_common(decision, SINGLE))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_resume_restores_everything(tmp_path: Path, bf16: bool) -> None:
    precision = {"precision": {"bf16": bf16}}
    saved = train_state(small_config({"checkpoint": {"save": str(tmp_path)}}, precision))
    fill(saved, 5)
    saved.optimizer.num_steps = 4
    saved.scheduler.step(32)
    # Every stream is somewhere behind its start, or a fresh run would be as good as a restored one.
    random.random(), np.random.random(), torch.rand(1)
    with saved.tracker.fork():
        torch.rand(1)
    CheckpointManager(saved.config.checkpoint, SINGLE).save(saved, {})
    following = (random.random(), np.random.random(), torch.rand(2))
    with saved.tracker.fork():
        forked = torch.rand(2)
    run = train_state(saved.config)
    report = _load(run, LoadDecision(tmp_path / "iter_0000005", 5, RESUME))
    assert all(torch.equal(a, b) for a, b in zip(_tensors(run), _tensors(saved), strict=True))
    assert (run.progress, run.run_id, run.optimizer.num_steps) == (saved.progress, saved.run_id, 4)
    assert (run.scheduler.num_steps, run.scheduler.lr) == (32, saved.scheduler.lr)
    assert (random.random(), np.random.random()) == following[:2] and torch.equal(torch.rand(2), following[2])
    with run.tracker.fork():
        assert torch.equal(torch.rand(2), forked)
    assert report.restored == ("weights", *ALL) and report.not_restored == ()
    assert str(report).startswith("loaded iteration 5 from ") and "not restored" not in str(report)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_weights_alone_start_a_new_run(tmp_path: Path, bf16: bool) -> None:
    saved = train_state(small_config({"checkpoint": {"save": str(tmp_path)}}, {"precision": {"bf16": bf16}}))
    fill(saved, 5)
    CheckpointManager(saved.config.checkpoint, SINGLE).save(saved, {})
    run = train_state(saved.config)
    run_id, states = run.run_id, run.tracker.get_states()
    report = _load(run, LoadDecision(tmp_path / "iter_0000005", 5, WEIGHTS))
    assert all(
        torch.equal(a, b) for a, b in zip(*(only_model(state).parameters() for state in (run, saved)), strict=True)
    )
    for piece, word, tensor in run.optimizer.state_tensors():
        # Masters follow the loaded weights, moments are fresh.
        expected = piece.values.float() if word == "param" else torch.zeros_like(tensor)
        assert torch.equal(tensor, expected)
    assert run.progress == TrainProgress() and run.run_id == run_id and run.scheduler.num_steps == 0
    assert all(torch.equal(states[name], state) for name, state in run.tracker.get_states().items())
    assert "not restored: optimizer (weights only, a new run)" in str(report)


def test_random_states_that_do_not_fit_are_derived_and_that_is_said(
    tmp_path: Path, megalite_log: pytest.LogCaptureFixture
) -> None:
    _, decision = _saved(tmp_path, no_save_rng=True)
    states = []
    for iteration in (5, 6):
        run = train_state(small_config())
        start = run.tracker.get_states()
        load_checkpoint(run, replace(decision, iteration=iteration), read_common(decision, SINGLE))
        states.append(run.tracker.get_states()["model-parallel-rng"])
        assert not torch.equal(states[-1], start["model-parallel-rng"]), "the first masks would come again"
    assert not torch.equal(states[0], states[1])
    warnings = [record.message for record in megalite_log.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and "random states are not restored: saved with no_save_rng" in warnings[0]


def test_a_changed_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    _, decision = _saved(tmp_path)
    run = train_state(small_config({"model": {"num_layers": 4}}))
    before = _tensors(run)
    with pytest.raises(CheckpointError, match="num_layers is 2 in the checkpoint and 4 in this run"):
        _load(run, decision)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(run), strict=True))


def test_the_common_part_must_be_a_trainers(tmp_path: Path) -> None:
    _, decision = _saved(tmp_path)
    torch.save({"iteration": 5}, decision.folder / "common.pt")
    with pytest.raises(CheckpointError, match="common.pt has no 'args'"):
        read_common(decision, SINGLE)


def test_a_grid_of_the_same_size_with_other_axes_does_not_fit() -> None:
    state = train_state(small_config())
    common = common_state(state)
    state.parallel = place(tp=(2, 0))
    plan = plan_load(RESUME, state.config.checkpoint, common, state)
    assert dict(plan.left_out) == {"random states": "saved at TP=1 PP=1, this run has TP=2 PP=1"}
