"""A small sharded state on a grid of (tp, pp, dp) ranks, whose true values every test knows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.utils.dist import SINGLE, Group

LAYERS, ROWS, COLUMNS, VOCABULARY = 4, 8, 6, 24
GRIDS = [(1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 2, 1)]  # tp, pp, dp


def _values(key, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.rand(shape, generator=generator).to(dtype)


WHOLE = {
    "embedding.weight": _values("embedding", (VOCABULARY, COLUMNS), torch.bfloat16),
    "layers.weight": _values("weight", (LAYERS, ROWS, COLUMNS), torch.bfloat16),
    "layers.proj": _values("proj", (LAYERS, COLUMNS, ROWS), torch.bfloat16),
    "layers.fc1": _values("fc1", (LAYERS, 2 * ROWS, COLUMNS), torch.bfloat16),
    "layers.norm": _values("norm", (LAYERS, COLUMNS), torch.bfloat16),
    "count": torch.tensor(7),
}
STATES = {f"state.{key}": _values(key + "state", tuple(value.shape)) for key, value in WHOLE.items() if key != "count"}


class Grid:
    def __init__(self, grid):
        self.tp, self.pp, self.dp = grid
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.tp_rank, rank = rank % self.tp, rank // self.tp
        self.dp_rank, self.pp_rank = rank % self.dp, rank // self.dp

    def dp_group(self):
        """Return the group of ranks that hold copies of each other. Collective over the world."""
        own = SINGLE
        for first in range(self.tp * self.pp):
            tp_rank, pp_rank = first % self.tp, first // self.tp
            ranks = [tp_rank + self.tp * (dp_rank + self.dp * pp_rank) for dp_rank in range(self.dp)]
            handle = dist.new_group(ranks) if self.dp > 1 else None
            if (tp_rank, pp_rank) == (self.tp_rank, self.pp_rank):
                own = Group(tuple(ranks), self.dp_rank, handle)
        return own


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


def parameters_of(grid, fill):
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


def optimizer_of(grid, parameters, fill):
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
                block.global_data.copy_(block_of(STATES[block.key], block))
        leaves += blocks
    return leaves


def block_of(whole, leaf):
    for axis, (start, size) in enumerate(zip(leaf.global_offset, leaf.chunk_shape, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole


def state_of(grid, fill):
    parameters = parameters_of(grid, fill)
    rng = ShardedObject("rng", {"rank": dist_rank()}, (grid.pp, grid.tp), (grid.pp_rank, grid.tp_rank), grid.dp_rank)
    return {
        "model": parameters,
        "optimizer": {"blocks": optimizer_of(grid, parameters, fill)},
        "rng": rng,
        "iteration": 5,
    }
