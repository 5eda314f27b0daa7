"""Start ``torchrun train.py`` as a user does, signal parts of it, and see what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.rank_main import FAULT, FOLDER, REPOSITORY

RANK_MAIN = REPOSITORY / "tests" / "helpers" / "rank_main.py"
START_TIMEOUT = 120.0
"""Starting takes seconds, and much longer on a machine that others use too."""

TINY = (
    str(REPOSITORY / "configs" / "gpt2_tiny.yaml"),
    "--data.split=2,1,997",
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.seq_length=16",
    "--training.global_batch_size=4",
    "--optimizer.lr_decay_style=constant",
    "--optimizer.lr_warmup_iters=0",
    "--checkpoint.save_interval=null",
)
"""A run whose iterations take a few hundredths of a second; it saves when it ends or is asked to, and its schedule fits
any length."""


@dataclass(frozen=True)
class Finished:
    """What is known of a job when its first process has ended."""

    status: int
    """Of torchrun, or of the only rank without it; negative is the number of a signal."""
    output: str
    """Of torchrun itself."""
    rank_statuses: dict[int, int]
    """Of the ranks that ended by themselves; one that a signal has ended is missing."""
    num_gloo_threads: dict[int, int]
    """Threads of process groups that a rank that ended by itself had left: they can abort the process at its end."""
    stderr: dict[int, str]
    """Of each rank."""

    def __str__(self) -> str:
        ranks = [f"--- rank {rank}\n{text}" for rank, text in self.stderr.items()]
        return "\n".join([f"status {self.status}, ranks {self.rank_statuses}", self.output, *ranks])

    @property
    def stopped_at(self) -> tuple[int, str]:
        """The iteration and the reason that the last line of rank 0 states."""
        found = re.findall(r"^stopped at iteration (\d+): (.*)$", self.stderr[0], re.MULTILINE)
        assert len(found) == 1, f"rank 0 did not say once where it stopped:\n{self.stderr[0]}"
        return int(found[0][0]), found[0][1]

    def errors(self, rank: int) -> list[str]:
        """The ERROR messages of a rank."""
        return re.findall(rf"^\[rank {rank}\] ERROR: (.*)$", self.stderr[rank], re.MULTILINE)


class Job:
    """A running ``train.py`` on ``num_ranks`` ranks under torchrun, or without torchrun on one.

    A context manager that leaves no process behind. ``fault`` is a name in ``rank_main`` and ``@`` with a rank.
    """

    def __init__(
        self, folder: Path, *arguments: str, num_ranks: int = 2, launcher: bool = True, fault: str = ""
    ) -> None:
        self.folder = folder
        self.num_ranks = num_ranks
        self._has_launcher = launcher
        folder.mkdir(parents=True)
        command = [str(RANK_MAIN), *arguments]
        if launcher:
            options = ["--nnodes=1", f"--nproc-per-node={num_ranks}", "--max-restarts=0", "--monitor-interval=0.1"]
            # A port that is free, chosen by the rendezvous itself.
            options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            options += ["--redirects=3", f"--log-dir={folder / 'logs'}"]
            command = ["-m", "torch.distributed.run", *options, *command]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", FOLDER: str(folder), FAULT: fault}
        with open(folder / "output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in {self._process.pid, *self.processes()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process that a scheduler would start: torchrun, or the only rank without it."""
        return self._process.pid

    def processes(self) -> list[int]:
        """Processes of this job that still run, known by a variable in their environment."""
        marker = f"{FOLDER}={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            # Gone meanwhile, or of another user.
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = START_TIMEOUT) -> None:
        """Return when ``condition`` holds; raise if the job ends before, or the time is over."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._process.poll() is not None and not condition():
                raise AssertionError(f"the job ended before {what}\n{self._everything()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout:g} s\n{self._everything()}")
            time.sleep(0.02)

    def wait_for_iteration(self, iteration: int, save: Path) -> None:
        """Return when ``metrics.jsonl`` has the iteration."""
        self.wait_until(lambda: max(losses(save), default=0) >= iteration, f"iteration {iteration}")

    def wait_for_line(self, text: str, rank: int = 0) -> None:
        """Return when the rank has written ``text`` to its standard error."""
        self.wait_until(lambda: text in self._stderr(rank), f"{text!r} of rank {rank}")

    def rank_pid(self, rank: int) -> int:
        """Process number of a rank; waits until it has started."""
        path = self.folder / f"pid.{rank}"
        self.wait_until(path.exists, f"start of rank {rank}")
        return int(path.read_text())

    def rank_pids(self) -> list[int]:
        return [self.rank_pid(rank) for rank in range(self.num_ranks)]

    def finish(self, timeout: float = START_TIMEOUT) -> Finished:
        """Return what is known when the first process has ended."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job did not end within {timeout:g} s\n{self._everything()}") from None
        return self._finished(status)

    def wait_until_gone(self, timeout: float = 15.0) -> Finished:
        """Return when no process of the job is left, the first one included."""
        deadline = time.monotonic() + timeout
        while self._process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there after {timeout:g} s: {self.processes()}\n{self._everything()}")
            time.sleep(0.05)
        return self._finished(self._process.returncode)

    def _finished(self, status: int) -> Finished:
        statuses, threads = self._noted("status"), self._noted("threads")
        stderr = {rank: self._stderr(rank) for rank in range(self.num_ranks)}
        return Finished(status, (self.folder / "output").read_text(errors="replace"), statuses, threads, stderr)

    def _noted(self, name: str) -> dict[int, int]:
        paths = {rank: self.folder / f"{name}.{rank}" for rank in range(self.num_ranks)}
        return {rank: int(path.read_text()) for rank, path in paths.items() if path.exists()}

    def _stderr(self, rank: int) -> str:
        if not self._has_launcher:
            return (self.folder / "output").read_text(errors="replace")
        logs = sorted(self.folder.glob(f"logs/*/attempt_0/{rank}/stderr.log"))
        return logs[0].read_text(errors="replace") if logs else ""

    def _everything(self) -> str:
        parts = [f"--- output\n{(self.folder / 'output').read_text(errors='replace')}"]
        if self._has_launcher:
            parts += [f"--- rank {rank}\n{self._stderr(rank)}" for rank in range(self.num_ranks)]
        return "\n".join(parts)


def losses(save: Path) -> dict[int, float]:
    """Return the loss of each iteration in ``metrics.jsonl``, each of which must be there once."""
    found: dict[int, float] = {}
    path = save / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in lines:
        entry = json.loads(line)
        if "train/loss" in entry:
            assert entry["iteration"] not in found, f"iteration {entry['iteration']} is there twice"
            found[entry["iteration"]] = entry["train/loss"]
    return found


def run_job(folder: Path, arguments: Sequence[str], *, num_ranks: int = 1, **options: object) -> Finished:
    """Run a job to its end and return what is known of it; one rank runs without torchrun."""
    with Job(folder, *arguments, num_ranks=num_ranks, launcher=num_ranks > 1, **options) as job:
        return job.finish()
