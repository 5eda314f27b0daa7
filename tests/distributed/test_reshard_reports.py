"""Public reports about loading at another topology; each test bears the report's id."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.paths import iteration_folder
from megalite.checkpoint.state import model_state
from megalite.config.schema import Config
from megalite.dist_checkpointing.mapping import ShardedTensor
from megalite.dist_checkpointing.serialization import load, read_index
from megalite.model.gpt import WORD_EMBEDDING
from megalite.parallel.layers import traits
from megalite.training.exit import save_checkpoint
from megalite.training.setup import training_run
from megalite.utils.dist import world_group
from megalite.utils.errors import CheckpointError, ConfigError, MegaliteError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LLAMA, VPP, RunResult, Topology, make_config, run, run_steps, unequal

Changes = dict[str, dict[str, Any]]

BATCH: Changes = {"training": {"micro_batch_size": 1, "global_batch_size": 12}}


def _train(topology: Topology, folder: Path, *changes: Changes, steps: int = 2) -> RunResult:
    """Train and save in ``folder``; return what the run gave."""
    saving = {"checkpoint": {"save": str(folder), "save_interval": steps}}
    return run(topology, make_config(BATCH, *changes, saving, topology=topology), steps)


def _resume(topology: Topology, folder: Path, *changes: Changes, steps: int = 0) -> RunResult:
    """Start from ``folder`` at another topology; return what that run gave."""
    loading = {"checkpoint": {"load": str(folder)}}
    return run(topology, make_config(BATCH, *changes, loading, topology=topology), steps)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param((1, 2, 2), (2, 1, 2), id="rsh_01"),
        pytest.param((1, 1, 4), (1, 1, 3), id="rsh_18"),
        pytest.param((1, 1, 3), (1, 1, 6), id="rsh_18_grown"),
        pytest.param((1, 1, 2), (1, 1, 4), id="rsh_19"),
    ],
)
def test_optimizer_follows_every_change(tmp_path: Path, source: Topology, target: Topology) -> None:
    """RSH-01, RSH-03, RSH-18, RSH-19: every moment is bit-equal, none is zero, and the next losses are the same."""
    folder = tmp_path / "run"
    saved = _train(source, folder)
    loaded = _resume(target, folder)
    assert unequal(loaded.state, saved.state) == []
    assert all(value.any() for name, value in loaded.state.items() if name.startswith("exp_avg"))
    unbroken = run(source, make_config(BATCH, topology=source), 4)
    assert _resume(target, folder, steps=2).losses == pytest.approx(unbroken.losses[2:], abs=1e-5)


def _save_at_once(config: Config, skipped: bool) -> None:
    with training_run(config) as ctx:
        if skipped:
            # An overflow in every iteration: nothing is updated, the scale falls.
            for chunk in ctx.state.chunks:
                for _, parameter in chunk.parameters():
                    parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
            run_steps(ctx, 2)
        save_checkpoint(ctx)


@pytest.mark.parametrize("skipped", [False, True])
def test_rsh_04_saved_before_any_update(tmp_path: Path, skipped: bool) -> None:
    """RSH-04: at iteration 0, or when every update was skipped, there are moments, all zero, and the run goes on."""
    precision = {"precision": {"fp16": True}} if skipped else {}
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    run_on_ranks(2, _save_at_once, make_config(precision, save, topology=(2, 1, 1)), skipped)
    loaded = run((1, 1, 2), make_config(precision, {"checkpoint": {"load": str(tmp_path / "run")}}), 0)
    assert not any(value.any() for name, value in loaded.state.items() if name.startswith("exp_avg"))
    if not skipped:
        from_start = run((2, 1, 1), make_config(topology=(2, 1, 1)), 3)
        resumed = run((1, 1, 2), make_config({"checkpoint": {"load": str(tmp_path / "run")}}), 3)
        assert resumed.losses == pytest.approx(from_start.losses, abs=1e-5)


def test_rsh_06_07_vocabulary_padding_follows_topology_and_setting(tmp_path: Path) -> None:
    """RSH-06, RSH-07: the padded size differs between all of these; the real rows never do."""
    sizes = {"model": {"vocab_size": 300, "make_vocab_size_divisible_by": 64}}
    saved = _train((1, 1, 1), tmp_path / "a", sizes)
    step = iteration_folder(tmp_path / "a", 2)
    assert read_index(step).tensors[WORD_EMBEDDING].shape[0] == 320
    source = tmp_path / "a"
    for number, (topology, divisor) in enumerate([((2, 1, 1), 64), ((4, 1, 1), 64), ((1, 1, 1), 64), ((2, 1, 1), 7)]):
        changed = {"model": {"vocab_size": 300, "make_vocab_size_divisible_by": divisor}}
        target = {"checkpoint": {"load": str(source), "save": str(tmp_path / str(number))}}
        config = make_config(BATCH, changed, target, topology=topology)
        run_on_ranks(prod(topology), _resave, config)
        assert unequal(_resume(topology, source, changed).state, saved.state) == []
        source = tmp_path / str(number)
    after = [_resume((1, 1, 1), folder, sizes, steps=2).losses for folder in (tmp_path / "a", source)]
    assert after[0] == after[1]


def _resave(config: Config) -> None:
    with training_run(config) as ctx:
        save_checkpoint(ctx)


def _tied_copies(config: Config, steps: int) -> torch.Tensor | None:
    with training_run(config) as ctx:
        run_steps(ctx, steps)
        ctx.state.finish_param_sync()
        for chunk in ctx.state.chunks:
            for _, parameter in chunk.parameters():
                if traits(parameter).shared_embedding:
                    return parameter.detach().clone()
        return None


def test_rsh_09_10_tied_head_has_one_entry_and_stays_equal(tmp_path: Path) -> None:
    """RSH-09, RSH-10: the borrowed head adds no key, its optimizer state is found again, and the copies stay equal."""
    _train((1, 1, 1), tmp_path / "one")
    config = make_config(BATCH, {"checkpoint": {"load": str(tmp_path / "one")}}, topology=(1, 2, 1))
    first, last = run_on_ranks(2, _tied_copies, config, 8)
    assert first is not None and torch.equal(first, last)
    _train((1, 2, 1), tmp_path / "two")
    one, two = (read_index(iteration_folder(tmp_path / name, 2)) for name in ("one", "two"))
    assert {key: entry.shape for key, entry in one.tensors.items()} == {k: e.shape for k, e in two.tensors.items()}
    assert not any("output_layer" in key for key in two.tensors)


@pytest.mark.parametrize(
    ("saved_at", "target", "changes"),
    [
        pytest.param((1, 2, 1), (1, 2, 1), VPP, id="rsh_12"),
        pytest.param((1, 4, 1), (1, 1, 1), {}, id="rsh_13"),
        pytest.param((1, 2, 1), (1, 4, 1), {}, id="rsh_14"),
    ],
)
def test_no_layer_keeps_its_start_values(
    tmp_path: Path, saved_at: Topology, target: Topology, changes: Changes
) -> None:
    """RSH-12, RSH-13, RSH-14: other chunks, fewer and more stages, an uneven split that the new run does not have."""
    uneven = {"parallel": {"decoder_first_pipeline_num_layers": 1}} if target == (1, 4, 1) else {}
    saved = _train(saved_at, tmp_path / "run", uneven)
    other_seed = {"training": {"seed": 99}}
    fresh = run(target, make_config(BATCH, other_seed, changes, topology=target), 0)
    assert any(name.startswith("decoder.layers.3.") for name in unequal(fresh.state, saved.state))
    assert unequal(_resume(target, tmp_path / "run", other_seed, changes).state, saved.state) == []


def _request_of_half(folder: Path, config: Config) -> tuple[type, str] | None:
    group = world_group()
    with training_run(config) as ctx:
        request = {
            name: leaf
            for name, leaf in model_state(ctx.state).items()
            if not name.startswith("decoder.layers.3.") or not isinstance(leaf, ShardedTensor)
        }
        try:
            load({"model": request}, folder, group=group, ignore_keys=lambda key: not key.startswith("decoder.layers"))
        except MegaliteError as error:
            return type(error), str(error)
        return None


def test_rsh_13_layer_that_no_rank_asks_for_is_an_error(tmp_path: Path) -> None:
    """RSH-13: the key of a stacked layer is there, but one of its layers is in nobody's request."""
    _train((1, 2, 1), tmp_path / "run")
    config = make_config(topology=(1, 2, 1))
    (outcome,) = set(run_on_ranks(2, _request_of_half, iteration_folder(tmp_path / "run", 2), config))
    assert outcome is not None and outcome[0] is CheckpointError
    assert "are asked for, block" in outcome[1] and "at (3, 0" in outcome[1]


def test_rsh_16_fused_gate_and_its_moments_survive_a_round_trip(tmp_path: Path) -> None:
    """RSH-16: gate and up rows are apart in the file, whatever TP, and so are their masters and moments."""
    saved = _train((1, 1, 1), tmp_path / "a", LLAMA)
    back = {"checkpoint": {"load": str(tmp_path / "a"), "save": str(tmp_path / "b")}}
    run_on_ranks(2, _resave, make_config(BATCH, LLAMA, back, topology=(2, 1, 1)))
    loaded = _resume((1, 1, 1), tmp_path / "b", LLAMA)
    assert unequal(loaded.state, saved.state) == []
    assert sum("linear_fc1.weight" in name and name.startswith("exp_avg") for name in loaded.state) == 8


def test_rsh_21_experts_are_refused_at_the_start() -> None:
    """RSH-21: this version has no experts, and says so instead of loading some of them."""
    with pytest.raises(ConfigError, match="expert_model_parallel_size"):
        make_config({"parallel": {"expert_model_parallel_size": 2}})
