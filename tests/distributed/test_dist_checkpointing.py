"""Saved on some grid of ranks, loaded on another: the same bits in global coordinates."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megalite.dist_checkpointing.fingerprint import fingerprint, fingerprint_by_key, fingerprint_of_plain
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.dist_checkpointing.serialization import load, load_plain_tensors, save, write_marker
from megalite.utils.dist import world_group
from tests.helpers.ranks import run_on_ranks

LAYERS, ROWS, COLUMNS, VOCABULARY = 4, 8, 6, 24
GRIDS = [(1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 2, 1)]  # tp, pp, dp


def _global(key, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.rand(shape, generator=generator).to(dtype)


WHOLE = {
    "embedding.weight": _global("embedding", (VOCABULARY, COLUMNS), torch.bfloat16),
    "layers.weight": _global("weight", (LAYERS, ROWS, COLUMNS), torch.bfloat16),
    "layers.proj": _global("proj", (LAYERS, COLUMNS, ROWS), torch.bfloat16),
    "layers.fc1": _global("fc1", (LAYERS, 2 * ROWS, COLUMNS), torch.bfloat16),
    "layers.norm": _global("norm", (LAYERS, COLUMNS), torch.bfloat16),
    "count": torch.tensor(7),
}
STATES = {f"state.{key}": _global(key + "state", tuple(value.shape)) for key, value in WHOLE.items() if key != "count"}


class _Grid:
    def __init__(self, grid):
        self.tp, self.pp, self.dp = grid
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.tp_rank, rank = rank % self.tp, rank // self.tp
        self.dp_rank, self.pp_rank = rank % self.dp, rank // self.dp


def _fc1(grid, layer):
    def build(key, data, replica_id):
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part,
                (0, layer, LAYERS),
                (1, grid.tp_rank + side * grid.tp, 2 * grid.tp),
                replica_id=replica_id,
                prepend_axis_num=1,
            )
            for side, part in enumerate(data.chunk(2))
        ]

    return build


def _local(grid, value, axis):
    return value.chunk(grid.tp, axis)[grid.tp_rank].clone().contiguous()


def _parameters(grid, fill):
    """Return the leaves of this rank; their data is the right one with ``fill``, zero without."""

    def data(value):
        return value if fill else torch.zeros_like(value)

    tp, copies = (grid.tp_rank, grid.tp), (0, grid.tp_rank, grid.dp_rank)
    leaves = {"count": ShardedTensor.from_rank_offsets("count", data(WHOLE["count"].clone()), replica_id=dist_rank())}
    # As with tied embeddings, the last stage holds a copy of what the first one owns.
    for stage in {0, grid.pp - 1} & {grid.pp_rank}:
        table = data(_local(grid, WHOLE["embedding.weight"], 0))
        owner = (int(stage > 0), 0, grid.dp_rank)
        leaves["embedding"] = ShardedTensor.from_rank_offsets("embedding.weight", table, (0, *tp), replica_id=owner)
    for layer in range(grid.pp_rank * LAYERS // grid.pp, (grid.pp_rank + 1) * LAYERS // grid.pp):
        place = (0, layer, LAYERS)
        for name, axis in (("weight", 0), ("proj", 1), ("norm", None)):
            value = WHOLE[f"layers.{name}"][layer]
            cut = [] if axis is None else [(axis + 1, *tp)]
            leaves[f"{layer}.{name}"] = ShardedTensor.from_rank_offsets(
                f"layers.{name}",
                data(value.clone() if axis is None else _local(grid, value, axis)),
                place,
                *cut,
                replica_id=copies if axis is None else (0, 0, grid.dp_rank),
                prepend_axis_num=1,
            )
        gate, up = WHOLE["layers.fc1"][layer].chunk(2)
        gated = data(torch.cat([_local(grid, gate, 0), _local(grid, up, 0)]))
        leaves[f"{layer}.fc1"] = ShardedTensorFactory(
            "layers.fc1", gated, _fc1(grid, layer), torch.cat, (0, 0, grid.dp_rank)
        )
    return leaves


def dist_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _optimizer(grid, parameters, fill):
    """Return blocks of the flat ranges that this data-parallel rank owns; ranges cut through rows."""
    leaves = []
    for name, leaf in parameters.items():
        if name == "count":
            continue
        numel = leaf.data.numel()
        cuts = [numel * rank // grid.dp for rank in range(grid.dp + 1)]
        start, end = cuts[grid.dp_rank], cuts[grid.dp_rank + 1]
        flat = torch.zeros(end - start)
        blocks = sharded_tensors_of_range(f"state.{leaf.key}", flat, leaf, start, end)
        for block in blocks:
            if fill:
                block.global_data.copy_(_expected(STATES[block.key], block))
        leaves += blocks
    return leaves


def _expected(whole, leaf):
    for axis, (start, size) in enumerate(zip(leaf.global_offset, leaf.chunk_shape, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole


def _state(grid, fill):
    parameters = _parameters(grid, fill)
    rng = ShardedObject("rng", {"rank": dist_rank()}, (grid.pp, grid.tp), (grid.pp_rank, grid.tp_rank), grid.dp_rank)
    return {
        "model": parameters,
        "optimizer": {"blocks": _optimizer(grid, parameters, fill)},
        "rng": rng,
        "iteration": 5,
    }


def _save(path, shape):
    group = world_group()
    state = _state(_Grid(shape), fill=True)
    save(state, path, group=group, content_metadata={"kind": "test"})
    if group.is_first:
        write_marker(path)
    return fingerprint(state, group), fingerprint_by_key(state, group)


def _load(path, shape):
    group = world_group()
    grid = _Grid(shape)
    request = _state(grid, fill=False)
    request["rng"] = None
    result = load(request, path, group=group, ignore_keys=lambda key: key.startswith("rng/"))
    expected = _parameters(grid, fill=True)
    wrong = [name for name, leaf in expected.items() if not torch.equal(result["model"][name], leaf.data)]
    for block in request["optimizer"]["blocks"]:
        if not torch.equal(block.global_data, _expected(STATES[block.key], block)):
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
