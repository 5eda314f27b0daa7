"""Saving and loading beside the limits of the device and plain PyTorch DCP, as ratios of medians in one run.

    python tools/bench/checkpoint.py [--size-mb 1000] [--ranks 1] [--repeat 5] [--folder /tmp] [--json]

Every rank holds an equal part of the state: bf16 weights, fp32 masters and moments, as blocks. Limits: copying the
same bytes through an aligned buffer to the device past the page cache, with fsync; reading them in place from the page
cache. Each way alternates with the others, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.dist_checkpointing import LoadOptions, SaveCache, SaveOptions, ShardedTensor, load, save, write_marker
from megalite.dist_checkpointing.strategies.direct import takes_direct_writes
from megalite.utils.dist import world_group

WIDTH = 2048
BUFFER = 8 << 20


def make_state(size_mb: int, rank: int, ranks: int) -> dict[str, ShardedTensor]:
    """Return this rank's blocks of layers: 14 bytes per parameter."""
    rows = max(1, size_mb * 1_000_000 // 14 // WIDTH // WIDTH)
    leaves = {}
    for layer in range(rows):
        for word, dtype in (
            ("w", torch.bfloat16),
            ("param", torch.float32),
            ("m", torch.float32),
            ("v", torch.float32),
        ):
            data = torch.rand(WIDTH, WIDTH).to(dtype)
            leaves[f"{word}.{layer}"] = ShardedTensor.from_rank_offsets(f"{word}.{layer}", data, (0, rank, ranks))
    return leaves


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
                os.write(handle, memoryview(buffer)[: -(-len(part) // 4096) * 4096])
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


class Bench:
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank, self.group = args, rank, world_group()
        self.folder = Path(args.folder) / "megalite_bench"
        self.leaves = make_state(args.size_mb // args.ranks, rank, args.ranks)
        self.tensors = [leaf.data for leaf in self.leaves.values()]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.cache = SaveCache()
        self.times: dict[str, list[tuple[float, float]]] = {}

    def timed(self, name: str, body: Callable[[], Any]) -> None:
        self.group.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        body()
        self.group.barrier()
        self.times.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))

    def fresh(self, name: str) -> Path:
        path = self.folder / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        self.group.barrier()
        return path

    def ours_save(self, kind: str) -> Path:
        path = self.fresh(f"ours_{kind}")
        options = SaveOptions(verify_integrity=kind)
        self.timed(f"save megalite {kind}", lambda: self._save(path, options))
        return path

    def _save(self, path: Path, options: SaveOptions) -> None:
        save(dict(self.leaves), path, group=self.group, options=options, cache=self.cache)
        if self.group.is_first:
            write_marker(path)

    def run(self) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        for _ in range(self.args.repeat):
            raw = self.fresh("raw") / str(self.rank)
            direct = takes_direct_writes(self.folder)
            self.timed("save raw limit", lambda path=raw, d=direct: raw_write(self.tensors, path, d))
            ours = {kind: self.ours_save(kind) for kind in ("off", "xxh3")}
            plain = self.fresh("dcp")
            state = {f"{name}.{self.rank}": leaf.data for name, leaf in self.leaves.items()}
            self.timed("save DCP", lambda s=state, p=plain: dcp.save(s, checkpoint_id=p))
            with open(raw, "rb") as file:
                while file.read(BUFFER):
                    pass
            self.timed("load raw limit", lambda path=raw: raw_read(self.tensors, path))
            for kind, path in ours.items():
                for file in path.glob(f"__{self.rank}_*"):
                    file.read_bytes()
                options = LoadOptions(verify_integrity=kind)
                self.timed(
                    f"load megalite {kind}",
                    lambda p=path, o=options: load(dict(self.leaves), p, group=self.group, options=o),
                )
            for file in plain.glob(f"__{self.rank}_*"):
                file.read_bytes()
            self.timed("load DCP", lambda s=state, p=plain: dcp.load(s, checkpoint_id=p))
        return self.results()

    def results(self) -> dict[str, Any]:
        medians = {
            name: {
                "seconds": statistics.median(w for w, _ in runs),
                "cpu_seconds": statistics.median(c for _, c in runs),
            }
            for name, runs in self.times.items()
        }
        for name, entry in medians.items():
            entry["gb_per_s"] = self.bytes * self.args.ranks / entry["seconds"] / 1e9
            entry["of_limit"] = entry["seconds"] / medians[f"{name.split()[0]} raw limit"]["seconds"]
        return {"bytes": self.bytes * self.args.ranks, "ranks": self.args.ranks, "ways": medians}


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    bench = Bench(args, rank)
    try:
        results = bench.run()
    finally:
        if rank == 0:
            shutil.rmtree(bench.folder, ignore_errors=True)
    if rank == 0:
        show(results, args.json)


def show(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    print(f"{results['bytes'] / 1e9:.2f} GB on {results['ranks']} ranks")
    print(f"{'way':24} {'s':>8} {'CPU s':>8} {'GB/s':>8} {'x limit':>8}")
    for name, entry in results["ways"].items():
        columns = (entry["seconds"], entry["cpu_seconds"], entry["gb_per_s"], entry["of_limit"])
        print(f"{name:24} " + " ".join(f"{value:>8.2f}" for value in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1000, help="bytes of the whole state")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default="/tmp", help="where to write")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    store = f"{args.folder}/megalite_bench_store_{os.getpid()}"
    if args.ranks == 1:
        worker(0, args, store)
    else:
        mp.spawn(worker, (args, store), nprocs=args.ranks)
        Path(store).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
