"""Validation loss on the next batches of the validation split."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from megalite.training.exit import is_stop_requested
from megalite.training.step import forward_backward

if TYPE_CHECKING:
    from megalite.training.context import TrainContext

logger = logging.getLogger(__name__)


def is_evaluation_due(ctx: TrainContext) -> bool:
    """Return whether a validation follows the iteration that has just been done."""
    training = ctx.config.training
    interval = training.eval_interval
    return interval is not None and training.eval_iters > 0 and ctx.progress.iteration % interval == 0


def evaluate(ctx: TrainContext) -> float | None:
    """Return the mean loss over ``eval_iters`` global batches, and log it. Collective over all ranks.

    Dropout is off, so that no random stream moves. The position in the validation split goes on over the whole run.
    None if a signal cut it short: a validation may take longer than the grace that a scheduler gives.
    """
    started = time.perf_counter()
    ctx.state.finish_param_sync()
    progress, batch_size = ctx.progress, ctx.derived.eval_global_batch_size
    count, first = ctx.config.training.eval_iters, progress.consumed_valid_samples
    losses: list[tuple[float, float]] = []
    _set_training(ctx, False)
    with torch.no_grad():
        while len(losses) < count and not is_stop_requested(ctx):
            losses.append(
                forward_backward(
                    ctx,
                    ctx.valid_batches,
                    consumed_samples=first + len(losses) * batch_size,
                    num_microbatches=batch_size // (ctx.derived.eval_micro_batch_size * ctx.parallel.dp.size),
                    micro_batch_size=ctx.derived.eval_micro_batch_size,
                    forward_only=True,
                )
            )
    _set_training(ctx, True)
    # Also when cut short: the resumed run then validates on the same batches as an unbroken one.
    progress.consumed_valid_samples = first + count * batch_size
    seconds = time.perf_counter() - started
    if len(losses) < count:
        logger.warning("validation at iteration %d is cut short by a signal: no loss is given", progress.iteration)
        ctx.reporter.pause(seconds)
        return None
    loss = sum(mean * weight for mean, weight in losses) / max(sum(weight for _, weight in losses), 1.0)
    ctx.reporter.evaluation(progress, loss, seconds)
    return loss


def _set_training(ctx: TrainContext, mode: bool) -> None:
    for chunk in ctx.state.chunks:
        chunk.module.train(mode)
