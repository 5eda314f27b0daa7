"""One training step: forwards and backwards of all micro-batches, gradients completed, one update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megalite.data.samplers import BatchLoader, sample_indices
from megalite.parallel.ddp import finalize_model_grads
from megalite.parallel.random import DropoutContext
from megalite.parallel.schedules import run_schedule
from megalite.utils.errors import NumericsError

if TYPE_CHECKING:
    from megalite.training.context import TrainContext


@dataclass(frozen=True)
class StepOutput:
    """What one step produced; equal on all ranks."""

    loss: float
    """Mean over the micro-batches of the global batch of their mean loss per token, before the update."""
    lr: float
    """Rate of this update."""
    grad_norm: float
    """Before clipping."""
    updated: bool
    batch_size: int
    """Sequences in the global batch."""
    is_left_out: bool = False
    """The iteration was left out as asked (``iterations_to_skip``): nothing was computed."""
    loss_scale: float = 1.0


def train_step(ctx: TrainContext) -> StepOutput:
    """Do one update from the next global batch. Collective over all ranks."""
    state = ctx.state
    batch_size = ctx.batch_size
    for chunk in state.chunks:
        chunk.zero_gradients()
    with ctx.timers.section("forward-backward", level=1):
        loss, weight = forward_backward(
            ctx,
            ctx.train_batches,
            consumed_samples=ctx.progress.consumed_train_samples,
            num_microbatches=ctx.derived.microbatches_in(batch_size),
            micro_batch_size=ctx.derived.micro_batch_size,
        )
    scaler = state.optimizer.grad_scaler
    scale = scaler.scale
    check = ctx.config.resilience.check_for_nan_in_loss_and_grad
    # With a scale that is being found, overflows are expected: they are left out and counted. A loss that is not finite
    # at the least scale has another cause, and would be left out for ever.
    if check and not scaler.can_shrink and not math.isfinite(loss):
        raise NumericsError(_not_finite("loss", loss, ctx))
    with ctx.timers.section("finalize-gradients", level=1):
        for chunk in state.chunks:
            finalize_model_grads(chunk)
            if ctx.config.training.calculate_per_token_loss:
                # The sum over tokens was differentiated, and averaged over dp; its mean over all tokens is meant.
                chunk.scale_gradients(ctx.parallel.dp_cp.size / max(weight, 1.0))
    lr = state.scheduler.lr
    with ctx.timers.section("optimizer", level=1):
        outcome = state.optimizer.step()
    if check and not scaler.is_dynamic and not outcome.updated:
        raise NumericsError(_not_finite("gradient norm", outcome.grad_norm, ctx))
    if outcome.updated:
        state.scheduler.step(batch_size)
    return StepOutput(loss, lr, outcome.grad_norm, outcome.updated, batch_size, loss_scale=scale)


def skip_step(ctx: TrainContext) -> StepOutput:
    """Consume the next global batch without looking at it (``iterations_to_skip``)."""
    lr = ctx.state.scheduler.lr
    return StepOutput(math.nan, lr, math.nan, updated=False, batch_size=ctx.batch_size, is_left_out=True)


def _not_finite(what: str, value: float, ctx: TrainContext) -> str:
    progress = ctx.progress
    last = progress.consumed_train_samples + ctx.batch_size
    return (
        f"the {what} of iteration {progress.iteration + 1} (samples {progress.consumed_train_samples} to {last - 1}) "
        f"is {value}; nothing was updated and nothing is saved. Lower optimizer.lr, look at these samples, or resume "
        "from an earlier iteration; resilience.check_for_nan_in_loss_and_grad switches this check off"
    )


def forward_backward(
    ctx: TrainContext,
    batches: BatchLoader | None,
    *,
    consumed_samples: int,
    num_microbatches: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> tuple[float, float]:
    """Run micro-batches through the model; return their mean loss and its weight, on every rank. Collective over all.

    By default the loss of a micro-batch is its mean over the tokens that the loss mask keeps, and micro-batches count
    alike; the weight is their number. With ``calculate_per_token_loss`` tokens count alike, and it is theirs.
    """
    if batches is not None:
        batches.set_position(consumed_samples)
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    place = (micro_batch_size, ctx.parallel.dp.rank, ctx.parallel.dp.size)
    forward_step = _make_forward_step(ctx, batches, consumed_samples, num_microbatches, place, total)
    gradients = None if forward_only else ctx.state.chunks
    link = ctx.link_for(micro_batch_size)
    run_schedule(forward_step, num_microbatches, link, gradients, num_chunks=len(ctx.state.chunks))
    # The last stage has the sum of its micro-batches; zeros elsewhere along pp.
    ctx.parallel.pp.all_reduce(total)
    ctx.parallel.dp_cp.all_reduce(total)
    loss_sum, weight = total.tolist()
    return loss_sum / max(weight, 1.0), weight


def _make_forward_step(
    ctx: TrainContext,
    batches: BatchLoader | None,
    consumed_samples: int,
    num_microbatches: int,
    place: tuple[int, int, int],
    total: torch.Tensor,
) -> Callable[[int, int, torch.Tensor | None], torch.Tensor]:
    """Return the forward of a micro-batch.

    ``place`` is (micro-batch size, dp rank, dp size); ``total`` adds up (losses, weights).
    """
    fetched: dict[int, dict[str, torch.Tensor]] = {}

    def fetch(index: int, chunk: int) -> dict[str, torch.Tensor]:
        # The first chunk sees the micro-batches in order; later chunks see each of them again.
        if batches is not None and index not in fetched:
            with ctx.timers.section("data", level=2):
                fetched[index] = _to_device(next(batches), ctx.device)
        is_last_use = chunk == len(ctx.state.chunks) - 1
        return fetched.pop(index, {}) if is_last_use else fetched.get(index, {})

    def forward_step(index: int, chunk: int, stage_input: torch.Tensor | None) -> torch.Tensor:
        model = ctx.state.chunks[chunk].module
        # Every stage knows which samples these are without being told: they follow from the progress.
        context = DropoutContext(tuple(sample_indices(consumed_samples, index, *place)))
        batch = fetch(index, chunk)
        inputs = {name: batch[name] for name in ("tokens", "position_ids") if model.chunk.is_first}
        inputs |= {"stage_input": stage_input, "document_ids": batch.get("document_ids")}
        if not model.chunk.is_last:
            return model(context, **inputs)
        loss_BS = model(context, labels=batch["labels"], **inputs)
        mask_BS = batch["loss_mask"].to(loss_BS.dtype)
        loss, tokens = (loss_BS * mask_BS).sum(), mask_BS.sum()
        scale = ctx.state.optimizer.grad_scaler.scale
        if ctx.config.training.calculate_per_token_loss:
            total.add_(torch.stack((loss.detach(), tokens)))
            return loss * scale
        loss = loss / tokens.clamp(min=1.0)
        total.add_(torch.stack((loss.detach(), torch.ones_like(tokens))))
        return loss / num_microbatches * scale

    return forward_step


def _to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
