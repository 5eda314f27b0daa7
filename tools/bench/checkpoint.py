"""Saving and loading beside the limits of the device and other libraries, as ratios of medians in one run.

    python tools/bench/checkpoint.py [--size-mb 1000] [--ranks 1 2 4] [--folder /tmp /dev/shm] [--repeat 5] [--json]

Limits: copying the same bytes through an aligned buffer to the device past the page cache, with fsync; reading them in
place from the page cache; copying them into pages that exist. In the first state each way alternates with the others,
so that all see the same machine. CPU seconds are of all ranks, extra memory is that of the rank with most. The states:

* equal parts of every tensor on each rank (bf16 weights, fp32 masters and moments), which every library can express:
  ours, PyTorch DCP, and safetensors and megatron-core where they are installed; "half" loads it on half as many ranks;
* a GPT on (tp, dp), with masters and moments as the blocks that a DistributedOptimizer owns: loaded at the topology it
  was saved at and at others, with the bytes that were read for each byte that was needed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.dist_checkpointing import (
    LoadOptions,
    SaveCache,
    SaveOptions,
    ShardedTensor,
    load,
    save,
    sharded_tensors_of_range,
    write_marker,
)
from megalite.dist_checkpointing.strategies.direct import takes_direct_writes
from megalite.dist_checkpointing.strategies.staging import KeptStaging
from megalite.utils.dist import Group, world_group

WIDTH = 2048
BUFFER = 8 << 20
WORDS = (("w", torch.bfloat16), ("param", torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
BYTES_PER_PARAMETER = 14


def equal_parts(size_mb: int, rank: int, ranks: int) -> dict[str, ShardedTensor]:
    """Return this rank's rows of every tensor."""
    layers = max(1, size_mb * 1_000_000 // BYTES_PER_PARAMETER // WIDTH // WIDTH)
    leaves = {}
    for layer in range(layers):
        for word, dtype in WORDS:
            data = torch.rand(WIDTH // ranks, WIDTH).to(dtype)
            leaves[f"{word}.{layer}"] = ShardedTensor.from_rank_offsets(f"{word}.{layer}", data, (0, rank, ranks))
    return leaves


def gpt_state(size_mb: int, tp: tuple[int, int], dp: tuple[int, int]) -> dict[str, Any]:
    """Return the leaves of a GPT of about this size on one rank; ``tp`` and ``dp`` are (rank, size)."""
    h = 1024
    layers = max(1, size_mb * 1_000_000 // BYTES_PER_PARAMETER // (12 * h * h))
    shapes = {"qkv": ((3 * h, h), 0), "proj": ((h, h), 1), "fc1": ((4 * h, h), 0), "fc2": ((h, 4 * h), 1)}
    shapes |= {"norm": ((h,), None), "proj.bias": ((h,), None)}
    weights = []
    for layer in range(layers):
        for name, (shape, axis) in shapes.items():
            own = tuple(size // tp[1] if at == axis else size for at, size in enumerate(shape))
            places = [(0, layer, layers)] + ([] if axis is None else [(axis + 1, *tp)])
            replica = (0, 0 if axis is not None else tp[0], dp[0])
            block = ShardedTensor.from_rank_offsets
            data = torch.rand(own).bfloat16()
            weights.append(block(f"layers.{name}", data, *places, replica_id=replica, prepend_axis_num=1))
    total = sum(leaf.data.numel() for leaf in weights)
    low, high, position = total * dp[0] // dp[1], total * (dp[0] + 1) // dp[1], 0
    blocks = []
    for leaf in weights:
        start, end = max(low - position, 0), min(high - position, leaf.data.numel())
        position += leaf.data.numel()
        for word, _ in WORDS[1:] if start < end else ():
            flat = torch.rand(end - start)
            blocks += sharded_tensors_of_range(f"optimizer.{word}.{leaf.key}", flat, leaf, start, end)
    return {"weights": weights, "blocks": blocks}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf.data for leaf in (*state["weights"], *state["blocks"])]


# Limits


def raw_write(tensors: list[torch.Tensor], path: Path, is_direct: bool) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if is_direct else 0), 0o600)
    buffer = mmap.mmap(-1, BUFFER)
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    try:
        for tensor in tensors:
            flat = tensor.reshape(-1).view(torch.uint8)
            for first in range(0, len(flat), BUFFER):
                part = flat[first : first + BUFFER]
                view[: len(part)].copy_(part)
                padded = -(-len(part) // 4096) * 4096
                assert os.write(handle, memoryview(buffer)[:padded]) == padded
        os.fsync(handle)
    finally:
        os.close(handle)


def raw_read(tensors: list[torch.Tensor], path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    position = 0
    try:
        for tensor in tensors:
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while rest:
                done = os.preadv(handle, [rest], position)
                rest, position = rest[done:], position + done
    finally:
        os.close(handle)


def into_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(BUFFER):
                    pass


@contextlib.contextmanager
def counting_reads() -> Iterator[list[int]]:
    """Count what is taken from files by position, as our reader does."""
    taken: list[int] = []
    real = os.preadv

    def preadv(*args: Any) -> int:
        done = real(*args)
        taken.append(done)
        return done

    os.preadv = preadv
    try:
        yield taken
    finally:
        os.preadv = real


class Peak:
    """How far the memory of this process rises above where it was."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _memory("VmRSS")

    def rise(self) -> int:
        return _memory("VmHWM") - self.before


def _memory(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


class Bench:
    """One rank's measurements; all ranks do the same things at the same time."""

    def __init__(self, args: argparse.Namespace, folder: str, rank: int, ranks: int) -> None:
        self.args, self.rank, self.ranks, self.group = args, rank, ranks, world_group()
        self.folder = Path(folder) / "megalite_bench"
        self.rows: dict[str, dict[str, list[float]]] = {}

    def timed(self, name: str, body: Callable[[], Any]) -> None:
        self.group.barrier()
        peak, wall, cpu = Peak(), time.perf_counter(), time.process_time()
        body()
        self.group.barrier()
        row = self.rows.setdefault(name, {"seconds": [], "cpu_seconds": [], "extra_mb": []})
        row["seconds"].append(time.perf_counter() - wall)
        row["cpu_seconds"].append(time.process_time() - cpu)
        row["extra_mb"].append(peak.rise() / 1e6)

    def fresh(self, name: str) -> Path:
        path = self.folder / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        self.group.barrier()
        return path

    # Equal parts: every library

    def compare(self) -> None:
        leaves = equal_parts(self.args.size_mb, self.rank, self.ranks)
        tensors = [leaf.data for leaf in leaves.values()]
        self.num_bytes = sum(tensor.nbytes for tensor in tensors) * self.ranks
        cache = SaveCache()
        kept = KeptStaging()
        plain = {f"{name}.{self.rank}": leaf.data for name, leaf in leaves.items()}
        peers = self._peers(leaves, plain)
        for _ in range(self.args.repeat):
            self._staging(tensors, kept)
            raw = self.fresh("raw") / str(self.rank)
            direct = takes_direct_writes(self.folder)
            self.timed("save raw limit", lambda path=raw, d=direct: raw_write(tensors, path, d))
            into_cache(raw.parent)
            self.timed("load raw limit", lambda path=raw: raw_read(tensors, path))
            shutil.rmtree(raw.parent, ignore_errors=True)
            for kind in ("off", "xxh3"):
                path = self.fresh(f"ours_{kind}")
                options = SaveOptions(verify_integrity=kind)
                self.timed(f"save megalite {kind}", lambda p=path, o=options: self._save(leaves, p, o, cache))
                into_cache(path)
                wanted = LoadOptions(verify_integrity=kind)
                self.timed(f"load megalite {kind}", lambda p=path, o=wanted: self._load(leaves, p, o))
                self.drop(path)
            for name, (write, read) in peers.items():
                path = self.fresh(name.replace(" ", "_"))
                self.timed(f"save {name}", lambda p=path, w=write: w(p))
                into_cache(path)
                self.timed(f"load {name}", lambda p=path, r=read: r(p))
                self.drop(path)
        kept.close()

    def drop(self, path: Path) -> None:
        self.group.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.group.barrier()

    def _staging(self, tensors: list[torch.Tensor], kept: KeptStaging) -> None:
        list(kept.stage(tensors))
        flat = torch.frombuffer(mmap.mmap(-1, sum(t.nbytes for t in tensors)), dtype=torch.uint8).fill_(1)

        def copy() -> None:
            position = 0
            for tensor in tensors:
                flat[position : position + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
                position += tensor.nbytes

        self.timed("staging raw limit", copy)
        self.timed("staging megalite", lambda: list(kept.stage(tensors)))
        self.timed("staging clone()", lambda: [tensor.clone() for tensor in tensors])

    def _save(self, leaves: Any, path: Path, options: SaveOptions, cache: SaveCache) -> None:
        save({"leaves": leaves}, path, group=self.group, options=options, cache=cache)
        if self.group.is_first:
            write_marker(path)

    def _load(self, leaves: Any, path: Path, options: LoadOptions) -> None:
        load({"leaves": leaves}, path, group=self.group, options=options)

    def _peers(self, leaves: dict[str, ShardedTensor], plain: dict[str, torch.Tensor]) -> dict[str, tuple]:
        import torch.distributed.checkpoint as dcp

        peers: dict[str, tuple] = {
            "DCP": (lambda path: dcp.save(plain, checkpoint_id=path), lambda path: dcp.load(plain, checkpoint_id=path))
        }
        if importlib.util.find_spec("safetensors"):
            from safetensors.torch import load_file, save_file

            def write(path: Path) -> None:
                save_file(plain, path / f"{self.rank}.safetensors")
                with open(path / f"{self.rank}.safetensors", "rb") as file:
                    os.fsync(file.fileno())

            def read(path: Path) -> None:
                for name, value in load_file(path / f"{self.rank}.safetensors").items():
                    plain[name].copy_(value)

            peers["safetensors"] = (write, read)
        if importlib.util.find_spec("megatron") and not self.args.no_megatron:
            peers["megatron-core"] = self._megatron(leaves)
        return peers

    def _megatron(self, leaves: dict[str, ShardedTensor]) -> tuple:
        from megatron.core import dist_checkpointing, parallel_state

        if not torch.cuda.is_available():
            # It waits for the device and asks for its name, also where there is none.
            torch.cuda.synchronize = lambda *_: None
            torch.cuda.current_device = lambda: torch.device("cpu")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

        def state() -> dict[str, Any]:
            make = dist_checkpointing.ShardedTensor.from_rank_offsets
            return {
                name: make(name, leaf.data, (0, self.rank, self.ranks), replica_id=0) for name, leaf in leaves.items()
            }

        def read(path: Path) -> None:
            for name, value in dist_checkpointing.load(state(), str(path)).items():
                if value.data_ptr() != leaves[name].data.data_ptr():
                    leaves[name].data.copy_(value)

        return (lambda path: dist_checkpointing.save(state(), str(path), validate_access_integrity=False), read)

    # Equal parts on half as many ranks: ours and DCP

    def halve(self) -> None:
        """Save on all ranks, load on the first half of them."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        def as_dtensors(leaves: dict[str, ShardedTensor], ranks: int) -> dict[str, DTensor]:
            mesh = DeviceMesh("cpu", list(range(ranks)))
            members = leaves.items() if self.rank < ranks else ()
            return {name: DTensor.from_local(leaf.data, mesh, [Shard(0)], run_check=False) for name, leaf in members}

        half = self.ranks // 2
        group = self._first(half)
        all_parts = equal_parts(self.args.size_mb, self.rank, self.ranks)
        half_parts = equal_parts(self.args.size_mb, self.rank % half, half)
        saved, wanted = as_dtensors(all_parts, self.ranks), as_dtensors(half_parts, half)
        ours, theirs = self.fresh("half_ours"), self.fresh("half_dcp")
        self._save(all_parts, ours, SaveOptions(verify_integrity="xxh3"), SaveCache())
        dcp.save(saved, checkpoint_id=theirs)
        for _ in range(self.args.repeat):
            for kind in ("off", "xxh3"):
                into_cache(ours)
                options = LoadOptions(verify_integrity=kind)

                def read(options: LoadOptions = options) -> None:
                    if group is not None:
                        load({"leaves": half_parts}, ours, group=group, options=options)

                self.timed(f"load half megalite {kind}", read)
            into_cache(theirs)

            def read_dcp() -> None:
                if group is not None:
                    dcp.load(wanted, checkpoint_id=theirs, process_group=group.handle)

            self.timed("load half DCP", read_dcp)
        self.drop(ours)
        self.drop(theirs)

    # A GPT on (tp, dp): ours at other topologies

    def reshard(self) -> None:
        saved_at = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[self.ranks]
        others = {1: [(1, 1)], 2: [(2, 1), (1, 2), (1, 1)], 4: [(2, 2), (4, 1), (1, 4), (2, 1), (1, 2)]}[self.ranks]
        state = gpt_state(self.args.size_mb, *self._place(saved_at))
        path = self.fresh("gpt")
        self._save(
            state, path, SaveOptions(parallel_group=self._dp_group(saved_at), verify_integrity="xxh3"), SaveCache()
        )
        into_cache(path)
        groups = {ranks: self._first(ranks) for ranks in {tp * dp for tp, dp in others}}
        for topology in others:
            members = topology[0] * topology[1]
            group = groups[members]
            own = gpt_state(self.args.size_mb, *self._place(topology)) if self.rank < members else None
            for kind in ("off", "xxh3"):
                name = f"GPT tp{topology[0]} dp{topology[1]} {kind}"
                for _ in range(self.args.repeat):
                    with counting_reads() as taken:
                        self.timed(f"load {name}", lambda g=group, o=own, k=kind: self._load_gpt(o, path, g, k))
                    if own is not None:
                        needed = sum(tensor.nbytes for tensor in tensors_of(own))
                        self.rows[f"load {name}"].setdefault("read_over_needed", []).append(sum(taken) / needed)
                        self.rows[f"load {name}"].setdefault("needed_gb", []).append(needed / 1e9)
        self.drop(path)

    def _load_gpt(self, state: dict[str, Any] | None, path: Path, group: Group | None, kind: str) -> None:
        if state is not None and group is not None:
            load(dict(state), path, group=group, options=LoadOptions(verify_integrity=kind))

    def _place(self, topology: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        tp, dp = topology
        return (self.rank % tp, tp), (self.rank // tp % dp, dp)

    def _dp_group(self, topology: tuple[int, int]) -> Group | None:
        tp, dp = topology
        if dp == 1:
            return None
        own = None
        for first in range(tp):
            ranks = tuple(range(first, tp * dp, tp))
            handle = dist.new_group(ranks)
            if self.rank in ranks:
                own = Group(ranks, ranks.index(self.rank), handle)
        return own

    def _first(self, count: int) -> Group | None:
        """Return the group of the first ``count`` ranks; collective over all."""
        handle = dist.new_group(list(range(count)))
        return Group(tuple(range(count)), self.rank, handle) if self.rank < count else None

    def _of_all_ranks(self) -> dict[str, dict[str, float]]:
        """Return the medians: sums over the ranks of what they spend, the largest of the rest."""
        own = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in self.rows.items()}
        ranks = self.group.all_gather_object(own)
        combine = {"cpu_seconds": sum, "needed_gb": sum}
        ways: dict[str, dict[str, float]] = {}
        for name in own:
            keys = dict.fromkeys(key for rank in ranks for key in rank[name])
            ways[name] = {
                key: combine.get(key, max)(rank[name][key] for rank in ranks if key in rank[name]) for key in keys
            }
        return ways

    def results(self) -> dict[str, Any]:
        ways = self._of_all_ranks()
        for name, row in ways.items():
            limit = ways.get(f"{name.split()[0]} raw limit")
            if name.startswith("load GPT"):
                row["gb_per_s"] = row["needed_gb"] / row["seconds"]
            elif limit is not None:
                row["of_limit"] = row["seconds"] / limit["seconds"]
                row["gb_per_s"] = self.num_bytes / row["seconds"] / 1e9
        return {"bytes": self.num_bytes, "ranks": self.ranks, "folder": str(self.folder.parent), "ways": ways}


def worker(rank: int, args: argparse.Namespace, folder: str, ranks: int, scratch: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=ranks)
    bench = Bench(args, folder, rank, ranks)
    try:
        bench.compare()
        if ranks > 1:
            bench.halve()
        bench.reshard()
    finally:
        if rank == 0:
            shutil.rmtree(bench.folder, ignore_errors=True)
    results = bench.results()
    if rank == 0:
        Path(scratch, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['bytes'] / 1e9:.2f} GB on {results['ranks']} ranks, {results['folder']}")
    print(f"{'way':28} {'s':>8} {'CPU s':>8} {'GB/s':>8} {'x limit':>8} {'extra MB':>9} {'read/need':>9}")
    for name, row in results["ways"].items():
        columns = ("seconds", "cpu_seconds", "gb_per_s", "of_limit", "extra_mb", "read_over_needed")
        cells = [f"{row[column]:.2f}" if column in row else "" for column in columns]
        print(f"{name:28} " + " ".join(f"{cell:>{9 if at > 3 else 8}}" for at, cell in enumerate(cells)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1000, help="megabytes of the whole state")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--folder", nargs="+", default=["/tmp", "/dev/shm"], help="where to write")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-megatron", action="store_true", help="leave megatron-core out where it is installed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    everything = []
    for folder in args.folder:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as scratch:
                mp.spawn(worker, (args, folder, ranks, scratch), nprocs=ranks)
                everything.append(json.loads(Path(scratch, "results.json").read_text()))
            if not args.json:
                show(everything[-1])
    if args.json:
        print(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
