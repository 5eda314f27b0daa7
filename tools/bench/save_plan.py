"""What planning a save costs, by arithmetic alone: the plans of all ranks of a large job, made in one process.

A GPT of the given shape is laid out on (tp, pp, dp); every rank's declaration is turned into the arrays that a save
exchanges. Printed are the time of a rank's own plan, of dealing out replicas in one data-parallel group, of bringing
all plans together and checking them, of building the index, and what is left when nothing changed; and how much the
busiest rank of a group writes against the group's mean.

    python tools/bench/save_plan.py --tp 2 --pp 2 --dp 64
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.dist_checkpointing import ShardedTensor, sharded_tensors_of_range
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.fully_parallel import deal_out, describe
from megalite.dist_checkpointing.strategies.index_writer import IndexWriter
from megalite.dist_checkpointing.strategies.planning import merge_plans, plan_local_save, structure_digest
from megalite.dist_checkpointing.validation import check_exactly_once
from megalite.utils.errors import SaveError

FRAMING = TorchSaveFraming()


def parameters(args: argparse.Namespace, tp_rank: int, pp_rank: int) -> list[ShardedTensor]:
    """Return the weights of one (tp, pp) cell without memory, as main replicas of data-parallel rank 0."""
    h, layers = args.hidden_size, args.num_layers
    tp = (tp_rank, args.tp)
    cut = {"qkv": ((3 * h // args.tp, h), 0), "proj": ((h, h // args.tp), 1)}
    cut |= {"fc1": ((4 * h // args.tp, h), 0), "fc2": ((h, 4 * h // args.tp), 1)}
    cut |= {"qkv.bias": ((3 * h // args.tp,), 0), "fc1.bias": ((4 * h // args.tp,), 0)}
    cut |= {name: ((h,), None) for name in ("norm1", "norm1.bias", "norm2", "norm2.bias", "proj.bias", "fc2.bias")}
    leaves = []
    for layer in range(pp_rank * layers // args.pp, (pp_rank + 1) * layers // args.pp):
        for name, (shape, axis) in cut.items():
            places = [(0, layer, layers)] + ([] if axis is None else [(axis + 1, *tp)])
            replica = (0, 0 if axis is not None else tp_rank, 0)
            leaves.append(_weight(f"decoder.layers.{name}", shape, places, replica, prepend=1))
    if pp_rank == 0:
        leaves.append(_weight("embedding", (args.vocab_size // args.tp, h), [(0, *tp)], (0, 0, 0)))
    return leaves


def _weight(
    key: str, shape: tuple[int, ...], places: list[tuple[int, int, int]], replica: tuple[int, ...], prepend: int = 0
) -> ShardedTensor:
    data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return ShardedTensor.from_rank_offsets(key, data, *places, replica_id=replica, prepend_axis_num=prepend)


def optimizer_blocks(args: argparse.Namespace, weights: list[ShardedTensor], dp_rank: int) -> list[ShardedTensor]:
    """Return the blocks of masters and moments that a data-parallel rank owns: an equal flat part of all weights."""
    total = sum(leaf.data.numel() for leaf in weights)
    low, high = total * dp_rank // args.dp, total * (dp_rank + 1) // args.dp
    blocks, position = [], 0
    for leaf in weights:
        start, end = max(low - position, 0), min(high - position, leaf.data.numel())
        position += leaf.data.numel()
        if start < end:
            flat = torch.empty(end - start, device="meta")
            for word in ("param", "exp_avg", "exp_avg_sq"):
                blocks += sharded_tensors_of_range(f"optimizer.state.{word}.{leaf.key}", flat, leaf, start, end)
    return blocks


def timed(results: dict[str, Any], name: str, body: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    value = body()
    results.setdefault(name, []).append(time.perf_counter() - started)
    return value


def measure(args: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    plans, ratios = [], []
    for pp_rank in range(args.pp):
        for tp_rank in range(args.tp):
            weights = parameters(args, tp_rank, pp_rank)
            members = []
            for dp_rank in range(args.dp):
                copies = weights if dp_rank == 0 else [_copy(leaf, dp_rank) for leaf in weights]
                members.append([*copies, *optimizer_blocks(args, weights, dp_rank)])
            holdings = [timed(times, "describe one rank", lambda own=own: describe(own, FRAMING)) for own in members]
            shares = timed(times, "deal out one group", lambda held=holdings: deal_out(held))
            written = []
            for dp_rank, (own, share) in enumerate(zip(members, shares, strict=True)):
                blocks = [own[block].rows(first, end) for block, first, end, _ in share.tolist()]
                rank = tp_rank + args.tp * (dp_rank + args.dp * pp_rank)
                plan = timed(times, "plan one rank", lambda b=blocks, r=rank: plan_local_save(b, [], r, FRAMING))
                plans.append(plan)
                written.append(int(plan.lengths.sum()))
            ratios.append(max(written) / statistics.mean(written))
            leaves = ShardedLeaves({"leaves": members[0]})
            timed(times, "digest one rank (unchanged structure)", lambda own=leaves: structure_digest(own))
    merged = timed(times, "merge all plans", lambda: merge_plans(plans, range(len(plans))))
    timed(times, "check exactly once", lambda: check_exactly_once(merged.blocks, str, "written", SaveError))
    index = timed(times, "build the index", lambda: IndexWriter(merged))
    content = timed(times, "write the index", lambda: index.content([[] for _ in plans], "x"))
    return {
        "ranks": len(plans),
        "blocks": len(merged.blocks),
        "index_bytes": len(content),
        "plan_bytes_per_rank": int(np.mean([len(pickle.dumps(plan)) for plan in plans[:8]])),
        "busiest_rank_over_mean": max(ratios),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }


def _copy(leaf: ShardedTensor, dp_rank: int) -> ShardedTensor:
    replica = (*leaf.replica_id[:2], dp_rank)
    block = ShardedTensor.from_block
    return block(leaf.key, leaf.data, leaf.global_shape, leaf.global_offset, replica, leaf.prepend_axis_num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tp", 2), ("pp", 2), ("dp", 64), ("hidden-size", 4096), ("num-layers", 36)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab-size", type=int, default=51200)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results = measure(args)
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for name, value in results.items():
        if name != "seconds":
            print(f"{name:40} {value:>14,.4f}" if isinstance(value, float) else f"{name:40} {value:>14,}")
    for name, value in results["seconds"].items():
        print(f"{name:40} {value * 1e3:>11,.2f} ms")


if __name__ == "__main__":
    main()
