"""fp16: overflows are left out, the loss scale follows its rules, and a resume continues with it."""

from __future__ import annotations

from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.training.context import TrainContext
from megalite.training.setup import training_run
from megalite.training.step import StepOutput
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LocalState, Topology, global_state, local_state, make_config, run_steps, unequal

WINDOW, HYSTERESIS = 3, 2


def _config(topology: Topology, *changes: dict[str, Any]) -> Config:
    precision = {
        "fp16": True,
        "initial_loss_scale": 2.0**13,
        "min_loss_scale": 2.0**10,
        "loss_scale_window": WINDOW,
        "hysteresis": HYSTERESIS,
    }
    dropout = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
    return make_config({"precision": precision}, dropout, *changes, topology=topology)


OVERFLOWS = (1, 2, 3, 9, 10, 14)
"""Iterations, from 0, in which one rank's gradient is made infinite."""


def _force_overflows(ctx: TrainContext) -> None:
    """Make a gradient of the last rank infinite in the chosen iterations."""
    chunk = ctx.state.chunks[0]
    start = chunk.start_last_backward

    def start_last_backward() -> None:
        start()
        if ctx.progress.iteration in OVERFLOWS and ctx.parallel.world.is_last:
            next(parameter for _, parameter in chunk.parameters()).main_grad.view(-1)[0] = inf

    chunk.start_last_backward = start_last_backward


def _body(config: Config, steps: int) -> tuple[list[StepOutput], list[float], int, LocalState]:
    with training_run(config) as ctx:
        _force_overflows(ctx)
        outputs = run_steps(ctx, steps)
        scaler = ctx.state.optimizer.grad_scaler
        trackers = [scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker]
        return outputs, trackers, ctx.progress.skipped_iterations, local_state(ctx)


def _expected_scales(steps: int) -> list[float]:
    """The rules, written out: halve from the second overflow on, double after a clean window."""
    scale, growth, hysteresis, scales = 2.0**13, 0, HYSTERESIS, []
    for iteration in range(steps):
        scales.append(scale)
        if iteration in OVERFLOWS:
            growth, hysteresis = 0, hysteresis - 1
            if hysteresis <= 0:
                scale = max(scale / 2, 2.0**10)
        else:
            growth += 1
            if growth == WINDOW:
                growth, hysteresis, scale = 0, HYSTERESIS, scale * 2
    return scales


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_loss_scale_follows_the_rules_through_forced_overflows(topology: Topology) -> None:
    ranks = run_on_ranks(prod(topology), _body, _config(topology, {"training": {"train_iters": 20}}), 16)
    for outputs, _, skipped, _ in ranks:
        assert [output.loss_scale for output in outputs] == _expected_scales(16)
        assert [not output.updated for output in outputs] == [i in OVERFLOWS for i in range(16)]
        assert skipped == len(OVERFLOWS)
        assert all(isfinite(output.loss) for output in outputs)


@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_fp16_resumes_bit_for_bit(tmp_path: Path, topology: Topology) -> None:
    length = {"training": {"train_iters": 20}}
    unbroken = run_on_ranks(prod(topology), _body, _config(topology, length), 12)
    saving = {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 3}}
    first = run_on_ranks(prod(topology), _body, _config(topology, length, saving), 3)
    second = run_on_ranks(prod(topology), _body, _config(topology, length, saving), 9)
    for whole, before, after in zip(unbroken, first, second, strict=True):
        assert repr(before[0] + after[0]) == repr(whole[0])
        assert after[1:3] == whole[1:3]
    assert unequal(global_state([r[3] for r in second]), global_state([r[3] for r in unbroken])) == []
