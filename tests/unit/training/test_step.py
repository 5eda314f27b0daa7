"""Steps, validation and the loop on one process."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.parallel.random import DropoutContext
from megalite.training.context import TrainContext
from megalite.training.evaluate import evaluate, is_evaluation_due
from megalite.training.exit import ExitReason
from megalite.training.loop import advance, train
from megalite.training.setup import training_run
from megalite.training.step import train_step
from megalite.utils.errors import NumericsError
from tests.unit.samples import only_model, small_config

SHORT = {"training": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 4}}
VALIDATED = {"training": {"eval_interval": 2, "eval_iters": 2}}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class _Batches:
    """Four micro-batches of two samples; the third masks one of its samples but for a single token."""

    def __init__(self, loss_mask: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for index in range(4):
            tokens = torch.randint(0, 20, (2, 9), generator=generator)
            mask = torch.full((2, 8), loss_mask)
            if index == 2:
                mask[1, 1:] = 0.0
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
            self.batches.append(batch | {"position_ids": torch.arange(8).expand(2, 8)})
        self.positions: list[int] = []

    def set_position(self, consumed: int) -> None:
        self.positions.append(consumed)
        self.next = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        self.next += 1
        return self.batches[self.next - 1]


def _mean_loss(ctx: TrainContext, batches: _Batches) -> float:
    """The mean over micro-batches of their mean over tokens that count, from the logits alone."""
    means = []
    with torch.no_grad():
        for batch in batches.batches:
            logits = only_model(ctx.state)(
                DropoutContext((0, 1)), tokens=batch["tokens"], position_ids=batch["position_ids"]
            ).double()
            token_loss = -logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
            means.append((token_loss * batch["loss_mask"]).sum().item() / max(1.0, batch["loss_mask"].sum().item()))
    return math.fsum(means) / len(means)


def test_loss_is_the_mean_of_micro_batch_means() -> None:
    with training_run(small_config(SHORT)) as ctx:
        ctx.train_batches = batches = _Batches()
        expected = _mean_loss(ctx, batches)
        output = train_step(ctx)
        assert output.loss == pytest.approx(expected, rel=1e-6)
        assert output.updated and output.lr == 2e-3 and output.grad_norm > 0.0
        assert batches.positions == [0]


def test_gradient_is_that_of_the_loss() -> None:
    with training_run(small_config(SHORT)) as ctx:
        ctx.train_batches = batches = _Batches()
        bias = only_model(ctx.state).decoder.final_layernorm.bias
        index = bias.detach().abs().argmin().item()
        slopes = []
        for shift in (1e-2, -1e-2):
            bias.data[index] += shift
            slopes.append(_mean_loss(ctx, batches))
            bias.data[index] -= shift
        # The gradient buffer still holds what the optimizer clipped in place, so its factor is divided out.
        output = train_step(ctx)
        factor = min(1.0, ctx.config.optimizer.clip_grad / (output.grad_norm + 1e-6))
        assert bias.main_grad[index].item() / factor == pytest.approx((slopes[0] - slopes[1]) / 2e-2, rel=2e-2)


def test_a_batch_without_a_token_that_counts_gives_zero() -> None:
    with training_run(small_config(SHORT)) as ctx:
        ctx.train_batches = _Batches(loss_mask=0.0)
        output = train_step(ctx)
        assert (output.loss, output.grad_norm) == (0.0, 0.0)


def test_each_step_starts_from_zero_gradients_and_its_own_samples() -> None:
    with training_run(small_config(SHORT, {"optimizer": {"lr": 0.0, "weight_decay": 0.0}})) as ctx:
        ctx.train_batches = batches = _Batches()
        outputs = []
        for _ in range(2):
            outputs.append(train_step(ctx))
            advance(ctx, outputs[-1])
        assert outputs[0].grad_norm == outputs[1].grad_norm > 0.0
        assert batches.positions == [0, 8]


# In a sum over ranks NaN travels as infinity.
@pytest.mark.parametrize(("where", "text", "value"), [("loss", "loss", "nan"), ("gradient", "gradient norm", "inf")])
def test_numbers_that_are_not_finite_stop_the_run(where: str, text: str, value: str) -> None:
    with training_run(small_config(SHORT)) as ctx:
        ctx.train_batches = _Batches()
        _poison(ctx, where)
        with pytest.raises(NumericsError, match=f"the {text} of iteration 1 .samples 0 to 7. is {value}; nothing was"):
            train_step(ctx)
        assert ctx.state.scheduler.num_steps == 0 and ctx.state.optimizer.num_steps == 0


def _poison(ctx: TrainContext, where: str) -> None:
    weight = only_model(ctx.state).decoder.final_layernorm.weight
    if where == "loss":
        weight.data[0] = math.nan
    else:
        # A finite loss with a gradient that is not.
        weight.register_hook(lambda grad: grad * math.nan)


def test_a_skipped_update_consumes_its_samples_and_leaves_the_schedule() -> None:
    unchecked = {"resilience": {"check_for_nan_in_loss_and_grad": False}}
    with training_run(small_config(SHORT, unchecked)) as ctx:
        ctx.train_batches = _Batches()
        _poison(ctx, "gradient")
        before = [p.detach().clone() for p in only_model(ctx.state).parameters()]
        output = train_step(ctx)
        advance(ctx, output)
        assert not output.updated
        assert all(torch.equal(a, b) for a, b in zip(before, only_model(ctx.state).parameters(), strict=True))
        progress = ctx.progress
        assert (progress.iteration, progress.consumed_train_samples, progress.skipped_iterations) == (1, 8, 1)
        assert ctx.state.scheduler.num_steps == 0


# fp16

SCALE = {"initial_loss_scale": 2.0**10, "min_loss_scale": 2.0**8, "loss_scale_window": 3, "hysteresis": 2}
FP16 = {"precision": {"fp16": True, **SCALE}}


def test_fp16_reports_what_was_there_without_the_scale() -> None:
    outputs = []
    for precision in ({}, FP16):
        with training_run(small_config(SHORT, precision)) as ctx:
            ctx.train_batches = _Batches()
            outputs.append(train_step(ctx))
    assert outputs[1].loss == pytest.approx(outputs[0].loss, rel=1e-3)
    assert outputs[1].grad_norm == pytest.approx(outputs[0].grad_norm, rel=1e-2)
    assert [output.loss_scale for output in outputs] == [1.0, 2.0**10]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_overflows_are_expected_while_the_scale_is_found(where: str) -> None:
    with training_run(small_config(SHORT, FP16)) as ctx:
        ctx.train_batches = _Batches()
        _poison(ctx, where)
        before = [p.detach().clone() for p in only_model(ctx.state).parameters()]
        scales = []
        # At the least scale, 2^8, a loss that is not finite is no longer the scale's fault.
        for _ in range(5 if where == "gradient" else 3):
            output = train_step(ctx)
            advance(ctx, output)
            scales.append(output.loss_scale)
            assert not output.updated
        assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8][: len(scales)]
        if where == "loss":
            with pytest.raises(NumericsError, match="the loss of iteration 4"):
                train_step(ctx)
        after = only_model(ctx.state).parameters()
        assert all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(before, after, strict=True))
        progress = ctx.progress
        count = len(scales)
        counters = (progress.iteration, progress.consumed_train_samples, progress.skipped_iterations)
        assert counters == (count, 8 * count, count)
        assert ctx.state.scheduler.num_steps == ctx.state.optimizer.num_steps == 0


def test_an_overflow_with_a_constant_scale_stops_the_run() -> None:
    with training_run(small_config(SHORT, {"precision": {"fp16": True, "loss_scale": 64.0}})) as ctx:
        ctx.train_batches = _Batches()
        _poison(ctx, "gradient")
        with pytest.raises(NumericsError, match="the gradient norm of iteration 1"):
            train_step(ctx)


def test_the_loss_scale_goes_through_a_checkpoint(tmp_path: Path) -> None:
    # Three clean steps double it; at the checkpoint one step of the next window is done.
    config = small_config(SHORT, FP16, {"training": {"train_iters": 8}}, _saving(tmp_path, exit_interval=4))
    with training_run(config) as ctx:
        assert train(ctx) is ExitReason.INTERVAL
        scaler = ctx.state.optimizer.grad_scaler
        assert (scaler.scale, scaler.growth_tracker) == (2.0**11, 1)
    with training_run(config) as ctx:
        scaler = ctx.state.optimizer.grad_scaler
        assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (2.0**11, 1, 2)
        train(ctx)
        assert (scaler.scale, scaler.growth_tracker) == (2.0**12, 2)


# Iterations that are left out, and batches that grow


def test_a_skipped_iteration_consumes_its_samples_and_changes_nothing() -> None:
    with training_run(small_config(SHORT, {"training": {"iterations_to_skip": [1, 3], "train_iters": 3}})) as ctx:
        before = [p.detach().clone() for p in only_model(ctx.state).parameters()]
        seen: list[int] = []
        set_position = ctx.train_batches.set_position
        ctx.train_batches.set_position = lambda consumed: (seen.append(consumed), set_position(consumed))
        assert train(ctx) is ExitReason.FINISHED
        assert seen == [8], "only the second iteration looked at its samples"
        progress = ctx.progress
        assert (progress.iteration, progress.consumed_train_samples) == (3, 24)
        assert (progress.skipped_iterations, progress.skipped_train_samples) == (0, 16)
        assert ctx.state.scheduler.num_steps == 8 and ctx.state.optimizer.num_steps == 1
        assert not all(torch.equal(a, b) for a, b in zip(before, only_model(ctx.state).parameters(), strict=True))


def test_the_batch_grows_behind_a_checkpoint(tmp_path: Path) -> None:
    ramp = {"training": {"rampup_batch_size": [2, 2, 12], "global_batch_size": 6, "train_iters": 6}}
    with training_run(small_config(SHORT, ramp, _saving(tmp_path))) as ctx:
        train(ctx)
        # 2 up to sample 6, 4 up to sample 12 (reached with 14), then 6.
        assert ctx.progress.consumed_train_samples == 3 * 2 + 2 * 4 + 6
        assert ctx.state.scheduler.num_steps == 20
    assert sorted(folder.name for folder in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000005", "iter_0000006"]


def test_progress_counts_samples_and_operations() -> None:
    with training_run(small_config(SHORT)) as ctx:
        for _ in range(2):
            advance(ctx, train_step(ctx))
        assert (ctx.progress.iteration, ctx.progress.consumed_train_samples) == (2, 16)
        assert ctx.progress.num_floating_point_operations_so_far == 16 * ctx.flops_per_sequence > 0.0
        assert ctx.state.scheduler.num_steps == 16


def test_validation_moves_nothing_but_its_own_position() -> None:
    dropout = {"model": {"hidden_dropout": 0.5, "attention_dropout": 0.5}}
    with training_run(small_config(SHORT, VALIDATED, dropout)) as ctx:
        ctx.progress.iteration = 2
        assert is_evaluation_due(ctx)
        weights = [p.detach().clone() for p in only_model(ctx.state).parameters()]
        streams = (torch.get_rng_state(), ctx.state.tracker.get_states())
        first, again = evaluate(ctx), evaluate(ctx)
        assert ctx.progress.consumed_valid_samples == {"valid": 32} and ctx.progress.consumed_train_samples == 0
        assert first != again, "the second validation goes on with the next samples"
        ctx.progress.consumed_valid_samples["valid"] = 0
        assert evaluate(ctx) == first
        assert only_model(ctx.state).training
        assert all(torch.equal(a, b) for a, b in zip(weights, only_model(ctx.state).parameters(), strict=True))
        assert torch.equal(torch.get_rng_state(), streams[0])
        assert all(torch.equal(s, streams[1][name]) for name, s in ctx.state.tracker.get_states().items())


@pytest.mark.parametrize(
    ("iteration", "settings", "is_due"),
    [(2, {}, True), (3, {}, False), (2, {"eval_iters": 0}, False), (2, {"eval_interval": None}, False)],
    ids=str,
)
def test_when_a_validation_is_due(iteration: int, settings: dict[str, Any], is_due: bool) -> None:
    with training_run(small_config(SHORT, VALIDATED, {"training": settings})) as ctx:
        ctx.progress.iteration = iteration
        assert is_evaluation_due(ctx) == is_due


def test_a_signal_cuts_a_validation_short() -> None:
    with training_run(small_config(SHORT, VALIDATED)) as ctx:
        signal.raise_signal(signal.SIGTERM)
        assert evaluate(ctx) == {}
        assert only_model(ctx.state).training
        assert ctx.progress.consumed_valid_samples == {"valid": 16}, "as if it had been done"


def _saving(folder: Path, **training: Any) -> dict[str, dict[str, Any]]:
    return {"checkpoint": {"save": str(folder)}, "training": training}


def test_the_loop_ends_with_the_last_iteration_saved(tmp_path: Path) -> None:
    config = small_config(SHORT, VALIDATED, _saving(tmp_path))
    with training_run(config) as ctx:
        assert train(ctx) is ExitReason.FINISHED
        assert ctx.progress.iteration == 4 and ctx.progress.consumed_valid_samples == {"valid": 32}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    with training_run(config) as ctx:
        published = ctx.last_save
        assert train(ctx) is ExitReason.FINISHED
        assert ctx.progress.iteration == 4 and ctx.last_save is published, "nothing is left to do or to save"


def test_the_loop_goes_on_from_where_it_was_stopped(tmp_path: Path) -> None:
    with training_run(small_config(SHORT)) as ctx:
        train(ctx)
        unbroken = [p.detach().clone() for p in only_model(ctx.state).parameters()]
    config = small_config(SHORT, _saving(tmp_path, exit_interval=3))
    with training_run(config) as ctx:
        assert train(ctx) is ExitReason.INTERVAL
        assert ctx.progress.iteration == 3
    with training_run(config) as ctx:
        assert ctx.progress.iteration == 3
        assert train(ctx) is ExitReason.FINISHED
        assert all(torch.equal(a, b) for a, b in zip(unbroken, only_model(ctx.state).parameters(), strict=True))


def test_a_signal_during_set_up_stops_before_the_first_iteration(tmp_path: Path) -> None:
    with training_run(small_config(SHORT, _saving(tmp_path))) as ctx:
        signal.raise_signal(signal.SIGTERM)
        assert train(ctx) is ExitReason.SIGNAL
        assert ctx.progress.iteration == 0 and ctx.checkpoints.published is None
