"""megatron-core loads what is saved here, and the other way round is covered by its fixtures."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.dist_checkpointing.serialization import save, write_marker
from megalite.utils.dist import world_group
from tests.helpers.ranks import run_on_ranks

LAYERS, ROWS, COLUMNS = 4, 6, 5
CUTS = [0, 7, 19, 30]
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core, the interop extra"),
]


def _weights():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(LAYERS, ROWS, COLUMNS, generator=generator).bfloat16(), torch.rand(30, generator=generator)


def _save(path):
    group = world_group()
    weights, flat = _weights()
    start, end = CUTS[group.rank : group.rank + 2]
    param = ShardedTensor.from_rank_offsets("x", torch.zeros(ROWS, COLUMNS))
    state = {
        "layers": [
            ShardedTensor.from_rank_offsets("w", weights[i], (0, i, LAYERS), prepend_axis_num=1, replica_id=group.rank)
            for i in range(LAYERS)
        ],
        "blocks": sharded_tensors_of_range("x", flat[start:end], param, start, end),
        "rng": ShardedObject("rng_state", [{"rank": group.rank}], (group.size,), (group.rank,)),
        "iteration": 4,
    }
    save(state, path, group=group, content_metadata={"singleton_local_shards": False})
    if group.is_first:
        write_marker(path)


def _load_with_megatron(path):
    # Its loader asks for the CUDA device even when every tensor is on the CPU.
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *args: None
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping

    group = world_group()
    half = ROWS // 2
    tensor = mapping.ShardedTensor.from_rank_offsets
    request = {
        f"layer{i}": tensor(
            "w", torch.zeros(half, COLUMNS).bfloat16(), (0, i, LAYERS), (1, group.rank, 2), prepend_axis_num=1
        )
        for i in range(LAYERS)
    }
    request["x"] = tensor("x", torch.zeros(half, COLUMNS), (0, group.rank, 2))
    # Its validation wants every cell of the grid to be asked for by some rank.
    for cell in range(group.rank, 3, 2):
        request[f"rng{cell}"] = mapping.ShardedObject("rng_state", None, (3,), (cell,))
    loaded = dist_checkpointing.load(request, str(path))
    weights, flat = _weights()
    rows = slice(group.rank * half, (group.rank + 1) * half)
    assert all(torch.equal(loaded[f"layer{i}"], weights[i, rows]) for i in range(LAYERS))
    assert torch.equal(loaded["x"], flat.view(ROWS, COLUMNS)[rows])
    return loaded[f"rng{group.rank}"], loaded["iteration"]


def test_megatron_loads_blocks_layers_and_objects_on_another_grid(tmp_path):
    run_on_ranks(3, _save, tmp_path)
    assert run_on_ranks(2, _load_with_megatron, tmp_path) == [([{"rank": 0}], 4), ([{"rank": 1}], 4)]
