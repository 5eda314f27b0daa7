"""Run a function on N gloo ranks from inside one test process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports these once; every rank is then a cheap fork of it.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch._dynamo", "megalite.training.loop"])


def _rank_main(rank: int, world_size: int, store: str, func: Callable, args: tuple, results) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        # Pickled here: a queue would pass tensors as handles that die with this process.
        results.put((rank, pickle.dumps(func(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def run_on_ranks(world_size: int, func: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Return what ``func(*args)`` returned on each rank, or raise with the first failing rank's traceback."""
    results = _CONTEXT.Queue()
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _CONTEXT.Process(target=_rank_main, args=(r, world_size, f"{folder}/store", func, args, results))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            while len(values) < world_size:
                try:
                    rank, value, error = results.get(timeout=0.1)
                except queue.Empty:
                    died = {
                        r: p.exitcode for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in values
                    }
                    if died and results.empty():
                        raise AssertionError(f"ranks died without a report, exit codes {died}") from None
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(world_size)) - set(values))
                        raise TimeoutError(f"ranks {missing} did not finish within {timeout:g} s") from None
                    continue
                if error is not None:
                    raise AssertionError(f"rank {rank} of {world_size} failed\n{error}")
                values[rank] = pickle.loads(value)
        finally:
            for process in ranks:
                if len(values) < world_size:
                    process.kill()
                process.join()
    return [values[r] for r in range(world_size)]
