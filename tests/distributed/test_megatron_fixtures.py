"""Numbers that megatron-core computed, from its own start values and its own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.state import model_state
from megalite.config.schema import Config
from megalite.dist_checkpointing.serialization import load
from megalite.model.gpt import WORD_EMBEDDING
from megalite.model.transformer import ON_DISK_NAMES
from megalite.optimizer.optimizer import STATE_KINDS
from megalite.parallel.layers import traits
from megalite.parallel.random import DropoutContext
from megalite.parallel.schedules import run_schedule
from megalite.training.context import TrainContext
from megalite.training.setup import training_run
from tests.helpers.fixtures import checkpoint_of, fixture_config, fixtures_folder, megatron_fixture, recipe_weight
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
    run,
    stored_tensor,
)

CURVE_STEPS = 20


def _key_of(name: str) -> str:
    """Return the per-layer name with Megatron's fused names for norms."""
    for own, on_disk in ON_DISK_NAMES.items():
        name = name.replace(own, on_disk)
    return name


class _RecipeTokens:
    """Micro-batches of 2 sequences whose tokens follow from step and index."""

    def __init__(self, dp: tuple[int, int], global_batch: int = 8) -> None:
        self.dp, self.global_batch = dp, global_batch
        self.position = 0

    def set_position(self, consumed: int) -> None:
        self.position = consumed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        step, offset = divmod(self.position, self.global_batch)
        index = offset // 2 + self.dp[0]
        self.position += 2 * self.dp[1]
        random = np.random.RandomState((1000003 * step + index) & 0x7FFFFFFF)
        first = random.randint(0, 256, (2, 1))
        steps = random.randint(1, 4, (2, 64)).cumsum(axis=1)
        text = torch.from_numpy((first + np.concatenate([np.zeros((2, 1), int), steps], axis=1)) % 256)
        return {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": torch.ones(2, 64),
            "position_ids": torch.arange(64).expand(2, 64),
        }


def _start_from_recipe(ctx: TrainContext) -> None:
    tp = ctx.parallel.tp
    for name, parameter in ctx.state.chunks[0].parameters():
        axis = traits(parameter).tp_axis
        name = WORD_EMBEDDING if traits(parameter).is_copy else name
        shape = [size * (tp.size if i == axis else 1) for i, size in enumerate(parameter.shape)]
        whole = torch.from_numpy(recipe_weight(_key_of(name), tuple(shape), 0.02))
        parameter.data.copy_(whole if axis is None else whole.chunk(tp.size, axis)[tp.rank])
    for group in ctx.state.optimizer.param_groups:
        group["wd_mult"] = 1.0
    ctx.state.scheduler.step(0)
    ctx.train_batches = _RecipeTokens((ctx.parallel.dp.rank, ctx.parallel.dp.size))


TINY = {
    "model": {
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "seq_length": 64,
        "vocab_size": 256,
    },
    "data": {"tokenizer_type": "NullTokenizer"},
    "training": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 20},
    "optimizer": {"lr": 1e-3, "clip_grad": 1.0},
}


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_training_curve_of_megatron(topology: Topology) -> None:
    expected = json.loads((fixtures_folder() / "megatron_core_curve" / "gpt2.json").read_text())
    actual = run(topology, make_config(TINY, topology=topology), CURVE_STEPS, _start_from_recipe)
    assert actual.losses == pytest.approx(expected["loss"], abs=1e-5)
    assert actual.grad_norms == pytest.approx(expected["grad_norm"], abs=1e-5)


def _logits(config: Config, folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    with training_run(config) as ctx:
        parallel = ctx.parallel
        request = {"model": model_state(ctx.state)}
        load(
            request,
            checkpoint_of(folder),
            group=parallel.world,
            ignore_keys=lambda key: key.startswith("rng_state/"),
        )
        tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
        inputs = {"tokens": tokens, "position_ids": torch.arange(64).expand(2, 64)} if parallel.pp.is_first else {}
        results = []

        def forward_step(microbatch: int, chunk: int, stage_input: torch.Tensor | None) -> torch.Tensor:
            model = ctx.state.chunks[chunk].module.eval()
            given = inputs if model.chunk.is_first else {}
            # The second time with labels, which gives the losses instead of the logits.
            labels = tokens.roll(-1, 1) if microbatch and model.chunk.is_last else None
            output = model(DropoutContext((0, 1)), stage_input=stage_input, labels=labels, **given)
            if model.chunk.is_last:
                results.append(output.numpy())
            return output

        with torch.no_grad():
            run_schedule(forward_step, 2, ctx.link, None, num_chunks=len(ctx.state.chunks))
        return (results[0], results[1]) if results else None


ONE, TP2, PP2, DP2, TP2PP2 = (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)
TOPOLOGIES: list[Topology] = [ONE, TP2, PP2, DP2, TP2PP2]


@pytest.mark.parametrize(
    ("fixture", "topology", "changes"),
    [
        *(("gpt2_tp2pp2", topology, ()) for topology in TOPOLOGIES),
        *(("llama_tp2pp2", topology, (LLAMA,)) for topology in TOPOLOGIES),
        ("llama_tp2pp2", PP2, (LLAMA, VPP)),
        ("gpt2_tp2pp2", TP2PP2, (VPP,)),
    ],
)
def test_logits_from_the_files_of_megatron(
    fixture: str, topology: Topology, changes: tuple[dict[str, dict[str, Any]], ...]
) -> None:
    folder = megatron_fixture(fixture)
    config = make_config(TINY, *changes, topology=topology)
    results = [result for result in run_on_ranks(prod(topology), _logits, config, folder) if result is not None]
    assert len(results) == topology[0] * topology[2]
    for logits, loss in results:
        np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), atol=1e-5, rtol=0)
        np.testing.assert_allclose(loss, np.load(folder / "token_loss.npy"), atol=1e-5, rtol=0)


FIXTURES = [
    "gpt2_tp2pp2",
    "llama_tp2pp2",
    "optim_fully_reshardable_bf16_tp2dp2",
    "optim_fully_reshardable_fp32_tp2pp2",
    "optim_dp_reshardable_bf16_tp1dp2",
]


def _start_from(fixture: Path, topology: Topology) -> Config:
    """Return the configuration of a run that takes all that can be taken from a fixture."""
    described = fixture_config(fixture)
    shape, sharding = described["model"], described.get("sharding")
    is_llama = shape["style"] == "llama"
    model = {
        "num_layers": shape["num_layers"],
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["heads"],
        "ffn_hidden_size": shape["ffn"],
        "seq_length": shape["seq"],
        "vocab_size": shape["vocab"],
        "make_vocab_size_divisible_by": 1,
    }
    groups = {"num_query_groups": shape["kv_groups"]} if is_llama else {}
    checkpoint = {
        "load": str(fixture / "ckpt"),
        "no_load_optim": sharding is None,
        # Its optimizer state fits where buckets are the same; what is asked here is that the weights do everywhere.
        "finetune": sharding == "dp_reshardable",
    }
    return make_config(
        *((LLAMA,) if is_llama else ()),
        {"model": model | groups, "data": {"tokenizer_type": "NullTokenizer"}},
        {"precision": {"bf16": bool(described.get("bf16"))}, "checkpoint": checkpoint},
        {"optimizer": {"use_checkpoint_opt_param_scheduler": True}},
        topology=topology,
    )


def _loaded_states(configs: list[Config]) -> list[LocalState]:
    states = []
    for config in configs:
        with training_run(config) as ctx:
            states.append(local_state(ctx))
    return states


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_element_is_loaded_at_every_topology(topology: Topology) -> None:
    fixtures = [megatron_fixture(name) for name in FIXTURES]
    configs = [_start_from(fixture, topology) for fixture in fixtures]
    ranks = run_on_ranks(prod(topology), _loaded_states, configs, timeout=120.0)
    for index, fixture in enumerate(fixtures):
        state = global_state([states[index] for states in ranks])
        stored = read_with_dcp(checkpoint_of(fixture))
        has_optimizer = any(key.startswith("optimizer.state.") for key in stored)
        if not has_optimizer:
            state = {name: value for name, value in state.items() if name.split(".")[0] not in STATE_KINDS}
            stored = {key: value for key, value in stored.items() if not key.startswith("optimizer.")}
        assert [name for name, value in state.items() if not torch.equal(value, stored_tensor(stored, name))] == []
        # Nothing of the file is left out.
        assert sum(value.numel() for value in state.values()) == sum(value.numel() for value in stored.values())
        recipe = fixture_config(fixture).get("weights")
        if recipe is not None:
            for name, value in state.items():
                expected = recipe_weight(_key_of(name), tuple(value.shape), recipe["scale"], recipe["salt"])
                assert torch.equal(value, torch.from_numpy(expected)), name
