"""What planning a save costs, by arithmetic alone: the plans of all ranks of a large job, made in one process.

A GPT is laid out on (tp, pp, dp); every rank's declaration is turned into the arrays that a save exchanges. Printed are
the time of a rank's own plan, of dealing out replicas in one data-parallel group, of bringing all plans together,
checking them and making the index on the first rank, and what is left when nothing changed; the bytes of messages and
of the index, and how much the busiest rank writes against the mean. Beside it stands PyTorch DCP on the same blocks,
with the garbage collector on and off, each in a process of its own.

    python tools/bench/planning.py [--job 7b-256 70b-2048 70b-16384] [--no-dcp] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.dist_checkpointing import ShardedTensor, sharded_tensors_of_range
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.base import SavePlan
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.fully_parallel import deal_out, describe
from megalite.dist_checkpointing.strategies.index import check_index, parse_index
from megalite.dist_checkpointing.strategies.index_writer import IndexWriter
from megalite.dist_checkpointing.strategies.planning import merge_plans, plan_local_save, structure_digest
from megalite.dist_checkpointing.validation import check_exactly_once
from megalite.utils.errors import SaveError

FRAMING = TorchSaveFraming()


@dataclass(frozen=True)
class Job:
    """A GPT with tied embeddings and ffn 4h on a grid of ranks."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    tp: int
    pp: int
    dp: int


JOBS = {
    "7b-256": Job(4096, 36, 51200, tp=2, pp=2, dp=64),
    "70b-2048": Job(8192, 88, 128256, tp=8, pp=8, dp=32),
    "70b-16384": Job(8192, 88, 128256, tp=8, pp=8, dp=256),
}


def parameters(job: Job, tp_rank: int, pp_rank: int) -> list[ShardedTensor]:
    """Return the weights of one (tp, pp) cell without memory, as main replicas of data-parallel rank 0."""
    h, layers = job.hidden_size, job.num_layers
    tp = (tp_rank, job.tp)
    cut = {"qkv": ((3 * h // job.tp, h), 0), "proj": ((h, h // job.tp), 1)}
    cut |= {"fc1": ((4 * h // job.tp, h), 0), "fc2": ((h, 4 * h // job.tp), 1)}
    cut |= {"qkv.bias": ((3 * h // job.tp,), 0), "fc1.bias": ((4 * h // job.tp,), 0)}
    cut |= {name: ((h,), None) for name in ("norm1", "norm1.bias", "norm2", "norm2.bias", "proj.bias", "fc2.bias")}
    leaves = []
    for layer in range(pp_rank * layers // job.pp, (pp_rank + 1) * layers // job.pp):
        for name, (shape, axis) in cut.items():
            places = [(0, layer, layers)] + ([] if axis is None else [(axis + 1, *tp)])
            replica = (0, 0 if axis is not None else tp_rank, 0)
            leaves.append(_weight(f"decoder.layers.{name}", shape, places, replica, prepend=1))
    if pp_rank == 0:
        leaves.append(_weight("embedding", (job.vocab_size // job.tp, h), [(0, *tp)], (0, 0, 0)))
    return leaves


def _weight(
    key: str, shape: tuple[int, ...], places: list[tuple[int, int, int]], replica: tuple[int, ...], prepend: int = 0
) -> ShardedTensor:
    data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return ShardedTensor.from_rank_offsets(key, data, *places, replica_id=replica, prepend_axis_num=prepend)


def optimizer_blocks(job: Job, weights: list[ShardedTensor], dp_rank: int) -> list[ShardedTensor]:
    """Return the blocks of masters and moments that a data-parallel rank owns: an equal flat part of all weights."""
    total = sum(leaf.data.numel() for leaf in weights)
    low, high = total * dp_rank // job.dp, total * (dp_rank + 1) // job.dp
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


def measure(job: Job, with_dcp: bool) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    plans, ratios, written_bytes = [], [], []
    for pp_rank in range(job.pp):
        for tp_rank in range(job.tp):
            weights = parameters(job, tp_rank, pp_rank)
            members = []
            for dp_rank in range(job.dp):
                copies = weights if dp_rank == 0 else [_copy(leaf, dp_rank) for leaf in weights]
                members.append([*copies, *optimizer_blocks(job, weights, dp_rank)])
            holdings = [timed(times, "describe one rank", lambda own=own: describe(own, FRAMING)) for own in members]
            shares = timed(times, "deal out one group", lambda held=holdings: deal_out(held))
            written = []
            for dp_rank, (own, share) in enumerate(zip(members, shares, strict=True)):
                blocks = [own[block].rows(first, end) for block, first, end, _ in share.tolist()]
                rank = tp_rank + job.tp * (dp_rank + job.dp * pp_rank)
                plan = timed(times, "plan one rank", lambda b=blocks, r=rank: plan_local_save(b, [], r, FRAMING))
                plans.append(plan)
                written.append(int(plan.lengths.sum()))
            ratios.append(max(written) / statistics.mean(written))
            written_bytes += written
            leaves = ShardedLeaves({"leaves": members[0]})
            timed(times, "digest one rank (unchanged structure)", lambda own=leaves: structure_digest(own))
    # What takes a minute needs no repetition; what takes milliseconds does.
    repeat = 1 if len(plans) > 1000 else 5
    results = {
        "ranks": len(plans),
        "blocks": sum(len(plan.lengths) for plan in plans),
        "bytes_per_rank": [min(written_bytes), statistics.mean(written_bytes), max(written_bytes)],
        "busiest_rank_over_its_group_mean": max(ratios),
        "busiest_rank_over_mean": max(written_bytes) / statistics.mean(written_bytes),
        "plan_bytes_per_rank": int(np.mean([len(pickle.dumps(plan)) for plan in plans[:8]])),
        "unchanged_bytes_per_rank": UNCHANGED_MESSAGE,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ours": in_a_child(lambda: ours_on_first_rank(plans), repeat),
    }
    if with_dcp:
        results["DCP, collector on"] = in_a_child(lambda: dcp_on_first_rank(plans, collect=True), repeat)
        results["DCP, collector off"] = in_a_child(lambda: dcp_on_first_rank(plans, collect=False), repeat)
        results["plan_bytes_per_rank_dcp"] = int(np.mean([len(pickle.dumps(p)) for p in dcp_plans(plans[:8])]))
    return results


UNCHANGED_MESSAGE = 3 * 8
"""Three numbers of a rank say that its structure and its plain values are those of the save before."""


def ours_on_first_rank(plans: Sequence[SavePlan]) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    merged = timed(times, "merge all plans", lambda: merge_plans(plans, range(len(plans))))
    timed(times, "check exactly once", lambda: check_exactly_once(merged.blocks, str, "written", SaveError))
    index = timed(times, "make the index", lambda: IndexWriter(merged))
    lengths: list[list[int]] = [[] for _ in plans]
    content = timed(times, "write the index", lambda: index.content(lengths, Path("x")))
    parsed = timed(times, "read the index", lambda: parse_index(content, "x"))
    timed(times, "check the index", lambda: check_index(parsed, "x"))
    seconds = {name: values[0] for name, values in times.items()}
    seconds["plan on the first rank"] = sum(list(seconds.values())[:3])
    return seconds | {"index bytes": len(content)}


def dcp_plans(plans: Sequence[SavePlan]) -> list[Any]:
    """Return the same blocks as DCP's plans."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    translated = []
    for plan in plans:
        items = []
        for block, key in enumerate(plan.blocks.key_of.tolist()):
            offset, sizes = map(torch.Size, plan.blocks.rectangle(block))
            data = TensorWriteData(
                chunk=dcp.ChunkStorageMetadata(offset, sizes),
                properties=dcp.TensorProperties(dtype=plan.blocks.dtypes[key]),
                size=torch.Size(plan.blocks.shapes[key]),
            )
            index = dcp.MetadataIndex(plan.blocks.keys[key], offset)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        translated.append(DcpPlan(items))
    return translated


def dcp_on_first_rank(plans: Sequence[SavePlan], collect: bool) -> dict[str, float]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

    times: dict[str, list[float]] = {}
    translated = dcp_plans(plans)
    (gc.enable if collect else gc.disable)()
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=False)
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = timed(times, "plan on the first rank", lambda: planner.create_global_plan(translated))

    def write() -> bytes:
        # As its writer does: a place for each item, then one pickle.
        metadata.storage_data = {
            item.index: _StorageInfo(own.files[0], start, length)
            for plan, own in zip(translated, plans, strict=True)
            for item, start, length in zip(plan.items, own.starts.tolist(), own.lengths.tolist(), strict=True)
        }
        return pickle.dumps(metadata)

    content = timed(times, "write the index", write)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".metadata").write_bytes(content)
        timed(times, "read the index", lambda: FileSystemReader(folder).read_metadata())
    gc.enable()
    return {name: values[0] for name, values in times.items()} | {"index bytes": len(content)}


def in_a_child(body: Callable[[], dict[str, float]], repeat: int) -> dict[str, float]:
    """Return the medians of what ``body`` measures in a process that has this one's memory, and how much more it
    took."""
    context = torch.multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child() -> None:
        # Imports are no part of planning; what is imported already is shared.
        import torch.distributed.checkpoint  # noqa: F401

        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        runs = [body() for _ in range(repeat)]
        measured = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        results.put(measured | {"peak memory, MB": (_memory("VmHWM") - before) / 1e6})

    process = context.Process(target=child)
    process.start()
    # What it measured is a few numbers, which a pipe holds until they are fetched.
    process.join()
    if process.exitcode:
        raise SystemExit(f"a measuring process ended with status {process.exitcode}")
    return results.get()


def _memory(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def _copy(leaf: ShardedTensor, dp_rank: int) -> ShardedTensor:
    replica = (*leaf.replica_id[:2], dp_rank)
    block = ShardedTensor.from_block
    return block(leaf.key, leaf.data, leaf.global_shape, leaf.global_offset, replica, leaf.prepend_axis_num)


def show(name: str, results: dict[str, Any]) -> None:
    print(f"\n{name}: {results['ranks']:,} ranks, {results['blocks']:,} blocks")
    least, mean, most = results["bytes_per_rank"]
    print(
        f"  bytes per rank {least / 1e6:,.1f} / {mean / 1e6:,.1f} / {most / 1e6:,.1f} MB (min / mean / max); ", end=""
    )
    print(
        f"max/mean {results['busiest_rank_over_mean']:.3f} over all, "
        f"{results['busiest_rank_over_its_group_mean']:.3f} in its data-parallel group"
    )
    peer = f", DCP {results['plan_bytes_per_rank_dcp']:,}" if "plan_bytes_per_rank_dcp" in results else ""
    print(f"  message of a rank: {results['plan_bytes_per_rank']:,} bytes{peer}")
    print(f"  message of a rank whose structure is unchanged: {UNCHANGED_MESSAGE} bytes, by construction")
    for step, value in results["seconds"].items():
        print(f"  {step:42} {value * 1e3:>12,.2f} ms")
    columns = [column for column in ("ours", "DCP, collector on", "DCP, collector off") if column in results]
    print(f"  {'on the first rank':30}" + "".join(f"{column:>20}" for column in columns))
    for step in results["ours"]:
        cells = [results[column].get(step) for column in columns]
        unit = "" if "bytes" in step or "MB" in step else " s"
        shown = ["" if cell is None else f"{cell:,.0f}" if not unit else f"{cell:,.3f}" for cell in cells]
        print(f"  {step + unit:30}" + "".join(f"{cell:>20}" for cell in shown))
    if len(columns) > 1:
        ratio = results[columns[1]]["plan on the first rank"] / results["ours"]["plan on the first rank"]
        print(f"  planning on the first rank: DCP takes {ratio:,.0f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS), help="which jobs to plan")
    parser.add_argument("--no-dcp", action="store_true", help="leave PyTorch DCP out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results = {}
    for name in args.job:
        results[name] = measure(JOBS[name], with_dcp=not args.no_dcp)
        if not args.json:
            show(name, results[name])
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
