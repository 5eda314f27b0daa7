"""Folders written by PyTorch's own writer, or by hand, are read when the two small files lie beside the tensors."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megalite.checkpoint.paths import TRACKER, iteration_folder
from megalite.config.schema import Config
from megalite.training.setup import training_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import (
    LLAMA,
    LocalState,
    Topology,
    global_state,
    local_state,
    make_config,
    read_with_dcp,
    run_steps,
    unequal,
)

STEPS = 2
CHANGES = (LLAMA, {"precision": {"bf16": True}, "training": {"micro_batch_size": 2}})


def _train_and_save(config: Config) -> LocalState:
    with training_run(config) as ctx:
        run_steps(ctx, STEPS)
        return local_state(ctx)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The root of a run's checkpoint and its state."""
    root = tmp_path_factory.mktemp("saved")
    # What others write has no hashes, and the common part that stays says so.
    save = {"save": str(root), "save_interval": STEPS, "no_save_rng": True, "verify_integrity": "off"}
    config = make_config(*CHANGES, {"checkpoint": save})
    return root, global_state(run_on_ranks(1, _train_and_save, config))


def _contents(step: Path) -> dict[str, Any]:
    """Return key -> whole tensor, or the list around an object, as they are to be stored."""
    index = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    objects = {key: [None] for key in index if "._extra_state/" in key}
    tensors = read_with_dcp(step)
    assert tensors.keys() | objects.keys() == index.keys()
    return tensors | objects


def _write_with_dcp(step: Path, contents: dict[str, Any], is_one_file: bool) -> None:
    dist.barrier()
    dcp.save(
        contents,
        storage_writer=dcp.FileSystemWriter(step, single_file_per_rank=is_one_file, thread_count=2),
        # It would make keys of its own from the lists around objects.
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )


def _one_file_per_rank(step: Path, contents: dict[str, Any]) -> None:
    run_on_ranks(2, _write_with_dcp, step, contents, True)


def _one_file_per_item(step: Path, contents: dict[str, Any]) -> None:
    run_on_ranks(2, _write_with_dcp, step, contents, False)


def _by_hand(step: Path, contents: dict[str, Any]) -> None:
    """Write one file and an index with nothing but what is needed."""
    entries: dict[str, Any] = {}
    places = {}
    with (step / "__0_0.distcp").open("wb") as file:
        for key, value in contents.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            place = dcp_metadata.MetadataIndex(key)
            entries[key] = dcp_metadata.BytesStorageMetadata()
            if isinstance(value, torch.Tensor):
                origin = torch.Size([0] * value.dim())
                place = dcp_metadata.MetadataIndex(key, origin)
                chunk = dcp_metadata.ChunkStorageMetadata(origin, value.size())
                properties = dcp_metadata.TensorProperties(value.dtype)
                entries[key] = dcp_metadata.TensorStorageMetadata(properties, value.size(), [chunk])
            places[place] = _StorageInfo("__0_0.distcp", file.tell(), buffer.tell())
            file.write(buffer.getbuffer())
    index = dcp_metadata.Metadata(entries, storage_data=places)
    (step / ".metadata").write_bytes(pickle.dumps(index))


WRITERS: list[tuple[Callable[[Path, dict[str, Any]], None], int]] = [
    (_one_file_per_rank, 2),
    (_one_file_per_item, 10),
    (_by_hand, 1),
]


@pytest.mark.parametrize(("write", "least_files"), WRITERS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_starts_from_a_folder_of_another_writer(
    tmp_path: Path,
    saved: tuple[Path, dict[str, torch.Tensor]],
    write: Callable[[Path, dict[str, Any]], None],
    least_files: int,
) -> None:
    root, expected = saved
    source, step = iteration_folder(root, STEPS), iteration_folder(tmp_path, STEPS)
    step.mkdir()
    write(step, _contents(source))
    assert len(list(step.glob("*.distcp"))) >= least_files
    shutil.copy(source / "common.pt", step)
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / TRACKER).write_text(str(STEPS))
    for topology in ((2, 2, 1), (1, 1, 2)):
        assert unequal(_loaded(tmp_path, topology), expected) == [], topology


def _loaded(root: Path, topology: Topology) -> dict[str, torch.Tensor]:
    config = make_config(*CHANGES, {"checkpoint": {"load": str(root)}}, topology=topology)
    return global_state(run_on_ranks(prod(topology), _load, config))


def _load(config: Config) -> LocalState:
    with training_run(config) as ctx:
        assert ctx.progress.iteration == STEPS
        assert ctx.state.optimizer.num_steps == STEPS
        return local_state(ctx)
