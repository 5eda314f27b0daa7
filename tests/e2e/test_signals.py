"""A run that is asked to stop saves what it has, says so, and leaves nothing behind. See docs/signals.md."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.paths import complete_iterations, iteration_folder, read_tracker
from megalite.config.cli import parse_command_line
from megalite.training.setup import training_run
from tests.helpers.torchrun import TINY, Finished, Job, losses, run_job

LONG = ("--training.train_iters=100000",)
SIGNAL = "asked by a signal"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


def _running(tmp_path: Path, *arguments: str, **options: object) -> Job:
    return Job(tmp_path / "job", *TINY, *LONG, f"--checkpoint.save={tmp_path / 'run'}", *arguments, **options)


def _assert_whole(save: Path, iteration: int) -> None:
    """One checkpoint is there, it is published, and weights, moments and progress load from it."""
    assert read_tracker(save) == iteration
    assert complete_iterations(save) == [iteration]
    assert [path.name for path in save.glob("iter_*")] == [iteration_folder(save, iteration).name]
    config = parse_command_line([*TINY, *LONG, "--checkpoint.save=null", f"--checkpoint.load={save}"]).config
    threads = torch.get_num_threads()
    with training_run(config) as ctx:
        assert ctx.progress.iteration == ctx.state.optimizer.num_steps == iteration
        assert ctx.progress.consumed_train_samples == 4 * iteration
    torch.set_num_threads(threads)


def _assert_saved_and_left(result: Finished, save: Path, status: int, num_ranks: int = 2) -> None:
    assert result.status == status, str(result)
    assert result.rank_statuses == {rank: 0 for rank in range(num_ranks)}
    assert not any(result.num_gloo_threads.values())
    iteration, reason = result.stopped_at
    assert reason == SIGNAL
    assert iteration == max(losses(save))
    for stderr in result.stderr.values():
        assert f"saving iteration {iteration} and leaving" in stderr
        assert "Traceback" not in stderr
    _assert_whole(save, iteration)


def _to_torchrun(number: int) -> Callable[[Job], None]:
    return lambda job: os.kill(job.pid, number)


def _to_ranks(*ranks: int, number: int = signal.SIGTERM) -> Callable[[Job], None]:
    def send(job: Job) -> None:
        # All numbers first: the first signal may end the job before the second is sent.
        for pid in [job.rank_pid(rank) for rank in ranks]:
            os.kill(pid, number)

    return send


def _again_and_again(job: Job) -> None:
    """Signal both ranks until they are gone: while they decide, save, publish, and while the interpreter ends."""
    pids, rounds = job.rank_pids(), 0
    deadline = time.monotonic() + 60
    while set(pids) & set(job.processes()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        rounds += 1
        time.sleep(0.02)
    assert rounds >= 3


def _twice_to_torchrun(job: Job) -> None:
    os.kill(job.pid, signal.SIGTERM)
    job.wait_for_line("and leaving")
    # torchrun may be gone already, if the ranks were quick.
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGTERM)


CASES = {
    "one rank": (_to_ranks(1), (), 0),
    "all ranks": (_to_ranks(0, 1), (), 0),
    "all ranks again and again": (_again_and_again, (), 0),
    "the last pipeline stage": (_to_ranks(1), ("--parallel.pipeline_model_parallel_size=2",), 0),
    "torchrun": (_to_torchrun(signal.SIGTERM), (), 1),
    "torchrun twice": (_twice_to_torchrun, (), 1),
    "torchrun by SIGKILL": (_to_torchrun(signal.SIGKILL), (), -signal.SIGKILL),
}


@pytest.mark.parametrize("case", CASES)
def test_run_saves_and_leaves(tmp_path: Path, case: str) -> None:
    send, arguments, torchrun_status = CASES[case]
    with _running(tmp_path, *arguments) as job:
        job.wait_for_iteration(3, tmp_path / "run")
        send(job)
        result = job.wait_until_gone()
    _assert_saved_and_left(result, tmp_path / "run", torchrun_status)
    cause = "the launcher's death" if torchrun_status == -signal.SIGKILL else "SIGTERM"
    assert f"asked to stop by {cause}: " in "".join(result.stderr.values())


def test_chosen_signal_saves_and_resumes(tmp_path: Path) -> None:
    with _running(tmp_path, "--training.exit_signal=SIGUSR1", num_ranks=1, launcher=False) as job:
        job.wait_for_iteration(3, tmp_path / "run")
        os.kill(job.pid, signal.SIGUSR1)
        result = job.wait_until_gone()
    _assert_saved_and_left(result, tmp_path / "run", 0, num_ranks=1)
    assert "asked to stop by SIGUSR1" in result.stderr[0]
    stopped = result.stopped_at[0]
    interval = f"--training.exit_interval={stopped + 2}"
    resumed = run_job(tmp_path / "again", [*TINY, *LONG, interval, f"--checkpoint.save={tmp_path / 'run'}"])
    assert resumed.stopped_at == (stopped + 2, "exit_interval is reached")
    assert sorted(losses(tmp_path / "run")) == list(range(1, stopped + 3))


def test_signal_during_a_validation_is_not_put_off_to_its_end(tmp_path: Path) -> None:
    arguments = ("--training.train_iters=4", "--training.eval_interval=2", "--training.eval_iters=20000")
    with _running(tmp_path, *arguments, num_ranks=1, launcher=False) as job:
        job.wait_for_iteration(2, tmp_path / "run")
        os.kill(job.pid, signal.SIGTERM)
        result = job.wait_until_gone()
    _assert_saved_and_left(result, tmp_path / "run", 0, num_ranks=1)
    assert result.stopped_at[0] == 2
    assert "validation at iteration 2 is cut short by a signal" in result.stderr[0]


# Before the first iteration


def test_signal_during_setup_ends_all_ranks_before_the_first_iteration(tmp_path: Path) -> None:
    with _running(tmp_path, fault="signal_in_setup@1") as job:
        result = job.finish()
        job.wait_until_gone()
    assert (result.status, result.rank_statuses) == (0, {0: 0, 1: 0}), str(result)
    assert result.stopped_at == (0, SIGNAL)
    assert "Traceback" not in "".join(result.stderr.values())
    assert list((tmp_path / "run").glob("iter_*")) == []
    assert read_tracker(tmp_path / "run") is None


def test_signal_does_not_wait_for_ranks_that_have_not_joined(tmp_path: Path) -> None:
    with _running(tmp_path, fault="never_start@1") as job:
        waiting, _ = job.rank_pids()
        job.wait_until(lambda: _is_at_rendezvous(waiting), "rank 0 at the rendezvous")
        os.kill(job.pid, signal.SIGTERM)
        # torchrun would kill after 30 s.
        result = job.wait_until_gone()
    assert result.status == 1
    assert result.rank_statuses == {}
    assert result.stderr == {0: "", 1: ""}
    assert not (tmp_path / "run").exists()


def _is_at_rendezvous(pid: int) -> bool:
    """A connection to the store is the first socket that a rank opens."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # Closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(entry).startswith("socket:"):
                return True
    return False


# Without the handler, without a folder


@pytest.mark.parametrize("target", ["rank", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_without_handler_the_signal_ends_the_processes_at_once(tmp_path: Path, target: str) -> None:
    with _running(tmp_path, "--training.exit_signal_handler=false") as job:
        job.wait_for_iteration(3, tmp_path / "run")
        os.kill(job.rank_pid(1) if target == "rank" else job.pid, signal.SIGTERM)
        result = job.wait_until_gone()
    assert result.status == 1
    # A rank that was ended by a signal has left no status; the other one may still have seen that it lost its peer.
    assert set(result.rank_statuses.items()) <= {(0, 1)}
    if target == "rank":
        assert "exitcode  : -15" in result.output
    assert list((tmp_path / "run").glob("iter_*")) == []
    assert read_tracker(tmp_path / "run") is None


def test_without_save_folder_the_loss_of_work_is_announced(tmp_path: Path) -> None:
    arguments = (*TINY, *LONG, "--checkpoint.save=null")
    with Job(tmp_path / "job", *arguments, num_ranks=1, launcher=False) as job:
        job.wait_for_line("iteration        3/")
        assert "WARNING: checkpoint.save is not set: nothing is saved" in (tmp_path / "job" / "output").read_text()
        os.kill(job.pid, signal.SIGTERM)
        result = job.wait_until_gone()
    assert (result.status, result.rank_statuses) == (0, {0: 0})
    assert "WARNING: asked to stop by SIGTERM: nothing is saved, as checkpoint.save is not set" in result.stderr[0]
    assert result.stopped_at[1] == SIGNAL


ASYNC = ("--checkpoint.async_save=true", "--checkpoint.save_interval=1")


def test_a_signal_while_saves_are_written_publishes_the_last_iteration(tmp_path: Path) -> None:
    save = tmp_path / "run"
    with _running(tmp_path, *ASYNC) as job:
        job.wait_for_iteration(4, save)
        _to_ranks(0, 1)(job)
        result = job.wait_until_gone()
    assert result.status == 0 and result.rank_statuses == {0: 0, 1: 0}, str(result)
    assert not any(result.num_gloo_threads.values())
    iteration, reason = result.stopped_at
    assert reason == SIGNAL and iteration == max(losses(save)) == read_tracker(save)
    # Every save that began was brought to its end, one after the other.
    assert complete_iterations(save) == list(range(1, iteration + 1))


@pytest.mark.parametrize("after", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_while_saves_are_written_a_run_goes_on_from_the_published_step(tmp_path: Path, after: int) -> None:
    save = tmp_path / "run"
    with _running(tmp_path, *ASYNC) as job:
        job.wait_for_iteration(after, save)
        for pid in job.rank_pids():
            os.kill(pid, signal.SIGKILL)
        job.wait_until_gone()
    published = read_tracker(save) or 0
    assert published in (0, *complete_iterations(save))
    last = published + 3
    end = (*LONG, f"--training.exit_interval={last}")
    result = run_job(tmp_path / "again", [*TINY, f"--checkpoint.save={save}", *ASYNC, *end], num_ranks=2)
    assert result.status == 0, str(result)
    assert read_tracker(save) == last == complete_iterations(save)[-1]
    whole = tmp_path / "whole"
    unbroken = run_job(tmp_path / "unbroken", [*TINY, f"--checkpoint.save={whole}", *end], num_ranks=2)
    assert unbroken.status == 0, str(unbroken)
    # What was done again after the kill is there twice; the second time it is what the unbroken run did.
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    found = {line["iteration"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert {step: found[step] for step in range(1, last + 1)} == losses(whole)
