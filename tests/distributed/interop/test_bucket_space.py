"""Megatron's default layout of the optimizer, by gradient bucket, written by one and read by the other."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.paths import iteration_folder
from megalite.config.schema import Config
from megalite.training.setup import training_run
from tests.helpers import megatron, megatron_files
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LLAMA, LocalState, Topology, global_state, local_state, make_config, run_steps, unequal

pytestmark = megatron.needs_megatron

STEPS = 2
BF16 = {"precision": {"bf16": True}}
FACES: dict[str, tuple[dict[str, Any], ...]] = {"gpt2": (), "llama": (LLAMA,)}


def _save_with_megatron(config: Config, topology: Topology, root: Path, bucket_size: int | None) -> LocalState:
    with megatron.megatron_core(topology):
        run = megatron.build(config, bucket_size=bucket_size)
        megatron.update(run, STEPS)
        megatron_files.save(run, root, STEPS, metadata=megatron_files.BUCKET_METADATA)
        return megatron.local_state(run)


def _load_with_megatron(config: Config, topology: Topology, folder: Path) -> LocalState:
    with megatron.megatron_core(topology):
        run = megatron.build(config)
        megatron_files.load(run, folder)
        return megatron.local_state(run)


def _train(config: Config, steps: int) -> LocalState:
    with training_run(config) as ctx:
        run_steps(ctx, steps)
        return local_state(ctx)


@pytest.mark.parametrize(
    ("face", "source", "targets", "bucket_size"),
    [
        ("gpt2", (1, 2, 2), [(1, 2, 1)], 5_000),
        ("llama", (2, 1, 2), [(2, 1, 1)], None),
        pytest.param("gpt2", (2, 2, 2), [(2, 2, 1), (2, 2, 2)], 5_000, marks=pytest.mark.slow),
        pytest.param("llama", (1, 1, 3), [(1, 1, 2), (1, 1, 4)], 5_000, marks=pytest.mark.slow),
    ],
)
def test_buckets_of_megatron_are_read_at_another_dp(
    tmp_path: Path, face: str, source: Topology, targets: list[Topology], bucket_size: int | None
) -> None:
    batch = {"training": {"micro_batch_size": 1, "global_batch_size": 12}}
    changes = (*FACES[face], BF16, batch)
    config = make_config(*changes, topology=source)
    saved = run_on_ranks(prod(source), _save_with_megatron, config, source, tmp_path, bucket_size, timeout=180.0)
    for target in targets:
        load = {"checkpoint": {"load": str(tmp_path)}}
        loaded = run_on_ranks(prod(target), _train, make_config(*changes, load, topology=target), 0)
        assert unequal(global_state(loaded), global_state(saved)) == []


@pytest.mark.parametrize(
    ("face", "source", "target"),
    [
        ("gpt2", (1, 2, 2), (1, 2, 1)),
        pytest.param("llama", (2, 1, 2), (2, 1, 2), marks=pytest.mark.slow),
        pytest.param("gpt2", (1, 1, 1), (1, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_megatron_reads_our_buckets_at_another_dp(
    tmp_path: Path, face: str, source: Topology, target: Topology
) -> None:
    changes = (*FACES[face], BF16)
    saving = {"checkpoint": {"save": str(tmp_path), "save_interval": STEPS, "dist_ckpt_optim_fully_reshardable": False}}
    saved = run_on_ranks(prod(source), _train, make_config(*changes, saving, topology=source), STEPS)
    config = make_config(*changes, topology=target)
    folder = iteration_folder(tmp_path, STEPS)
    loaded = run_on_ranks(prod(target), _load_with_megatron, config, target, folder, timeout=180.0)
    assert unequal(global_state(loaded), global_state(saved)) == []
