"""The end of an iteration: whether to save, and whether to stop."""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megalite.checkpoint.manager import SaveReport
from megalite.checkpoint.paths import iteration_folder
from megalite.checkpoint.state import live_tensors, true_rows
from megalite.dist_checkpointing.fingerprint import fingerprint
from megalite.utils.dist import agree_any
from megalite.utils.errors import SaveError

if TYPE_CHECKING:
    from megalite.training.context import TrainContext

logger = logging.getLogger(__name__)


class ExitReason(Enum):
    """Why the loop ended. All of them are an exit with status 0: the run did what it was asked to."""

    FINISHED = "all iterations are done"
    SIGNAL = "asked by a signal"
    DURATION = "exit_duration_in_mins is over"
    INTERVAL = "exit_interval is reached"


def checkpoint_and_decide_exit(ctx: TrainContext) -> ExitReason | None:
    """Save if it is time to, and return why to stop, or None to go on. Collective over all ranks.

    In this order: exit signal, save interval, duration, exit interval. One all-reduce agrees on what ranks know alone.
    """
    training, checkpoint = ctx.config.training, ctx.config.checkpoint
    iteration = ctx.progress.iteration
    signalled, is_late = _agree(ctx)
    if signalled:
        _say_what_a_signal_does(ctx)
        save_checkpoint(ctx, is_last=True)
        return ExitReason.SIGNAL
    if checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0:
        save_checkpoint(ctx)
    if is_late:
        save_checkpoint(ctx, is_last=True)
        return ExitReason.DURATION
    if training.exit_interval is not None and iteration % training.exit_interval == 0:
        save_checkpoint(ctx, is_last=True)
        return ExitReason.INTERVAL
    return None


def is_stop_requested(ctx: TrainContext) -> bool:
    """Return whether any rank was asked to stop. Collective over all ranks."""
    return agree_any(ctx.exit_signal.is_raised(), ctx.parallel.world)


def _agree(ctx: TrainContext) -> tuple[bool, bool]:
    """Return (any rank was signalled, any rank's clock says the time is over). Collective over all ranks."""
    limit = ctx.config.training.exit_duration_in_mins
    is_late = limit is not None and time.monotonic() - ctx.started > 60.0 * limit
    flags = torch.tensor([int(ctx.exit_signal.is_raised()), int(is_late)])
    signalled, late = ctx.parallel.world.all_reduce(flags, dist.ReduceOp.MAX).tolist()
    if signalled:
        ctx.exit_signal.follow()
    return bool(signalled), bool(late)


def _say_what_a_signal_does(ctx: TrainContext) -> None:
    where = ctx.config.checkpoint.save
    action = (
        f"saving iteration {ctx.progress.iteration}" if where else "nothing is saved, as checkpoint.save is not set"
    )
    logger.warning("asked to stop by %s: %s and leaving", ctx.exit_signal.describe(), action)


def save_checkpoint(ctx: TrainContext, *, is_last: bool = False) -> None:
    """Save the present iteration, unless it is published already. Collective over all ranks.

    With ``checkpoint.async_save`` it is written while training goes on; not so the last save of a run, which is waited
    for like one that is still being written.
    """
    manager, progress = ctx.checkpoints, ctx.progress
    if not manager.can_save:
        return
    if not _may_begin(ctx, is_last) or manager.is_published(progress.iteration):
        return
    ctx.reporter.memory_around_save("before")
    with ctx.timers.section("save", level=1):
        if ctx.config.checkpoint.async_save and not is_last:
            ctx.reporter.pause(manager.save_async(ctx.state, ctx.readable_copies()))
        else:
            _report(ctx, manager.save(ctx.state, ctx.readable_copies()))
    ctx.reporter.memory_around_save("after")
    log_state_hash(ctx, "saved")


def _may_begin(ctx: TrainContext, is_last: bool) -> bool:
    """Bring the save before to its end, as the settings say; return whether another may begin."""
    manager, policy = ctx.checkpoints, ctx.config.checkpoint.async_save_on_busy
    finalize_saves(ctx)
    if not manager.is_saving:
        return True
    iteration = ctx.progress.iteration
    if policy == "error" and not is_last:
        raise SaveError(
            f"iteration {iteration} is to be saved while the save before is still being written, and "
            "checkpoint.async_save_on_busy is error; raise checkpoint.save_interval, or choose wait or skip"
        )
    if policy == "skip" and not is_last:
        if ctx.parallel.world.is_first:
            logger.warning(
                "iteration %d is not saved, as the save before is still being written and "
                "checkpoint.async_save_on_busy is skip",
                iteration,
            )
        return False
    finalize_saves(ctx, blocking=True)
    return True


def finalize_saves(ctx: TrainContext, *, blocking: bool = False) -> None:
    """Publish a save that was written while training went on, if all ranks are done. Collective over all ranks."""
    if ctx.checkpoints.is_saving:
        with ctx.timers.section("finalize-save", level=1):
            reports = ctx.checkpoints.maybe_finalize_async_save(blocking=blocking)
        for report in reports:
            _report(ctx, report)


def _report(ctx: TrainContext, report: SaveReport) -> None:
    ctx.last_save = report
    ctx.reporter.saved(ctx.progress, report, iteration_folder(ctx.config.checkpoint.save, report.iteration))


def log_state_hash(ctx: TrainContext, event: str) -> None:
    """Log a fingerprint of all weights and moments in global coordinates, if asked for. Collective over all ranks."""
    if ctx.config.checkpoint.log_state_hash:
        value = fingerprint(live_tensors(ctx.state), ctx.parallel.world, true_rows=true_rows(ctx.state))
        ctx.reporter.state_hash(ctx.progress, event, value, ctx.state.optimizer.num_steps)
