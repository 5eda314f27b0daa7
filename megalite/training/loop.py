"""The loop over iterations."""

from __future__ import annotations

import logging

from megalite.training.context import TrainContext
from megalite.training.evaluate import evaluate, is_evaluation_due
from megalite.training.exit import (
    ExitReason,
    checkpoint_and_decide_exit,
    finalize_saves,
    is_stop_requested,
    save_checkpoint,
)
from megalite.training.step import StepOutput, skip_step, train_step

logger = logging.getLogger(__name__)


def train(ctx: TrainContext) -> ExitReason:
    """Run iterations until the schedule ends or an exit is decided. Collective over all ranks."""
    reason = _iterate(ctx)
    # All that was to be saved is; a signal that comes now would only spoil the exit status.
    ctx.exit_signal.follow()
    return reason


def _iterate(ctx: TrainContext) -> ExitReason:
    if is_stop_requested(ctx):
        # Asked during set-up: there is nothing new to save.
        return ExitReason.SIGNAL
    while not ctx.is_finished:
        finalize_saves(ctx)
        ctx.profiler.before_iteration(ctx.progress.iteration)
        save_before_batch_grows(ctx)
        if ctx.progress.iteration + 1 in ctx.config.training.iterations_to_skip:
            step = skip_step(ctx)
        else:
            step = train_step(ctx)
        advance(ctx, step)
        ctx.reporter.iteration(ctx.progress, step)
        if is_evaluation_due(ctx):
            with ctx.timers.section("validation", level=1):
                evaluate(ctx)
        reason = checkpoint_and_decide_exit(ctx)
        if reason is not None:
            return reason
    save_checkpoint(ctx, is_last=True)
    return ExitReason.FINISHED


def save_before_batch_grows(ctx: TrainContext) -> None:
    """Save the last iteration with a smaller batch: more micro-batches may need memory that is not there."""
    if ctx.last_batch_size is not None and ctx.batch_size != ctx.last_batch_size:
        logger.info("the global batch grows from %d to %d", ctx.last_batch_size, ctx.batch_size)
        save_checkpoint(ctx)


def advance(ctx: TrainContext, step: StepOutput) -> None:
    """Count an iteration. A skipped update has consumed its samples all the same."""
    progress = ctx.progress
    progress.iteration += 1
    ctx.last_batch_size = step.batch_size
    progress.consumed_train_samples += step.batch_size
    if step.is_left_out:
        progress.skipped_train_samples += step.batch_size
        return
    progress.num_floating_point_operations_so_far += ctx.flops_per_sequence * step.batch_size
    if not step.updated:
        progress.skipped_iterations += 1
