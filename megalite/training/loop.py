"""The loop over iterations."""

from __future__ import annotations

import logging

from megalite.training.context import TrainContext
from megalite.training.evaluate import evaluate, is_evaluation_due
from megalite.training.exit import ExitReason, checkpoint_and_decide_exit, is_stop_requested, save_checkpoint
from megalite.training.step import StepOutput, train_step

logger = logging.getLogger(__name__)


def train(ctx: TrainContext) -> ExitReason:
    """Run iterations until the schedule ends or an exit is decided. Collective over all ranks."""
    if is_stop_requested(ctx):
        # Asked during set-up: there is nothing new to save.
        return ExitReason.SIGNAL
    while not ctx.is_finished:
        ctx.profiler.before_iteration(ctx.progress.iteration)
        step = train_step(ctx)
        advance(ctx, step)
        ctx.reporter.iteration(ctx.progress, step)
        if is_evaluation_due(ctx):
            evaluate(ctx)
        reason = checkpoint_and_decide_exit(ctx)
        if reason is not None:
            return reason
    save_checkpoint(ctx)
    return ExitReason.FINISHED


def advance(ctx: TrainContext, step: StepOutput) -> None:
    """Count an iteration. A skipped update has consumed its samples all the same."""
    progress = ctx.progress
    progress.iteration += 1
    progress.consumed_train_samples += ctx.derived.global_batch_size
    progress.num_floating_point_operations_so_far += ctx.flops_per_iteration
    if not step.updated:
        progress.skipped_iterations += 1
