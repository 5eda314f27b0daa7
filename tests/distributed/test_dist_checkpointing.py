"""Saved on some grid of ranks, loaded on another: the same bits in global coordinates."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megalite.dist_checkpointing.fingerprint import fingerprint, fingerprint_by_key, fingerprint_of_plain
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.serialization import load, load_plain_tensors, save, write_marker
from megalite.utils.dist import world_group
from tests.helpers.grid_state import GRIDS, STATES, WHOLE, Grid, block_of, parameters_of, state_of
from tests.helpers.ranks import run_on_ranks


def _save(path, shape):
    group = world_group()
    state = state_of(Grid(shape), fill=True)
    save(state, path, group=group, content_metadata={"kind": "test"})
    if group.is_first:
        write_marker(path)
    return fingerprint(state, group), fingerprint_by_key(state, group)


def _load(path, shape):
    group = world_group()
    grid = Grid(shape)
    request = state_of(grid, fill=False)
    request["rng"] = None
    result = load(request, path, group=group, ignore_keys=lambda key: key.startswith("rng/"))
    expected = parameters_of(grid, fill=True)
    wrong = [name for name, leaf in expected.items() if not torch.equal(result["model"][name], leaf.data)]
    for block in request["optimizer"]["blocks"]:
        if not torch.equal(block.global_data, block_of(STATES[block.key], block)):
            wrong.append(block.key)
    assert result["iteration"] == 5 and result["content_metadata"] == {"kind": "test"}
    return wrong, fingerprint(request, group)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves once per grid."""
    made = {}

    def folder(grid):
        if grid not in made:
            path = tmp_path_factory.mktemp("saved")
            made[grid] = path, run_on_ranks(grid[0] * grid[1] * grid[2], _save, path, grid)
        return made[grid]

    return folder


# Each grid is saved once and loaded once in the quick run; the slow one has all pairs.
PAIRS = [
    pytest.param(source, target, id=f"{source}-{target}", marks=[] if (j - i) % 4 == 1 else [pytest.mark.slow])
    for i, source in enumerate(GRIDS)
    for j, target in enumerate(GRIDS)
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_state_moves_between_grids_bit_for_bit(saved, source, target):
    path, prints = saved(source)
    for wrong, found in run_on_ranks(target[0] * target[1] * target[2], _load, path, target):
        assert wrong == [] and found == prints[0][0]


@pytest.mark.parametrize("source", GRIDS, ids=str)
def test_one_process_reads_whole_tensors(saved, source):
    path, prints = saved(source)
    found = load_plain_tensors(path)
    assert found.keys() == WHOLE.keys() | STATES.keys()
    assert [key for key, value in found.items() if not torch.equal(value, {**WHOLE, **STATES}[key])] == []
    assert {fingerprint_of_plain(found)} == {total for total, _ in prints}
    assert prints[0][1] == {key: fingerprint_of_plain({key: value}) for key, value in found.items()}


def test_each_rank_writes_one_file_and_only_if_it_has_something(saved):
    path, _ = saved((2, 1, 2))
    # Ranks 2 and 3 hold copies of the weights, but their own halves of the optimizer state.
    assert sorted(os.listdir(path)) == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(4)),
        "common.pt",
        "metadata.json",
    ]


def _plain_dcp(path):
    state = {key: torch.zeros_like(value) for key, value in {**WHOLE, **STATES}.items()}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=False))
    return [key for key, value in state.items() if not torch.equal(value, {**WHOLE, **STATES}[key])]


def test_plain_torch_distributed_checkpoint_reads_the_files(saved):
    assert run_on_ranks(2, _plain_dcp, saved((2, 2, 1))[0]) == [[], []]


def _save_replicas(path):
    group = world_group()
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=group.rank)}, path, group=group)


def test_rank_with_only_copies_writes_no_file(tmp_path):
    run_on_ranks(3, _save_replicas, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp", "common.pt"]


def _save_and_load_objects(path):
    group = world_group()
    cell = ((group.size,), (group.rank,))
    save({"rng": ShardedObject("rng", [group.rank, (1, b"x")], *cell)}, path, group=group)
    if group.is_first:
        write_marker(path)
    return load({"rng": ShardedObject("rng", None, *cell)}, path, group=group)["rng"]


def test_objects_come_back_to_their_cells(tmp_path):
    assert run_on_ranks(3, _save_and_load_objects, tmp_path) == [[rank, (1, b"x")] for rank in range(3)]
