"""What may change between a save and a load, cell by cell (R4.4.7), and pitfalls that need a whole run (P1 to P12)."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.paths import iteration_folder, read_tracker
from megalite.config.schema import Config
from megalite.training.exit import checkpoint_and_decide_exit, finalize_saves, save_checkpoint
from megalite.training.loop import advance
from megalite.training.setup import training_run
from megalite.training.step import train_step
from megalite.utils.dist import world_group
from megalite.utils.errors import ConfigError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LocalState, Topology, global_state, local_state, make_config, run, run_steps, unequal

Changes = dict[str, dict[str, Any]]

BATCH: Changes = {"training": {"micro_batch_size": 1, "global_batch_size": 12}}
SAVED_AT: Topology = (1, 1, 2)
DP_CHANGED: list[Topology] = [(1, 1, 1), (1, 1, 3)]
GRID_CHANGED: list[Topology] = [(2, 1, 1), (1, 2, 1), (2, 2, 1)]


@pytest.fixture(scope="module", params=[False, True], ids=["one stream", "own streams"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Changes, Any]:
    """A run whose data-parallel ranks share their random streams, or have their own."""
    folder = tmp_path_factory.mktemp("run")
    streams = {"rng": {"data_parallel_random_init": request.param}}
    save = {"checkpoint": {"save": str(folder), "save_interval": 2}}
    return folder, streams, run_on_ranks(2, _train, make_config(BATCH, streams, save, topology=SAVED_AT))


def _train(config: Config) -> tuple[LocalState, torch.Tensor]:
    with training_run(config) as ctx:
        run_steps(ctx, 2)
        return local_state(ctx), ctx.state.tracker.get_states()["model-parallel-rng"]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _resume(config: Config) -> tuple[LocalState, torch.Tensor, list[str]]:
    heard = _Warnings()
    # Not on the package's logger: setting up the log replaces its handlers.
    logging.getLogger("megalite.checkpoint").addHandler(heard)
    with training_run(config) as ctx:
        return local_state(ctx), ctx.state.tracker.get_states()["model-parallel-rng"], heard.texts


@pytest.mark.parametrize("topology", [*DP_CHANGED, *GRID_CHANGED], ids=str)
def test_r4_4_7_weights_follow_every_change_and_streams_those_of_dp(
    saved: tuple[Path, Changes, Any], topology: Topology
) -> None:
    """R4.4.7, model weights: yes, yes; random states: by DP rank, derived anew at another TP or PP with one WARNING.

    With streams of their own a larger DP has ranks that the file knows nothing of: all are derived anew, and said so.
    """
    folder, streams, before = saved
    config = make_config(BATCH, streams, {"checkpoint": {"load": str(folder)}}, topology=topology)
    after = run_on_ranks(prod(topology), _resume, config)
    expected = global_state([state for state, _ in before])
    assert unequal(global_state([state for state, _, _ in after]), expected) == []
    said = [text for text in after[0][2] if "random states are not restored" in text]
    if topology in DP_CHANGED and not streams["rng"]["data_parallel_random_init"]:
        assert said == [] and all(torch.equal(stream, before[0][1]) for _, stream, _ in after)
        return
    assert len(said) == 1 and (f"TP={topology[0]}" in said[0] or f"DP={topology[2]}" in said[0])
    assert not any(torch.equal(stream, before[0][1]) for _, stream, _ in after)
    # The streams of ranks that must differ do, whatever the change: along TP, and along DP with streams of their own.
    apart = topology[0] > 1 or (streams["rng"]["data_parallel_random_init"] and topology[2] > 1)
    assert apart == (len({bytes(stream.numpy()) for _, stream, _ in after}) > topology[1])


def _save_twice(config: Config) -> tuple[list[Any], list[LocalState]]:
    """Save at two iterations; record what the tracker named at each file operation; spoil the weights after each."""
    group = world_group()
    seen: list[Any] = []
    root = Path(config.checkpoint.save)

    def hook(point: str, path: Path) -> None:
        markers = sorted(int(file.parent.name[5:]) for file in root.glob("iter_*/metadata.json"))
        seen.append((point, path.name, read_tracker(root), markers))

    states = []
    with training_run(config, hook) as ctx:
        for _ in range(2):
            run_steps(ctx, 1)
            states.append(local_state(ctx))
            save_checkpoint(ctx)
            with torch.no_grad():
                for chunk in ctx.state.chunks:
                    for buffer in chunk.buffers:
                        buffer.values.mul_(1.5)
            assert read_tracker(root) == ctx.progress.iteration
            group.barrier()
    return seen, states


def test_p1_p3_the_tracker_follows_the_bytes_and_a_save_keeps_what_it_was_given(tmp_path: Path) -> None:
    """P1: data, index, marker, tracker, in this order. P3: when a save has returned, training may change everything."""
    config = make_config({"checkpoint": {"save": str(tmp_path / "run")}}, topology=(2, 1, 1))
    ranks = run_on_ranks(2, _save_twice, config)
    operations = ranks[0][0]
    for iteration in (1, 2):
        previous = iteration - 1 or None
        during = [entry for entry in operations if entry[2] == previous and entry[0] != "mkdir"]
        written = [name for point, name, _, _ in during if point in ("write", "rename")]
        order = [written.index("__0_0.distcp"), written.index(".metadata"), written.index("metadata.json")]
        assert order == sorted(order) and written[-1] == "latest_checkpointed_iteration.txt"
        # The marker is there before the tracker names the step, and not before the index.
        rename = next(
            i for i, entry in enumerate(during) if entry[:2] == ("rename", "latest_checkpointed_iteration.txt")
        )
        assert iteration in during[rename][3]
        assert not any(iteration in entry[3] for entry in during if entry[:2] == ("rename", ".metadata"))
    for number, iteration in enumerate((1, 2)):
        load = {"checkpoint": {"load": str(tmp_path / "run"), "ckpt_step": iteration}}
        loaded = run((1, 1, 1), make_config(load), 0)
        assert unequal(loaded.state, global_state([states[number] for _, states in ranks])) == []


def _kind_of_save(config: Config) -> bool:
    """Return whether the save of an iteration is still going on when training may go on."""
    with training_run(config) as ctx:
        advance(ctx, train_step(ctx))
        checkpoint_and_decide_exit(ctx)
        is_saving = ctx.checkpoints.is_saving
        finalize_saves(ctx, blocking=True)
        return is_saving


def test_p4_asynchronous_saves_are_never_switched_off_in_silence(tmp_path: Path) -> None:
    """P4: with ``async_save`` saves are asynchronous; ways to make them that do not exist here are refused."""
    for is_async in (True, False):
        save = {"checkpoint": {"save": str(tmp_path / str(is_async)), "save_interval": 1, "async_save": is_async}}
        assert run_on_ranks(1, _kind_of_save, make_config(BATCH, save)) == [is_async]
    for key in ("async_strategy", "use_persistent_ckpt_worker"):
        with pytest.raises(ConfigError, match=f"unknown key 'checkpoint.{key}'"):
            make_config({"checkpoint": {key: True, "async_save": True}})


def test_p10_weights_and_optimizer_are_of_one_step_whatever_the_tracker_names(tmp_path: Path) -> None:
    """P10: with ckpt_step nothing is taken from the step that the tracker names."""
    save = {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 2}}
    run((1, 1, 2), make_config(BATCH, save), 4)
    assert read_tracker(tmp_path / "run") == 4 and iteration_folder(tmp_path / "run", 2).is_dir()
    expected = run((1, 1, 2), make_config(BATCH), 2)
    load = {"checkpoint": {"load": str(tmp_path / "run"), "ckpt_step": 2}}
    resumed = run((2, 1, 1), make_config(BATCH, load, topology=(2, 1, 1)), 0)
    assert unequal(resumed.state, expected.state) == []


WAYS: list[dict[str, Any]] = [
    {"ckpt_fully_parallel_save": False, "dist_ckpt_workers": 2, "verify_integrity": "sha256"},
    {"ckpt_assume_constant_structure": True, "verify_integrity": "xxh3", "ckpt_fully_parallel_load": True},
    {
        "dist_ckpt_workers": 3,
        "ckpt_assume_constant_structure": True,
        "ckpt_fully_parallel_load": True,
        "ckpt_fully_parallel_load_exchange_algo": "gather_rounds",
    },
    {
        "ckpt_load_validate_sharding_integrity": False,
        "dist_ckpt_strictness": "raise_unexpected",
        "ckpt_fully_parallel_load": True,
        "ckpt_fully_parallel_load_exchange_algo": "gather_object",
    },
]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_how_a_run_saves_and_loads_changes_no_bit(tmp_path: Path, way: int) -> None:
    """Saved twice, resumed at another topology and saved there again: the state of the run that did it plainly."""
    settings, plain = {"save_interval": 1, **WAYS[way]}, {"save_interval": 1}
    states = []
    for name, checkpoint in (("this", settings), ("plain", plain)):
        save = {"checkpoint": {"save": str(tmp_path / name), **checkpoint}}
        run((1, 2, 2), make_config(BATCH, save, topology=(1, 2, 2)), 2)
        states.append(run((2, 1, 2), make_config(BATCH, save, topology=(2, 1, 2)), 1).state)
        states.append(run((1, 1, 1), make_config(BATCH, save), 0).state)
    assert all(unequal(state, states[0]) == [] for state in states[1:])
