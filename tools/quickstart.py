"""Train a small GPT on real text, stop it, and go on with it on other ranks: three legs, and a table of what happened.

    python tools/quickstart.py [--folder runs/quickstart]

1. makes a corpus from the text of the Python standard library;
2. trains on 4 ranks at TP2 x DP2 and sends SIGTERM to torchrun in mid-run: the ranks save and leave;
3. starts the same command at PP2 x DP2, which resumes, and stops at an iteration;
4. starts it again on one rank, which finishes the run.

Before and after each change a hash of all weights, masters and moments in global coordinates is taken; the status is 0
only if they are equal and the model predicts the text clearly better than the frequencies of its bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# A script's folder is on the path, the package beside it is not unless megalite is installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megalite.data.preprocess import PreprocessOptions, preprocess  # noqa: E402

CORPUS_BYTES = 6_000_000
STOP_AFTER = 180
LEG_SECONDS = 400.0
REQUIRED_GAIN = 0.25
"""The validation loss has to be this part below the entropy of single bytes."""


@dataclass(frozen=True)
class Leg:
    """One start of the same training command."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    signal_at: int | None = None
    """Iteration after which torchrun gets SIGTERM."""


LEGS = (
    Leg("TP2 x DP2", 4, ("--parallel.tensor_model_parallel_size=2",), signal_at=STOP_AFTER),
    Leg("PP2 x DP2", 4, ("--parallel.pipeline_model_parallel_size=2", "--training.exit_interval=350")),
    Leg("1 rank", 1, ()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "quickstart", help="emptied at the start")
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entropy = make_corpus(folder)
    records: list[list[dict[str, Any]]] = []
    for leg in LEGS:
        say(f"\n== {leg.name}: {leg.ranks} rank{'s' * (leg.ranks > 1)}")
        records.append(run_leg(leg, folder))
    return report(records, entropy)


def say(text: str) -> None:
    print(text, flush=True)


def make_corpus(folder: Path) -> float:
    """Write the corpus and its token files; return its byte unigram entropy in nats per byte."""
    sources = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources += sorted(
        path for path in Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py") if "test" not in path.parts
    )
    counts = np.zeros(256, dtype=np.int64)
    documents = 0
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as corpus:
        for path in sources:
            if "site-packages" in path.parts or counts.sum() >= CORPUS_BYTES:
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            counts += np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=256)
            corpus.write(json.dumps({"text": text}) + "\n")
            documents += 1
    options = PreprocessOptions(inputs=(folder / "corpus.jsonl",), output_prefix=folder / "corpus")
    preprocess(options, lambda progress: None)
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * np.log(shares)).sum())
    say(f"corpus: {documents} files of the Python standard library, {counts.sum() / 1e6:.1f} MB")
    return entropy


def run_leg(leg: Leg, folder: Path) -> list[dict[str, Any]]:
    """Run one leg to its end and return the metrics that it wrote."""
    metrics = folder / "checkpoints" / "metrics.jsonl"
    known = len(read_metrics(metrics))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={leg.ranks}"]
    command += [str(ROOT / "train.py"), str(ROOT / "configs" / "gpt2_quickstart.yaml"), *leg.overrides]
    command += [f"--data.data_path={folder / 'corpus'}", f"--checkpoint.save={folder / 'checkpoints'}"]
    say("$ " + " ".join(["torchrun", *command[3:]]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if leg.ranks > 1 else "2"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    deadline = time.monotonic() + LEG_SECONDS
    try:
        if leg.signal_at is not None:
            wait_for_iteration(metrics, leg.signal_at, process, deadline)
            say(f"-- SIGTERM to torchrun after iteration {leg.signal_at}")
            process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=deadline - time.monotonic())
    finally:
        process.kill()
    # torchrun returns 1 when it was signalled itself, whatever its ranks return.
    if status != (1 if leg.signal_at is not None else 0):
        raise SystemExit(f"quickstart: {leg.name} ended with status {status}; its output above says why")
    return read_metrics(metrics)[known:]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be in the middle of being written.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_iteration(metrics: Path, iteration: int, process: subprocess.Popen, deadline: float) -> None:
    while not any(record["iteration"] >= iteration for record in read_metrics(metrics)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"quickstart: iteration {iteration} was not reached; the output above says why")
        time.sleep(0.2)


def report(records: list[list[dict[str, Any]]], entropy: float) -> int:
    """Print the table and return the exit status."""
    columns = ("leg", "iterations", "train loss", "Adam step", "hash loaded", "hash saved", "validation loss")
    rows = [columns]
    loaded, saved, validation = [], [], math.nan
    for leg, metrics in zip(LEGS, records, strict=True):
        steps = [record for record in metrics if "train/loss" in record]
        hashes = {record["checkpoint/event"]: record for record in metrics if "checkpoint/event" in record}
        validation = next((r["eval/loss"] for r in reversed(metrics) if "eval/loss" in r), math.nan)
        loaded.append(hashes.get("loaded", {}).get("checkpoint/state_hash", "-"))
        saved.append(hashes["saved"]["checkpoint/state_hash"])
        rows.append(
            (
                leg.name,
                f"{steps[0]['iteration']}-{steps[-1]['iteration']}",
                f"{steps[0]['train/loss']:.3f} -> {steps[-1]['train/loss']:.3f}",
                f"{hashes.get('loaded', {}).get('optimizer/adam_step', 0)} -> {hashes['saved']['optimizer/adam_step']}",
                loaded[-1],
                saved[-1],
                f"{validation:.3f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    say("")
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    is_equal = loaded[1:] == saved[:-1]
    gain = 1.0 - validation / entropy
    verdict = "equal" if is_equal else "DIFFERENT"
    say(f"\nweights, masters and moments before and after each change of topology: {verdict}")
    say(f"validation loss {validation:.3f} nats per byte, {gain:.0%} below the byte unigram entropy of {entropy:.3f}")
    return 0 if is_equal and gain >= REQUIRED_GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
