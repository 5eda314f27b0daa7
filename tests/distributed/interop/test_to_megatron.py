"""Checkpoints of a run here, loaded by megatron-core into its own model and DistributedOptimizer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.paths import iteration_folder
from megalite.config.schema import Config
from megalite.parallel.random import DropoutContext
from megalite.training.setup import training_run
from megalite.training.step import train_step
from tests.helpers import megatron, megatron_files
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

pytestmark = megatron.needs_megatron

STEPS = 3
FACES: dict[str, tuple[dict[str, Any], ...]] = {"gpt2": (), "llama": (LLAMA,)}
BF16 = {"precision": {"bf16": True}}
SCHEDULE = {"optimizer": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-4}}

# One launch per number of ranks: starting ranks and importing megatron-core takes longer than a load.
TARGETS: list[list[Topology]] = [[(1, 1, 1)], [(2, 1, 1), (1, 2, 1), (1, 1, 2)]]
MORE_TARGETS: list[list[Topology]] = [[(2, 2, 1), (2, 1, 2), (1, 2, 2)], [(2, 2, 2)]]
SOURCES: list[Topology] = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]


@dataclass
class Loaded:
    """What megatron-core has after a load."""

    state: LocalState
    common: dict[str, Any]
    groups: list[dict[str, Any]]
    """Parameter groups of its Adam, without the parameters."""
    lr: float
    num_random_states: int


def _train_and_save(config: Config) -> tuple[LocalState, dict[str, Any]]:
    with training_run(config) as ctx:
        run_steps(ctx, STEPS)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in ctx.state.optimizer.param_groups]
        return local_state(ctx), {"groups": groups, "lr": ctx.state.scheduler.lr}


def _load_each(topologies: list[Topology], changes: tuple[dict[str, Any], ...], folder: Path) -> list[Loaded]:
    results = []
    for topology in topologies:
        config = make_config(*changes, topology=topology)
        with megatron.megatron_core(topology):
            run = megatron.build(config)
            loaded = megatron_files.load(run, folder)
            scheduler = megatron.scheduler_from(run, loaded["opt_param_scheduler"])
            adam = run.distributed_optimizer.optimizer
            groups = [{k: v for k, v in group.items() if k != "params"} for group in adam.param_groups]
            results.append(
                Loaded(
                    state=megatron.local_state(run),
                    common={name: loaded[name] for name in ("args", "iteration", "checkpoint_version")},
                    groups=groups,
                    lr=scheduler.get_lr(adam.param_groups[0]),
                    # A rank that asks for no cell has no such part.
                    num_random_states=len(loaded.get("rng_state", {})),
                )
            )
    return results


def _check(
    root: Path,
    source: Topology,
    changes: tuple[dict[str, Any], ...],
    of_source: tuple[dict[str, Any], ...],
    targets: list[list[Topology]],
) -> list[Loaded]:
    """Train and save at ``source``, load everywhere with megatron-core, compare all tensors; return rank 0's loads."""
    saving = {"checkpoint": {"save": str(root), "save_interval": STEPS}}
    config = make_config(*changes, *of_source, saving, topology=source)
    ranks = run_on_ranks(prod(source), _train_and_save, config, timeout=180.0)
    expected = global_state([state for state, _ in ranks])
    first = []
    for topologies in targets:
        results = run_on_ranks(
            prod(topologies[0]), _load_each, topologies, changes, iteration_folder(root, STEPS), timeout=240.0
        )
        for index, topology in enumerate(topologies):
            loads = [rank[index] for rank in results]
            assert unequal(global_state([load.state for load in loads]), expected) == [], f"{source} -> {topology}"
            assert sum(load.num_random_states for load in loads) == source[0] * source[1]
            for load in loads:
                _check_common(load, source, ranks[0][1], config)
            first.append(loads[0])
    return first


def _check_common(load: Loaded, source: Topology, saved: dict[str, Any], config: Config) -> None:
    assert load.common["iteration"] == STEPS
    assert load.common["checkpoint_version"] == 3.0
    assert load.lr == pytest.approx(saved["lr"], rel=1e-12)
    of_ours = {group["wd_mult"]: group for group in saved["groups"]}
    assert {group["wd_mult"] for group in load.groups} == of_ours.keys()
    for group in load.groups:
        assert group["step"] == STEPS
        for name in ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr", "lr_mult", "is_expert_parallel"):
            assert group[name] == of_ours[group["wd_mult"]][name], name
    args = vars(load.common["args"])
    tp, pp, dp = source
    samples = STEPS * config.training.global_batch_size
    expected = {
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_attention_heads": config.model.num_attention_heads,
        "add_position_embedding": config.model.position_embedding_type == "learned_absolute",
        "max_position_embeddings": config.model.seq_length,
        "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        "tokenizer_type": config.data.tokenizer_type,
        "vocab_file": None,
        "data_parallel_random_init": False,
        "phase_transition_iterations": None,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "data_parallel_size": dp,
        "world_size": prod(source),
        "global_batch_size": config.training.global_batch_size,
        "consumed_train_samples": samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "iteration": STEPS,
        "no_save_optim": False,
        "no_save_rng": False,
        "async_save": False,
        "async_strategy": "mcore",
    }
    missing = object()
    different = {name: args.get(name, missing) for name, value in expected.items() if args.get(name, missing) != value}
    assert not different
    assert "ckpt_fully_parallel_save" in args


@pytest.mark.parametrize("face", FACES)
def test_megatron_loads_model_and_optimizer_at_another_topology(tmp_path: Path, face: str) -> None:
    _check(tmp_path / "run", (2, 2, 2), (*FACES[face], BF16, SCHEDULE), (), TARGETS)


# One micro-batch a step; no padding rows, which megatron-core counts as candidates for the next token.
ONE_MICROBATCH = {
    "model": {"vocab_size": 256},
    "data": {"tokenizer_type": "NullTokenizer"},
    "training": {"micro_batch_size": 4, "global_batch_size": 4},
    "optimizer": {"clip_grad": 0.0},
}


@dataclass
class NextStep:
    """The step after a save."""

    losses: torch.Tensor
    state: LocalState
    batch: dict[str, torch.Tensor]


def _train_save_and_go_on(config: Config) -> NextStep:
    with training_run(config) as ctx:
        run_steps(ctx, STEPS)
        # A look ahead: a step takes its batches from the position of the progress.
        batch = next(ctx.train_batches)
        model = ctx.state.chunks[0].module
        names = ("tokens", "position_ids", "labels")
        with torch.no_grad():
            losses = model(DropoutContext((0, 1)), **{name: batch[name] for name in names})
        train_step(ctx)
        return NextStep(losses, local_state(ctx), batch)


def _go_on_with_megatron(config: Config, folder: Path, batch: dict[str, torch.Tensor]) -> NextStep:
    with megatron.megatron_core((1, 1, 1)):
        run = megatron.build(config)
        megatron_files.load(run, folder)
        losses = megatron.train_step(run, batch["tokens"], batch["position_ids"], batch["labels"])
        return NextStep(losses, megatron.local_state(run), batch)


@pytest.mark.parametrize("face", FACES)
def test_megatron_makes_our_next_step_from_our_file(tmp_path: Path, face: str) -> None:
    saving = {"checkpoint": {"save": str(tmp_path), "save_interval": STEPS}}
    changes = (*FACES[face], ONE_MICROBATCH, SCHEDULE)
    ours = run_on_ranks(1, _train_save_and_go_on, make_config(*changes, saving))[0]
    folder = iteration_folder(tmp_path, STEPS)
    theirs = run_on_ranks(1, _go_on_with_megatron, make_config(*changes), folder, ours.batch)[0]
    torch.testing.assert_close(theirs.losses, ours.losses, atol=1e-5, rtol=0)
    before = read_with_dcp(folder)
    after, expected = global_state([theirs.state]), global_state([ours.state])
    for name, value in expected.items():
        start = stored_tensor(before, name)[: len(value)]
        # What the step did to the tensor, since that is a small part of what it is.
        torch.testing.assert_close(after[name] - start, value - start, atol=2e-6, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("source", [*SOURCES, (2, 2, 2)], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_megatron_loads_from_any_topology_at_any_other(
    tmp_path: Path, face: str, source: Topology, is_bf16: bool
) -> None:
    _check(tmp_path / "run", source, (*FACES[face], *((BF16,) if is_bf16 else ())), (), TARGETS + MORE_TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "of_source",
    [
        VPP,
        {"parallel": {"ddp_bucket_size": 5_000, "overlap_grad_reduce": True}},
        {"parallel": {"use_distributed_optimizer": False}},
    ],
    ids=["virtual stages", "many buckets", "plain optimizer"],
)
def test_how_a_run_is_cut_inside_leaves_no_trace(tmp_path: Path, of_source: dict[str, Any]) -> None:
    _check(tmp_path / "run", (1, 2, 2), (BF16,), (of_source,), TARGETS)
