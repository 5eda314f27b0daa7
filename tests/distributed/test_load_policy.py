"""The load policy on several ranks: one verdict for all, whoever of them met the reason."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import load as load_module
from megalite.checkpoint import manager as manager_module
from megalite.checkpoint.paths import TRACKER, iteration_folder, read_tracker
from megalite.checkpoint.save import state_to_save
from megalite.config.loader import UnresolvedConfig, config_from_dict, config_to_dict
from megalite.config.schema import Config
from megalite.training.setup import training_run
from megalite.utils.errors import CheckpointError, DamagedCheckpointError, MegaliteError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LocalState, Topology, global_state, local_state, make_config, run_steps, unequal

SMALL = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "seq_length": 16,
        "vocab_size": 60,
        "make_vocab_size_divisible_by": 4,
    },
    "data": {"tokenizer_type": "NullTokenizer"},
    "training": {"micro_batch_size": 4},
}


def _config(topology: Topology, *changes: dict[str, dict[str, Any]], **checkpoint: Any) -> Config:
    return make_config(SMALL, *changes, {"checkpoint": checkpoint}, topology=topology)


def _train(config: Config, steps: int) -> LocalState:
    with training_run(config) as ctx:
        run_steps(ctx, steps)
        return local_state(ctx)


def _refusal(config: Config | UnresolvedConfig) -> tuple[type, str]:
    with pytest.raises(MegaliteError) as caught, training_run(config):
        pass
    return caught.type, str(caught.value)


def _agreed_refusal(world_size: int, config: Config | UnresolvedConfig) -> tuple[type, str]:
    (refusal,) = set(run_on_ranks(world_size, _refusal, config))
    return refusal


# An older step in place of a damaged one


def _resume(config: Config) -> tuple[int, int, LocalState]:
    with training_run(config) as ctx:
        return ctx.progress.iteration, ctx.state.optimizer.num_steps, local_state(ctx)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("topology", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["__1_0.distcp", "common.pt"])
def test_damage_that_one_rank_meets_sends_all_to_the_older_step(tmp_path: Path, topology: Topology, name: str) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1}
    whole = global_state(run_on_ranks(2, _train, _config(topology, **save), 2))
    run_on_ranks(2, _train, _config(topology, **save), 1)
    damaged = iteration_folder(tmp_path / "run", 3)
    _flip(damaged / name)
    before = {path: path.read_bytes() for path in damaged.iterdir() if path.is_file()}
    results = run_on_ranks(2, _resume, _config(topology, **save, fallback="newest_complete"))
    assert [result[:2] for result in results] == [(2, 2)] * 2
    assert unequal(global_state([result[2] for result in results]), whole) == []
    assert read_tracker(tmp_path / "run") == 3
    assert {path: path.read_bytes() for path in damaged.iterdir() if path.is_file()} == before


def test_a_step_that_does_not_fit_one_rank_is_an_error_of_all_without_a_fall_back(tmp_path: Path) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1}
    run_on_ranks(2, _train, _config((2, 1, 1), **save), 2)
    config = _config((2, 1, 1), {"model": {"add_bias_linear": False}}, **save, fallback="newest_complete")
    kind, text = _agreed_refusal(2, config)
    assert kind is CheckpointError and "iter_0000002 and of the run differ" in text


# What the ranks see


def _refusal_with_own_folder(roots: list[Path], key: str) -> tuple[type, str]:
    kind, text = _refusal(_config((1, 1, 2), **{key: str(roots[dist.get_rank()])}))
    return kind, text.replace(str(roots[dist.get_rank()]), "ROOT")


@pytest.mark.parametrize("key", ["save", "load"])
def test_p9_ranks_that_read_different_trackers_all_refuse_to_start(tmp_path: Path, key: str) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root, text in zip(roots, ("10", "20"), strict=True):
        root.mkdir()
        (root / TRACKER).write_text(text)
    (refusal,) = set(run_on_ranks(2, _refusal_with_own_folder, roots, key))
    assert refusal[0] is CheckpointError
    assert f"do not see the same ROOT/{TRACKER}: rank 0 read 10; rank 1 read 20" in refusal[1]
    (roots[1] / TRACKER).unlink()
    roots[1].rmdir()
    (refusal,) = set(run_on_ranks(2, _refusal_with_own_folder, roots, key))
    assert "rank 0 read 10; rank 1 do not see the folder" in refusal[1]


def _start_blind(config: Config, blind: int) -> tuple[type, str]:
    if os.environ["RANK"] == str(blind):
        real = Path.is_dir
        Path.is_dir = lambda path: real(path) and path.name != "iter_0000002"
    return _refusal(config)


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_does_not_see_the_step_is_named_and_nobody_falls_back(tmp_path: Path, blind: int) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1}
    run_on_ranks(2, _train, _config((1, 1, 2), **save), 2)
    config = _config((1, 1, 2), **save, fallback="newest_complete")
    (refusal,) = set(run_on_ranks(2, _start_blind, config, blind))
    assert refusal[0] is CheckpointError
    assert f"iter_0000002 is not there for rank {blind}, but for the other ranks it is" in refusal[1]


def _start_with_other_states(config: Config) -> tuple[type, str]:
    real = load_module.restore_random_states

    def restore(tracker: Any, states: dict[str, Any]) -> None:
        if os.environ["RANK"] == "1":
            states = {**states, "np_rng_state": ("MT19937", [1, 2, 3])}
        real(tracker, states)

    load_module.restore_random_states = restore
    return _refusal(config)


def test_random_states_of_one_rank_that_cannot_be_set_are_an_error_on_all(tmp_path: Path) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1}
    run_on_ranks(2, _train, _config((2, 1, 1), **save), 1)
    (refusal,) = set(run_on_ranks(2, _start_with_other_states, _config((2, 1, 1), **save)))
    assert refusal[0] is DamagedCheckpointError and "does not hold what a trainer stores" in refusal[1]


# Masters with the digits of the file


@pytest.mark.parametrize("topology", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_masters_have_the_digits_of_the_stored_weights(tmp_path: Path, topology: Topology) -> None:
    whole = global_state(run_on_ranks(1, _train, _config((1, 1, 1), save=str(tmp_path), save_interval=1), 1))
    settings = {"load": str(tmp_path), "no_load_optim": True, "load_main_params_from_ckpt": True}
    run = _config(topology, {"precision": {"bf16": True}}, **settings)
    loaded = global_state(run_on_ranks(prod(topology), _train, run, 0))
    for name in [name for name in whole if not name.startswith(("param.", "exp_avg"))]:
        assert torch.equal(loaded[f"param.{name}"], whole[name])
        assert torch.equal(loaded[name], whole[name].bfloat16())


# Model settings


def test_all_ranks_take_the_model_of_the_checkpoint(tmp_path: Path) -> None:
    change = {"model": {"swiglu": True, "ffn_hidden_size": 64}}
    whole = global_state(
        run_on_ranks(1, _train, _config((1, 1, 1), change, save=str(tmp_path / "run"), save_interval=1), 1)
    )

    def config(model: dict[str, Any]) -> UnresolvedConfig:
        values = config_to_dict(_config((2, 1, 1), load=str(tmp_path / "run"))) | {"model": model}
        values["checkpoint"]["use_checkpoint_args"] = True
        return config_from_dict(values)

    assert unequal(global_state(run_on_ranks(2, _train, config({}), 0)), whole) == []
    kind, text = _agreed_refusal(2, config({"hidden_size": 64}))
    assert "model.hidden_size is 64, in the checkpoint" in text and "it is 32" in text


# Random states


def _save_without_streams_on_one_rank(config: Config) -> None:
    def emptied(state: Any) -> dict:
        contents = state_to_save(state)
        if state.parallel.tp.rank == 1:
            contents["rng_state"].data[0]["rng_tracker_states"].clear()
        return contents

    manager_module.state_to_save = emptied
    with training_run(config) as ctx:
        run_steps(ctx, 1)


def test_p8_empty_streams_of_one_rank_are_refused_by_all(tmp_path: Path) -> None:
    config = _config((2, 1, 1), save=str(tmp_path / "run"), save_interval=1)
    run_on_ranks(2, _save_without_streams_on_one_rank, config)
    kind, text = _agreed_refusal(2, config)
    assert kind is CheckpointError
    assert "without rng_tracker_states['data-parallel-rng']" in text and "checkpoint.no_load_rng" in text


def _streams(config: Config) -> dict[str, torch.Tensor]:
    with training_run(config) as ctx:
        assert ctx.progress.iteration in (0, 1)
        return ctx.state.tracker.get_states() | {"default": torch.get_rng_state()}


def test_p6_after_a_change_of_tp_streams_follow_from_seed_iteration_and_place(tmp_path: Path) -> None:
    run_on_ranks(1, _train, _config((1, 1, 1), save=str(tmp_path / "run"), save_interval=1), 1)
    load = _config((2, 1, 1), load=str(tmp_path / "run"))
    derived, again, start = (run_on_ranks(2, _streams, c) for c in (load, load, _config((2, 1, 1))))
    for rank in range(2):
        assert all(torch.equal(derived[rank][name], again[rank][name]) for name in derived[rank])
        assert not any(torch.equal(derived[rank][name], start[rank][name]) for name in derived[rank])
    # As always: one default stream for the group, and one of its own for each rank.
    assert torch.equal(derived[0]["default"], derived[1]["default"])
    assert not torch.equal(derived[0]["model-parallel-rng"], derived[1]["model-parallel-rng"])


def test_p5_p6_tp_and_pp_of_a_torch_dist_checkpoint_may_change(tmp_path: Path) -> None:
    """Weights and optimizer move to any grid; a legacy checkpoint, which cannot, is not read at all."""
    whole = global_state(run_on_ranks(2, _train, _config((2, 1, 1), save=str(tmp_path), save_interval=1), 1))
    for topology in ((1, 1, 1), (1, 2, 1)):
        run = run_on_ranks(prod(topology), _train, _config(topology, load=str(tmp_path)), 0)
        assert unequal(global_state(run), whole) == []
