"""The end of an iteration: whether to save, and whether to stop."""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megalite.checkpoint.paths import iteration_folder
from megalite.checkpoint.state import live_tensors, true_rows
from megalite.dist_checkpointing.fingerprint import fingerprint
from megalite.utils.dist import agree_any

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
        save_checkpoint(ctx)
        return ExitReason.SIGNAL
    if checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0:
        save_checkpoint(ctx)
    if is_late:
        save_checkpoint(ctx)
        return ExitReason.DURATION
    if training.exit_interval is not None and iteration % training.exit_interval == 0:
        save_checkpoint(ctx)
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


def save_checkpoint(ctx: TrainContext) -> None:
    """Save and publish the present iteration, unless it is published already. Collective over all ranks."""
    manager, progress = ctx.checkpoints, ctx.progress
    if not manager.can_save or manager.is_published(progress.iteration):
        return
    ctx.reporter.memory_around_save("before")
    with ctx.timers.section("save", level=1):
        report = manager.save(ctx.state, ctx.readable_copies())
    ctx.last_save = report
    ctx.reporter.memory_around_save("after")
    ctx.reporter.saved(progress, report, iteration_folder(ctx.config.checkpoint.save, progress.iteration))
    log_state_hash(ctx, "saved")


def log_state_hash(ctx: TrainContext, event: str) -> None:
    """Log a fingerprint of all weights and moments in global coordinates, if asked for. Collective over all ranks."""
    if ctx.config.checkpoint.log_state_hash:
        value = fingerprint(live_tensors(ctx.state), ctx.parallel.world, true_rows=true_rows(ctx.state))
        ctx.reporter.state_hash(ctx.progress, event, value, ctx.state.optimizer.num_steps)
