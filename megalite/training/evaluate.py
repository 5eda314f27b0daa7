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


def evaluate(ctx: TrainContext) -> dict[str, float]:
    """Return the mean loss over ``eval_iters`` global batches of each validation set, and log it.

    Collective over all ranks. Dropout is off, so that no random stream moves. Each set has a position of its own, which
    goes on over the whole run. Empty if a signal cut it short: a validation may take longer than the grace that a
    scheduler gives.
    """
    started = time.perf_counter()
    ctx.state.finish_param_sync()
    _set_training(ctx, False)
    losses = {name: _evaluate_set(ctx, name) for name in ctx.valid_batches}
    _set_training(ctx, True)
    seconds = time.perf_counter() - started
    if None in losses.values():
        iteration = ctx.progress.iteration
        logger.warning("validation at iteration %d is cut short by a signal: no loss is given", iteration)
        ctx.reporter.pause(seconds)
        return {}
    ctx.reporter.evaluation(ctx.progress, losses, seconds)
    return losses


def _evaluate_set(ctx: TrainContext, name: str) -> float | None:
    """Return the mean loss on the next batches of one set, or None if a signal came."""
    positions, batch_size = ctx.progress.consumed_valid_samples, ctx.derived.eval_global_batch_size
    count, first = ctx.config.training.eval_iters, positions.get(name, 0)
    micro_batch_size = ctx.derived.eval_micro_batch_size
    losses: list[tuple[float, float]] = []
    with torch.no_grad():
        while len(losses) < count and not is_stop_requested(ctx):
            losses.append(
                forward_backward(
                    ctx,
                    ctx.valid_batches[name],
                    consumed_samples=first + len(losses) * batch_size,
                    num_microbatches=batch_size // (micro_batch_size * ctx.parallel.dp.size),
                    micro_batch_size=micro_batch_size,
                    forward_only=True,
                )
            )
    # Also when cut short: the resumed run then validates on the same batches as an unbroken one.
    positions[name] = first + count * batch_size
    if len(losses) < count:
        return None
    return sum(mean * weight for mean, weight in losses) / max(sum(weight for _, weight in losses), 1.0)


def _set_training(ctx: TrainContext, mode: bool) -> None:
    for chunk in ctx.state.chunks:
        chunk.module.train(mode)
