"""The rank grid.

Ranks are laid out in the order tp-cp-ep-dp-pp, the leftmost axis varying fastest:

    rank = tp_r + tp * (cp_r + cp * (ep_r + ep * (dp_r + dp * pp_r)))

so the ranks of one tensor-parallel group are neighbours, usually on one node, and pipeline stages are far apart. This
module is the only place that knows the order. ``cp`` and ``ep`` are axes from the start; this version runs them at 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from megalite.parallel.p2p import Channel
from megalite.utils.dist import SINGLE, Group, world_group
from megalite.utils.errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")


def rank_groups(sizes: Mapping[str, int], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the groups of global ranks that vary along ``axes`` and agree on all others.

    Members are ordered by the significance of the axes in the rank order, whatever the order of ``axes``; so in a group
    along dp and cp, cp varies faster. Groups are ordered by their remaining coordinates, the first axis fastest.
    """
    shape = [sizes[axis] for axis in reversed(AXES)]
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    kept = [i for i, axis in enumerate(reversed(AXES)) if axis in axes]
    others = [i for i in range(len(AXES)) if i not in kept]
    width = int(np.prod([shape[i] for i in kept]))
    return [tuple(int(rank) for rank in row) for row in grid.transpose(others + kept).reshape(-1, width)]


@dataclass(frozen=True)
class ParallelState:
    """This process's place in the grid, as one ``Group`` per axis or pair of axes. Built once and passed on."""

    world: Group = SINGLE
    tp: Group = SINGLE
    cp: Group = SINGLE
    ep: Group = SINGLE
    dp: Group = SINGLE
    pp: Group = SINGLE
    dp_cp: Group = SINGLE
    """Ranks with equal weights: gradients are reduced and optimizer state is cut over it."""
    model_parallel: Group = SINGLE
    """Ranks that together hold one copy of the model (tp and pp)."""
    channels: Mapping[Channel, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups over this pipeline, one per direction of travel; none without a pipeline."""
    embedding: Group | None = SINGLE
    """First and last stage of this pipeline, which hold the tied embedding; None on the stages between."""

    @classmethod
    def create(
        cls,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        timeout_minutes: float = 10.0,
    ) -> ParallelState:
        """Build the grid over all ranks. Collective over the world."""
        world = world_group()
        sizes = {
            "tp": tensor_model_parallel_size,
            "cp": context_parallel_size,
            "ep": expert_model_parallel_size,
            "pp": pipeline_model_parallel_size,
        }
        model_ranks = int(np.prod(list(sizes.values())))
        if world.size % model_ranks:
            raise ConfigError(
                f"{world.size} ranks cannot be divided into copies of TP={sizes['tp']} x CP={sizes['cp']} x "
                f"EP={sizes['ep']} x PP={sizes['pp']} = {model_ranks} ranks; start a multiple of {model_ranks} ranks"
            )
        sizes["dp"] = world.size // model_ranks
        timeout = timedelta(minutes=timeout_minutes)
        axes = {axis: _group(rank_groups(sizes, (axis,)), world.rank, timeout) for axis in AXES}
        return cls(
            world=world,
            **axes,
            dp_cp=axes["dp"] if sizes["cp"] == 1 else _group(rank_groups(sizes, ("dp", "cp")), world.rank, timeout),
            model_parallel=_model_parallel_group(sizes, axes, world.rank, timeout),
            channels=_channels(sizes, world.rank, timeout),
            embedding=_embedding_group(sizes, axes["pp"], world.rank, timeout),
        )

    @property
    def topology(self) -> tuple[int, int, int]:
        """(tp, pp, dp), as topologies are written everywhere."""
        return (self.tp.size, self.pp.size, self.dp.size)

    def __str__(self) -> str:
        return f"TP={self.tp.size} PP={self.pp.size} DP={self.dp.size}"


def _group(members: Sequence[tuple[int, ...]], rank: int, timeout: timedelta) -> Group:
    """Create one process group per entry and return this rank's. Collective over the world."""
    mine = SINGLE
    for ranks in members:
        # A group of one needs no handle, and thousands of them would cost start-up time for nothing.
        handle = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(ranks, ranks.index(rank), handle)
    return mine


def _model_parallel_group(sizes: Mapping[str, int], axes: Mapping[str, Group], rank: int, timeout: timedelta) -> Group:
    if sizes["pp"] == 1:
        return axes["tp"]
    if sizes["tp"] == 1:
        return axes["pp"]
    return _group(rank_groups(sizes, ("tp", "pp")), rank, timeout)


def _channels(sizes: Mapping[str, int], rank: int, timeout: timedelta) -> dict[Channel, dist.ProcessGroup]:
    if sizes["pp"] == 1:
        return {}
    members = rank_groups(sizes, ("pp",))
    return {channel: _group(members, rank, timeout).handle for channel in Channel}


def _embedding_group(sizes: Mapping[str, int], pp: Group, rank: int, timeout: timedelta) -> Group | None:
    if sizes["pp"] == 1:
        return Group((rank,))
    if sizes["pp"] == 2:
        return pp
    ends = [(ranks[0], ranks[-1]) for ranks in rank_groups(sizes, ("pp",))]
    group = _group(ends, rank, timeout)
    return group if group.size == 2 else None
