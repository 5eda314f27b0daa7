"""A resumed run: on the same topology the unbroken one bit for bit, on another the same global state."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.paths import iteration_folder
from megalite.config.schema import Config
from megalite.training.setup import training_run
from megalite.training.step import StepOutput
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import (
    LLAMA,
    VPP,
    LocalState,
    Topology,
    global_state,
    local_state,
    make_config,
    read_with_dcp,
    run_steps,
    stored_tensor,
    unequal,
)

# Half as many micro-batches as elsewhere: what is compared here does not depend on their number, but the time does.
LARGER = {"training": {"micro_batch_size": 2}}
DROPOUT = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}


def _saving(folder: Path, interval: int) -> dict[str, Any]:
    return {"checkpoint": {"save": str(folder), "save_interval": interval}}


def _train(config: Config, steps: int) -> tuple[list[StepOutput], LocalState, dict[str, Any]]:
    """Do ``steps`` iterations and say what the next batch and the random streams would be."""
    with training_run(config) as ctx:
        outputs = run_steps(ctx, steps)
        following: dict[str, Any] = {"progress": vars(ctx.progress).copy(), "lr": ctx.state.scheduler.lr}
        following["random"] = torch.rand(4)
        with ctx.state.tracker.fork():
            following["tracker"] = torch.rand(4)
        if ctx.train_batches is not None:
            following["batch"] = next(ctx.train_batches)
        return outputs, local_state(ctx), following


def _assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


SAME_TOPOLOGY = [
    ((1, 1, 1), {}, False),
    ((1, 1, 1), {}, True),
    ((2, 1, 1), {"sequence_parallel": True}, True),
    ((2, 1, 2), {"sequence_parallel": False, "overlap_grad_reduce": True, "overlap_param_gather": True}, False),
    ((1, 2, 2), {"use_distributed_optimizer": False}, False),
    ((1, 2, 2), {"overlap_grad_reduce": True, "overlap_param_gather": True}, True),
    ((2, 2, 1), {"sequence_parallel": True}, False),
]


@pytest.mark.parametrize(("topology", "parallel", "bf16"), SAME_TOPOLOGY, ids=str)
def test_same_topology_continues_bit_for_bit(
    tmp_path: Path, topology: Topology, parallel: dict[str, Any], bf16: bool
) -> None:
    schedule = {"optimizer": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-4}}
    changes = (
        LARGER,
        DROPOUT,
        schedule,
        {"parallel": {**parallel, "ddp_bucket_size": 20_000}},
        {"precision": {"bf16": bf16}},
    )
    unbroken = run_on_ranks(prod(topology), _train, make_config(*changes, topology=topology), 6)
    config = make_config(*changes, _saving(tmp_path / "run", 3), topology=topology)
    first = run_on_ranks(prod(topology), _train, config, 3)
    # The same command again: it finds its own checkpoint.
    second = run_on_ranks(prod(topology), _train, config, 3)
    for rank, (outputs, _, following) in enumerate(unbroken):
        assert first[rank][0] + second[rank][0] == outputs
        _assert_same(second[rank][2], following)
    assert unequal(global_state([r[1] for r in second]), global_state([r[1] for r in unbroken])) == []


@pytest.mark.parametrize("is_sharded", [True, False])
def test_random_streams_per_rank_resume_and_leave_replicas_equal(tmp_path: Path, is_sharded: bool) -> None:
    own_streams = {"rng": {"data_parallel_random_init": True}, "parallel": {"use_distributed_optimizer": is_sharded}}
    unbroken = run_on_ranks(2, _train, make_config(DROPOUT, own_streams), 4)
    config = make_config(DROPOUT, own_streams, _saving(tmp_path / "run", 2))
    first, second = (run_on_ranks(2, _train, config, 2) for _ in range(2))
    for rank, (outputs, _, following) in enumerate(unbroken):
        assert first[rank][0] + second[rank][0] == outputs
        _assert_same(second[rank][2], following)
    assert not torch.equal(unbroken[0][2]["random"], unbroken[1][2]["random"])
    # Puts the replicas together, and fails where they differ.
    assert unequal(global_state([r[1] for r in second]), global_state([r[1] for r in unbroken])) == []


TOPOLOGIES: list[Topology] = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
SAVED_AT = 2

Layout = tuple[Topology, bool]
"""(topology, two virtual stages per rank)"""

LAYOUTS: list[Layout] = [(topology, False) for topology in TOPOLOGIES] + [((1, 2, 1), True), ((2, 2, 1), True)]
FACES: dict[str, tuple[dict[str, Any], ...]] = {"gpt2": (), "llama": (LLAMA,)}

Saved = dict[Layout, tuple[Path, dict[str, torch.Tensor]]]


def _config(face: str, layout: Layout, *changes: dict[str, Any]) -> Config:
    topology, is_virtual = layout
    return make_config(LARGER, *FACES[face], *((VPP,) if is_virtual else ()), *changes, topology=topology)


def _train_and_save(config: Config, steps: int) -> LocalState:
    with training_run(config) as ctx:
        run_steps(ctx, steps)
        return local_state(ctx)


@pytest.fixture(scope="module", params=list(FACES))
def face(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(face: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One checkpoint per layout, with the state that its ranks held."""
    made = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("saved") / "run"
        config = _config(face, layout, _saving(folder, SAVED_AT))
        made[layout] = (folder, global_state(run_on_ranks(prod(layout[0]), _train_and_save, config, SAVED_AT)))
    return made


def _load_each(configs: Sequence[Config]) -> list[LocalState]:
    states = []
    for config in configs:
        with training_run(config) as ctx:
            assert ctx.progress.iteration == SAVED_AT
            assert ctx.state.optimizer.num_steps == SAVED_AT
            states.append(local_state(ctx))
    return states


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_state_moves_between_layouts(face: str, saved: Saved, target: Layout) -> None:
    configs = [_config(face, target, {"checkpoint": {"load": str(saved[source][0])}}) for source in LAYOUTS]
    ranks = run_on_ranks(prod(target[0]), _load_each, configs, timeout=120.0)
    for index, source in enumerate(LAYOUTS):
        loaded = global_state([states[index] for states in ranks])
        assert unequal(loaded, saved[source][1]) == [], f"{source} -> {target}"


def _losses_once_per_target() -> list[Any]:
    """Every target with one face; the other face belongs to the full matrix."""
    cases = []
    for index, target in enumerate(LAYOUTS):
        for face in FACES:
            marks = () if face == list(FACES)[index % 2] else (pytest.mark.slow,)
            cases.append(pytest.param(face, target, marks=marks, id=f"{face}-{target}"))
    return cases


@pytest.mark.parametrize(("face", "target"), _losses_once_per_target(), indirect=["face"])
def test_losses_go_on_at_another_layout(face: str, saved: Saved, target: Layout) -> None:
    source = LAYOUTS[(LAYOUTS.index(target) + 3) % len(LAYOUTS)]
    load = {"checkpoint": {"load": str(saved[source][0])}, "training": {"train_iters": 12}}
    expected = run_on_ranks(prod(source[0]), _losses, _config(face, source, load))[0]
    actual = run_on_ranks(prod(target[0]), _losses, _config(face, target, load))[0]
    assert actual == pytest.approx(expected, abs=1e-5)


def _losses(config: Config) -> list[float]:
    with training_run(config) as ctx:
        return [output.loss for output in run_steps(ctx, 10)]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_plain_dcp_reads_the_files(saved: Saved, source: Layout) -> None:
    """RSH-22: optimizer state saved at any DP is plain tensors to the base library."""
    folder, state = saved[source]
    tensors = read_with_dcp(iteration_folder(folder, SAVED_AT))
    for name, expected in state.items():
        assert torch.equal(stored_tensor(tensors, name)[: len(expected)], expected), name
