"""Validation loss on the next batches of the validation split."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from megalite.training.step import forward_backward

if TYPE_CHECKING:
    from megalite.training.context import TrainContext

logger = logging.getLogger(__name__)


def is_evaluation_due(ctx: TrainContext) -> bool:
    """Return whether a validation follows the iteration that has just been done."""
    training = ctx.config.training
    interval = training.eval_interval
    return interval is not None and training.eval_iters > 0 and ctx.progress.iteration % interval == 0


def evaluate(ctx: TrainContext) -> float:
    """Return the mean loss over ``eval_iters`` global batches, and log it. Collective over all ranks.

    Dropout is off, so that no random stream moves. The position in the validation split goes on over the whole run.
    """
    started = time.perf_counter()
    ctx.state.ddp.finish_param_sync()
    model, training = ctx.state.model, ctx.config.training
    micro_batches = ctx.derived.num_microbatches
    losses = []
    model.eval()
    with torch.no_grad():
        for _ in range(training.eval_iters):
            losses.append(
                forward_backward(
                    ctx,
                    ctx.valid_batches,
                    consumed_samples=ctx.progress.consumed_valid_samples,
                    num_microbatches=micro_batches,
                    forward_only=True,
                )
            )
            ctx.progress.consumed_valid_samples += ctx.derived.global_batch_size
    model.train()
    loss = sum(losses) / len(losses)
    ctx.reporter.evaluation(ctx.progress, loss, time.perf_counter() - started)
    return loss
