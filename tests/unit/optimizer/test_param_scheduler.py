from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleConfig
from megalite.utils.errors import CheckpointError

HI, LO, INIT, WARMUP, DECAY, WSD = 1e-2, 1e-3, 2e-4, 100, 1000, 300

BASE = ScheduleConfig(
    max_lr=HI,
    min_lr=LO,
    lr_warmup_init=INIT,
    lr_warmup_steps=WARMUP,
    lr_decay_steps=DECAY,
    lr_decay_style="cosine",
    wsd_decay_steps=None,
    lr_wsd_decay_style="linear",
    start_wd=0.02,
    end_wd=0.08,
    wd_incr_steps=800,
    wd_incr_style="linear",
)


def _half_cosine(x: float) -> float:
    return (1.0 + math.cos(math.pi * x)) / 2.0


# Rates between the end of the warm-up and the end of the decay, written from the definitions; x runs from 0 to 1.
RATES = {
    "linear": lambda n: HI + (LO - HI) * (n - WARMUP) / (DECAY - WARMUP),
    "cosine": lambda n: LO + (HI - LO) * _half_cosine((n - WARMUP) / (DECAY - WARMUP)),
    "inverse-square-root": lambda n: max(LO, HI * (WARMUP / n) ** 0.5),
    "constant": lambda n: HI,
}
LAST_PHASES = {
    "linear": lambda y: 1.0 - y,
    "cosine": _half_cosine,
    "exponential": lambda y: 2.0 / 2.0**y - 1.0,
    "minus_sqrt": lambda y: 1.0 - y**0.5,
}


@pytest.mark.parametrize("style", RATES)
@pytest.mark.parametrize("n", [101, 102, 250, 550, 999, 1000])
def test_rates_between_warm_up_and_end(style: str, n: int) -> None:
    assert replace(BASE, lr_decay_style=style).learning_rate(n) == pytest.approx(RATES[style](n), rel=1e-12)


@pytest.mark.parametrize("style", [*RATES, "WSD"])
@pytest.mark.parametrize("n", [0, 1, 37, 99, 100])
def test_warm_up_is_a_line_from_init(style: str, n: int) -> None:
    config = replace(BASE, lr_decay_style=style, wsd_decay_steps=WSD)
    assert config.learning_rate(n) == pytest.approx(INIT + (HI - INIT) * n / WARMUP, rel=1e-12)


@pytest.mark.parametrize("n", [1001, 10**9])
@pytest.mark.parametrize(
    ("style", "rate"), [("linear", LO), ("cosine", LO), ("inverse-square-root", LO), ("WSD", LO), ("constant", HI)]
)
def test_rates_beyond_the_end(style: str, rate: float, n: int) -> None:
    assert replace(BASE, lr_decay_style=style, wsd_decay_steps=WSD).learning_rate(n) == rate


@pytest.mark.parametrize("shape", LAST_PHASES)
def test_wsd_is_flat_and_then_has_a_last_phase(shape: str) -> None:
    config = replace(BASE, lr_decay_style="WSD", wsd_decay_steps=WSD, lr_wsd_decay_style=shape)
    assert [config.learning_rate(n) for n in (101, 400, 700)] == pytest.approx([HI] * 3, rel=1e-15)
    for n in (701, 760, 850, 1000):
        expected = LO + (HI - LO) * LAST_PHASES[shape]((n - 700) / WSD)
        assert config.learning_rate(n) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_without_a_warm_up() -> None:
    config = replace(BASE, lr_warmup_steps=0)
    assert config.learning_rate(0) == pytest.approx(HI, rel=1e-15)
    assert replace(config, lr_decay_style="linear").learning_rate(250) == pytest.approx(HI - (HI - LO) / 4)
    assert replace(config, lr_decay_style="inverse-square-root").learning_rate(0) == HI
    assert replace(config, lr_decay_style="inverse-square-root").learning_rate(16) == pytest.approx(HI / 4)


def test_a_warm_up_may_be_a_fraction_of_a_sample_count() -> None:
    config = replace(BASE, lr_warmup_steps=2.5, lr_warmup_init=0.0)
    assert config.learning_rate(1) == pytest.approx(HI / 2.5)
    assert config.learning_rate(3) == pytest.approx(LO + (HI - LO) * _half_cosine(0.5 / 997.5))


@pytest.mark.parametrize("n", [0, 1, 200, 799, 800, 801, 10**9])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay(style: str, n: int) -> None:
    r = min(1.0, n / 800)
    rise = {"constant": 1.0, "linear": r, "cosine": _half_cosine(1.0 - r)}[style]
    expected = 0.02 + (0.08 - 0.02) * rise
    assert replace(BASE, wd_incr_style=style).weight_decay(n) == pytest.approx(expected, rel=1e-12)


def _groups() -> list[dict[str, Any]]:
    return [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 0.5}, {}]


def _scheduler(**changes: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(_groups(), replace(BASE, **changes))


def test_groups_are_set_from_the_start_and_by_each_step() -> None:
    scheduler = _scheduler()
    assert [g["lr"] for g in scheduler.param_groups] == [INIT, 0.5 * INIT, INIT]
    assert [g["weight_decay"] for g in scheduler.param_groups] == [0.02, 0.0, 0.02]
    scheduler.step(150)
    scheduler.step(150)
    rate, decay = BASE.learning_rate(300), BASE.weight_decay(300)
    assert scheduler.lr == rate
    assert [g["lr"] for g in scheduler.param_groups] == [rate, 0.5 * rate, rate]
    assert [g["weight_decay"] for g in scheduler.param_groups] == [decay, 0.0, decay]


def test_a_resumed_schedule_goes_on() -> None:
    first = _scheduler()
    first.step(320)
    second = _scheduler()
    # The present count is replaced, not added to.
    second.step(48)
    second.load_state_dict(first.state_dict())
    assert second.num_steps == 320
    assert second.param_groups == first.param_groups
    for scheduler in (first, second):
        scheduler.step(16)
    assert second.param_groups == first.param_groups


def test_the_state_is_plain() -> None:
    state = _scheduler().state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state
    assert {"max_lr", "min_lr", "lr_decay_style", "num_steps", "wd_incr_steps", "end_wd"} <= set(state)


CHANGES = [
    {"max_lr": 2e-2},
    {"min_lr": 0.0},
    {"lr_warmup_steps": 50},
    {"lr_decay_steps": 2000},
    {"lr_decay_style": "linear"},
    {"start_wd": 0.01},
    {"end_wd": 0.1},
    {"wd_incr_steps": 1600},
    {"wd_incr_style": "cosine"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_changed_schedule_is_refused_or_chosen(change: dict[str, Any]) -> None:
    saved = _scheduler()
    saved.step(500)
    ((name, value),) = change.items()
    refusing = _scheduler(**change)
    with pytest.raises(CheckpointError, match=f"{name} {getattr(BASE, name)} -> {value}.*override_opt_param_scheduler"):
        refusing.load_state_dict(saved.state_dict())
    assert refusing.num_steps == 0
    own = _scheduler(**change)
    own.load_state_dict(saved.state_dict(), override=True)
    assert (own.num_steps, own.lr) == (500, replace(BASE, **change).learning_rate(500))
    theirs = _scheduler(**change)
    theirs.load_state_dict(saved.state_dict(), use_checkpoint=True)
    assert theirs.param_groups == saved.param_groups
    assert theirs.config == BASE


def test_all_differences_are_named() -> None:
    with pytest.raises(CheckpointError, match="max_lr .*, min_lr "):
        _scheduler(max_lr=1.0, min_lr=0.5).load_state_dict(_scheduler().state_dict())


@pytest.mark.parametrize(
    "changes",
    [{"lr_decay_steps": 5000}, {"min_lr": 0.0}, {"wd_incr_steps": 5000}],
    ids=lambda changes: next(iter(changes)),
)
def test_numbers_without_effect_may_change(changes: dict[str, Any]) -> None:
    constant = {"lr_decay_style": "constant", "wd_incr_style": "constant", "start_wd": 0.08}
    scheduler = _scheduler(**constant, **changes)
    scheduler.load_state_dict(_scheduler(**constant).state_dict() | {"num_steps": 64})
    assert scheduler.num_steps == 64
    with pytest.raises(CheckpointError):
        _scheduler(**changes).load_state_dict(_scheduler().state_dict())


def _wsd_of_megatron() -> dict[str, Any]:
    """A saved WSD schedule without the keys that only we save."""
    saved = _scheduler(lr_decay_style="WSD", wsd_decay_steps=300)
    saved.step(800)
    ours = ("lr_warmup_init", "wsd_decay_steps", "lr_wsd_decay_style")
    return {name: value for name, value in saved.state_dict().items() if name not in ours}


def test_the_last_phase_of_wsd_is_the_runs_where_it_is_not_saved() -> None:
    run = _scheduler(lr_decay_style="WSD", wsd_decay_steps=400)
    run.load_state_dict(_wsd_of_megatron(), use_checkpoint=True)
    assert run.lr == replace(BASE, lr_decay_style="WSD", wsd_decay_steps=400).learning_rate(800)


def test_wsd_of_a_checkpoint_needs_a_last_phase() -> None:
    with pytest.raises(CheckpointError, match="lr_wsd_decay_iters"):
        _scheduler().load_state_dict(_wsd_of_megatron(), use_checkpoint=True)


@pytest.mark.parametrize(
    "change", [{"wsd_decay_steps": 400}, {"lr_wsd_decay_style": "cosine"}, {"lr_warmup_init": 0.005}], ids=str
)
def test_another_last_phase_or_start_is_refused(change: dict[str, Any]) -> None:
    saved = _scheduler(lr_decay_style="WSD", wsd_decay_steps=300).state_dict()
    run = _scheduler(**{"lr_decay_style": "WSD", "wsd_decay_steps": 300, **change})
    with pytest.raises(CheckpointError, match=next(iter(change))):
        run.load_state_dict(saved)
    run.load_state_dict(saved, use_checkpoint=True)
    assert run.state_dict() == saved


def test_keys_that_a_checkpoint_lacks_are_not_compared() -> None:
    state = _scheduler().state_dict()
    del state["wd_incr_steps"]
    scheduler = _scheduler(wd_incr_steps=5)
    scheduler.load_state_dict(state | {"num_steps": 8})
    assert scheduler.num_steps == 8
