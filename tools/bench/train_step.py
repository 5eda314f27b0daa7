"""Speed of a training step beside a plain PyTorch GPT of the same shape, as ratios of medians in one run.

    python tools/bench/train_step.py [--size 10m] [--steps 5] [--json FILE] [--skip-parallel]

One rank: the plain step (SDPA, fused AdamW, clip_grad_norm_, equal threads) and ours alternate in one process, so that
both see the same machine. Two ranks: TP2, PP2 and DP2 on one thread each, against one rank on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

# A script's folder is on the path, the package beside it is not unless megalite is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megalite.config.loader import config_from_dict
from megalite.config.schema import Config
from megalite.training.loop import advance
from megalite.training.setup import training_run
from megalite.training.step import train_step

SIZES = {
    "1m": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 1024},
    "10m": {"num_layers": 6, "hidden_size": 320, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 8192},
    "124m": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 512, "vocab_size": 50304},
}
MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 4
GLOBAL_BATCH_SIZE = MICRO_BATCHES * MICRO_BATCH_SIZE
TOPOLOGIES = {"TP2": (2, 1), "PP2": (1, 2), "DP2": (1, 1)}


class PlainBlock(nn.Module):
    """One layer as people write it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, S, H = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, S, H))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 with tied embeddings, without anything parallel."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        hidden = shape["hidden_size"]
        self.tokens = nn.Embedding(shape["vocab_size"], hidden)
        self.positions = nn.Embedding(shape["seq_length"], hidden)
        self.blocks = nn.ModuleList(
            PlainBlock(hidden, shape["num_attention_heads"]) for _ in range(shape["num_layers"])
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def make_config(shape: dict[str, int], bf16: bool, tp: int = 1, pp: int = 1) -> Config:
    """Return a run of ``shape`` without dropout, on mock data."""
    return config_from_dict(
        {
            "model": {**shape, "hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 1},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {
                "micro_batch_size": MICRO_BATCH_SIZE,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "train_iters": 1000,
            },
            "optimizer": {"lr": 1e-4, "lr_decay_style": "constant"},
            "precision": {"bf16": bf16},
            "data": {"mock_data": True, "split": "2,1,997", "tokenizer_type": "NullTokenizer"},
            "logging": {"log_level": "WARNING"},
        },
        "bench",
    )


@contextlib.contextmanager
def our_step(config: Config) -> Iterator[Callable[[], None]]:
    """Give a function that does one of our iterations."""
    with training_run(config) as ctx:
        yield lambda: advance(ctx, train_step(ctx))


def plain_step(shape: dict[str, int], bf16: bool) -> Callable[[], None]:
    """Return a function that does one plain iteration."""
    torch.manual_seed(0)
    model = PlainGPT(shape).to(torch.bfloat16 if bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    text = torch.randint(0, shape["vocab_size"], (MICRO_BATCHES, MICRO_BATCH_SIZE, shape["seq_length"] + 1))

    def step() -> None:
        for batch in text:
            (model(batch[:, :-1], batch[:, 1:]) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Callable[[], None]) -> float:
    """Return the duration of one call."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure_one_rank(shape: dict[str, int], bf16: bool, steps: int, threads: int) -> dict[str, float]:
    """Return median seconds of the plain step and of ours, alternating in this process."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with our_step(make_config(shape, bf16)) as ours:
        torch.set_num_threads(threads)
        plain = plain_step(shape, bf16)
        for step in (plain, ours):
            step()
        times = [(seconds_of(plain), seconds_of(ours)) for _ in range(steps)]
    return {
        name: statistics.median(column)
        for name, column in zip(("plain", "ours"), zip(*times, strict=True), strict=True)
    }


def _rank(rank: int, port: int, config: Config, steps: int, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with our_step(config) as step:
        step()
        times = [seconds_of(step) for _ in range(steps)]
    if rank == 0:
        results.put(statistics.median(times))


def measure_two_ranks(config: Config, steps: int) -> float:
    """Return the median seconds of an iteration on two gloo ranks of one thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, args=(port, config, steps, results), nprocs=2)
    return results.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of both one-rank steps (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--skip-parallel", action="store_true")
    options = parser.parse_args()
    shape = SIZES[options.size]
    tokens = GLOBAL_BATCH_SIZE * shape["seq_length"]
    rows: list[dict[str, Any]] = []
    for bf16 in (False, True):
        dtype = "bf16" if bf16 else "fp32"
        one = measure_one_rank(shape, bf16, options.steps, options.threads)
        rows.append({"run": "plain PyTorch", "dtype": dtype, "tokens_per_s": tokens / one["plain"], "ratio": 1.0})
        ratio = one["plain"] / one["ours"]
        rows.append({"run": "megalite, 1 rank", "dtype": dtype, "tokens_per_s": tokens / one["ours"], "ratio": ratio})
        if options.skip_parallel:
            continue
        for name, (tp, pp) in TOPOLOGIES.items():
            seconds = measure_two_ranks(make_config(shape, bf16, tp, pp), options.steps)
            # Against two ideal ranks: twice the speed of one.
            ratio = one["ours"] / (2 * seconds) if options.threads == 1 else float("nan")
            rows.append({"run": f"megalite, {name}", "dtype": dtype, "tokens_per_s": tokens / seconds, "ratio": ratio})
    step = f"{MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE} x {shape['seq_length']} tokens"
    print(f"{options.size}: {step}, {options.threads} thread(s) a rank, torch {torch.__version__}")
    print(f"{'run':<20} {'dtype':<6} {'tokens/s':>10}  ratio (1 rank: to plain; 2 ranks: to twice 1 rank)")
    for row in rows:
        print(f"{row['run']:<20} {row['dtype']:<6} {row['tokens_per_s']:>10.0f}  {row['ratio']:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"size": options.size, "threads": options.threads, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
