"""Saves that are written while training goes on: what they hold, and what happens when they cannot be written."""

from __future__ import annotations

import errno
import logging
import threading
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.paths import iteration_folder, read_tracker
from megalite.dist_checkpointing.core import is_complete
from megalite.dist_checkpointing.strategies.async_utils import ThreadCaller
from megalite.training.context import TrainContext
from megalite.training.exit import ExitReason, checkpoint_and_decide_exit, finalize_saves
from megalite.training.loop import advance
from megalite.training.setup import training_run
from megalite.training.step import train_step
from megalite.utils.errors import MegaliteError, SaveError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import (
    LLAMA,
    VPP,
    LocalState,
    Topology,
    global_state,
    local_state,
    make_config,
    read_with_dcp,
    run,
    run_steps,
    stored_tensor,
    unequal,
)

ASYNC = {"async_save": True}


class Gate:
    """A hook that holds the data files of a save until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, point: str, path: Path) -> None:
        if point == "open" and path.suffix == ".distcp":
            self.reached.set()
            assert self.opened.wait(60), "nobody opened the gate"


def _step(ctx: TrainContext) -> None:
    advance(ctx, train_step(ctx))


def _overwrite(ctx: TrainContext) -> None:
    """Spoil everything that training could change."""
    for chunk in ctx.state.chunks:
        for buffer in chunk.buffers:
            buffer.values.fill_(7.0)
    for _, _, values in ctx.state.optimizer.state_tensors():
        values.fill_(-7.0)
    ctx.state.optimizer.num_steps += 100
    ctx.tracker = None
    torch.manual_seed(99)


def _hold_and_overwrite(config: Any) -> LocalState:
    gate = Gate()
    with training_run(config) as ctx:
        ctx.checkpoints.hook = gate
        _step(ctx)
        places = [values.data_ptr() for _, _, values in ctx.state.optimizer.state_tensors()]
        saved = local_state(ctx)
        assert checkpoint_and_decide_exit(ctx) is None and ctx.checkpoints.is_saving
        assert gate.reached.wait(60)
        _overwrite(ctx)
        assert [values.data_ptr() for _, _, values in ctx.state.optimizer.state_tensors()] == places, "moved"
        finalize_saves(ctx)
        assert ctx.checkpoints.is_saving and read_tracker(config.checkpoint.save) is None, "published too early"
        gate.opened.set()
        finalize_saves(ctx, blocking=True)
        assert not ctx.checkpoints.is_saving and read_tracker(config.checkpoint.save) == 1
        assert 0.0 < ctx.last_save.stall_seconds <= ctx.last_save.save_seconds
    return saved


@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        ((1, 1, 1), ()),
        ((2, 1, 2), ({"precision": {"bf16": True}},)),
        ((1, 2, 1), (LLAMA, VPP)),
        ((1, 1, 2), ({"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}},)),
        pytest.param(
            (1, 1, 2),
            ({"parallel": {"use_distributed_optimizer": False}, "precision": {"fp16": True}},),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_files_hold_the_values_of_the_call(tmp_path: Path, topology: Topology, changes: tuple) -> None:
    """P1, P3: the write is held, everything is overwritten as soon as training could, and then it is let go. Nothing is
    published before the write has ended and the ranks have agreed about it."""
    config = make_config(
        *changes, {"checkpoint": {"save": str(tmp_path), "save_interval": 1, **ASYNC}}, topology=topology
    )
    expected = global_state(run_on_ranks(prod(topology), _hold_and_overwrite, config))
    stored = read_with_dcp(iteration_folder(tmp_path, 1))
    for name, tensor in expected.items():
        found = stored_tensor(stored, name)
        assert torch.equal(found[: len(tensor)] if tensor.dim() else found, tensor), name
    resumed = run(topology, config, 0)
    assert unequal(resumed.state, expected) == []


@pytest.mark.parametrize("topology", [(1, 1, 2), (2, 2, 1)], ids=str)
def test_a_run_with_asynchronous_saves_is_the_run_without(tmp_path: Path, topology: Topology) -> None:
    settings = {"save_interval": 2, "verify_integrity": "off"}
    runs = {}
    for name, more in (("sync", {}), ("async", ASYNC)):
        save = {"checkpoint": {"save": str(tmp_path / name), **settings, **more}, "training": {"exit_interval": 5}}
        runs[name] = run(topology, make_config(save, topology=topology), 5)
        assert read_tracker(tmp_path / name) == 5, "the last save is waited for"
    assert runs["sync"].losses == runs["async"].losses and unequal(runs["sync"].state, runs["async"].state) == []
    for iteration in (2, 4, 5):
        one, other = (read_with_dcp(iteration_folder(tmp_path / name, iteration)) for name in ("sync", "async"))
        assert unequal(one, other) == []
    more = {"checkpoint": {"save": str(tmp_path / "async"), **settings, **ASYNC}}
    unbroken = run(topology, make_config({"checkpoint": {}}, topology=topology), 7)
    assert run(topology, make_config(more, topology=topology), 2).losses == unbroken.losses[5:]


def _train_with(config: Any, fault: Any, steps: int) -> tuple[str, int, int | None]:
    with training_run(config) as ctx:
        ctx.checkpoints.hook = fault
        try:
            run_steps(ctx, steps)
            finalize_saves(ctx, blocking=True)
            outcome = "done"
        except MegaliteError as error:
            outcome = f"{type(error).__name__}: {error}"
        return outcome, ctx.checkpoints.num_failed_saves, read_tracker(config.checkpoint.save)


class _FullDisk:
    """Fails at one point of the save of one iteration, on one rank."""

    def __init__(self, point: str, name: str, iteration: int, rank: int) -> None:
        self.what = (point, name, f"iter_{iteration:07d}")
        self.rank = rank

    def __call__(self, point: str, path: Path) -> None:
        folder = path.parent.name if path.suffix or path.name.startswith(".") else path.name
        if torch.distributed.get_rank() == self.rank and (point, path.name, folder) == self.what:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize(
    ("point", "name", "rank"),
    [("open", "__1_0.distcp", 1), ("write", "__1_0.distcp", 1), ("fsync", "common.pt", 0), ("rename", ".metadata", 0)],
)
def test_a_save_that_cannot_be_written_fails_on_all_ranks(
    tmp_path: Path, policy: str, point: str, name: str, rank: int
) -> None:
    settings = {"save": str(tmp_path), "save_interval": 1, "async_save_on_failure": policy, **ASYNC}
    config = make_config({"checkpoint": settings}, topology=(1, 1, 2))
    (outcome,) = set(run_on_ranks(2, _train_with, config, _FullDisk(point, name, 2, rank), 3))
    if policy == "stop":
        assert outcome[0].startswith("SaveError: iteration 2 could not be saved") and "No space left" in outcome[0]
        assert outcome[1:] == (0, 1)
    else:
        assert outcome == ("done", 1, 3)
    assert is_complete(iteration_folder(tmp_path, 1)) and not is_complete(iteration_folder(tmp_path, 2))
    resumed = run((1, 1, 2), make_config({"checkpoint": {"save": str(tmp_path)}}, topology=(1, 1, 2)), 1)
    unbroken = run((1, 1, 2), make_config(topology=(1, 1, 2)), 4)
    assert resumed.losses == unbroken.losses[outcome[2] : outcome[2] + 1]


def _busy(config: Any) -> tuple[str, int | None, list[str]]:
    """Let a second save become due while the first is held."""
    gate = Gate()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    real = ThreadCaller.wait
    with training_run(config) as ctx:
        logging.getLogger("megalite").addHandler(handler)
        ctx.checkpoints.hook = gate

        def wait(self: ThreadCaller) -> None:
            # Whoever waits for the first save is served: the gate opens.
            gate.opened.set()
            real(self)

        ThreadCaller.wait = wait
        try:
            for _ in range(2):
                _step(ctx)
                checkpoint_and_decide_exit(ctx)
            outcome = "done"
        except SaveError as error:
            outcome = str(error)
        finally:
            ThreadCaller.wait = real
            gate.opened.set()
        return outcome, read_tracker(config.checkpoint.save), records


@pytest.mark.parametrize("policy", ["wait", "skip", "error"])
def test_what_a_save_does_while_another_is_written(tmp_path: Path, policy: str) -> None:
    """P3: never a second copy, and never two saves that cross."""
    settings = {"save": str(tmp_path), "save_interval": 1, "async_save_on_busy": policy, **ASYNC}
    results = run_on_ranks(2, _busy, make_config({"checkpoint": settings}, topology=(1, 1, 2)))
    outcome, tracker, records = results[0]
    assert results[1][:2] == (outcome, tracker)
    if policy == "wait":
        assert (outcome, tracker) == ("done", 1)
        assert iteration_folder(tmp_path, 2).is_dir(), "the second one has begun"
    elif policy == "skip":
        assert (outcome, tracker) == ("done", None) and not iteration_folder(tmp_path, 2).exists()
        assert [text for text in records if "iteration 2 is not saved" in text]
    else:
        assert "iteration 2 is to be saved while the save before is still being written" in outcome


def _leave_while_writing(config: Any) -> tuple[ExitReason | None, int | None, int]:
    with training_run(config) as ctx:
        run_steps(ctx, 2)
        _step(ctx)
        reason = checkpoint_and_decide_exit(ctx)
        return reason, read_tracker(config.checkpoint.save), threading.active_count()


def test_leaving_waits_and_publishes_the_last_iteration(tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path), "save_interval": 2, **ASYNC}, "training": {"exit_interval": 3}}
    before = run_on_ranks(2, _threads)
    results = run_on_ranks(2, _leave_while_writing, make_config(save, topology=(1, 1, 2)))
    assert {result[:2] for result in results} == {(ExitReason.INTERVAL, 3)}
    assert is_complete(iteration_folder(tmp_path, 2)) and is_complete(iteration_folder(tmp_path, 3))
    assert max(result[2] for result in results) <= max(before) + 1


def _threads() -> int:
    return threading.active_count()


def _fail_while_writing(config: Any) -> tuple[bool, int | None]:
    gate = Gate()
    with pytest.raises(ValueError, match="training broke"), training_run(config) as ctx:
        ctx.checkpoints.hook = gate
        _step(ctx)
        checkpoint_and_decide_exit(ctx)
        gate.opened.set()
        raise ValueError("training broke")
    return any("save of iteration" in thread.name for thread in threading.enumerate()), read_tracker(
        config.checkpoint.save
    )


def test_an_error_of_training_publishes_nothing_and_leaves_no_thread(tmp_path: Path) -> None:
    config = make_config({"checkpoint": {"save": str(tmp_path), "save_interval": 1, **ASYNC}}, topology=(1, 1, 2))
    assert set(run_on_ranks(2, _fail_while_writing, config)) == {(False, None)}
    # What it left is debris, which the next run clears.
    assert run((1, 1, 2), config, 1).losses == run((1, 1, 2), make_config(topology=(1, 1, 2)), 1).losses
