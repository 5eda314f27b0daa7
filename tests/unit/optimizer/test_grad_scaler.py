from __future__ import annotations

import io
import random

import pytest
import torch

from megalite.config.schema import PrecisionConfig
from megalite.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler

# Initial factor 64, minimum 8, window 3, hysteresis 2. Overflow (x) or not (.), then factor, growth, hysteresis left.
TABLE = [
    ("x", 64.0, 0, 1),
    (".", 64.0, 1, 1),
    # The second overflow uses the hysteresis up: halved, and growth begins anew.
    ("x", 32.0, 0, 0),
    # Halving has not restored the hysteresis: each further overflow halves at once.
    ("x", 16.0, 0, -1),
    (".", 16.0, 1, -1),
    (".", 16.0, 2, -1),
    ("x", 8.0, 0, -2),
    # Never below the minimum.
    ("x", 8.0, 0, -3),
    (".", 8.0, 1, -3),
    (".", 8.0, 2, -3),
    # A clean window doubles and restores the hysteresis.
    (".", 16.0, 0, 2),
    ("x", 16.0, 0, 1),
    (".", 16.0, 1, 1),
    (".", 16.0, 2, 1),
    (".", 32.0, 0, 2),
    (".", 32.0, 1, 2),
    (".", 32.0, 2, 2),
    (".", 64.0, 0, 2),
]


def test_a_history_by_hand() -> None:
    scaler = DynamicGradScaler(64.0, 8.0, window=3, hysteresis=2)
    for step, (kind, scale, growth, hysteresis) in enumerate(TABLE):
        scaler.update(kind == "x")
        assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (scale, growth, hysteresis), step


@pytest.mark.parametrize(("window", "hysteresis", "minimum"), [(1, 1, 1.0), (4, 3, 0.25), (7, 2, 1.0)])
def test_long_histories_follow_the_rules(window: int, hysteresis: int, minimum: float) -> None:
    generator = random.Random(window)
    scaler = DynamicGradScaler(2.0**16, minimum, window, hysteresis)
    scale, growth, left = 2.0**16, 0, hysteresis
    for _ in range(2000):
        found_inf = generator.random() < 0.3
        scaler.update(found_inf)
        if found_inf:
            growth, left = 0, left - 1
            scale = max(scale * 0.5, minimum) if left <= 0 else scale
        else:
            growth += 1
            if growth == window:
                growth, left, scale = 0, hysteresis, scale * 2.0
        assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (scale, growth, left)


def test_defaults_are_megatrons() -> None:
    scaler = build_grad_scaler(PrecisionConfig(fp16=True))
    assert isinstance(scaler, DynamicGradScaler) and scaler.is_dynamic
    assert (scaler.scale, scaler.minimum, scaler.window, scaler.hysteresis) == (2.0**32, 1.0, 1000, 2)


def test_settings_reach_the_scaler() -> None:
    settings = {"initial_loss_scale": 64.0, "min_loss_scale": 8.0, "loss_scale_window": 3, "hysteresis": 5}
    scaler = build_grad_scaler(PrecisionConfig(fp16=True, **settings))
    assert (scaler.scale, scaler.minimum, scaler.window, scaler.hysteresis) == (64.0, 8.0, 3, 5)


@pytest.mark.parametrize(
    ("precision", "scale"),
    [({}, 1.0), ({"bf16": True}, 1.0), ({"float64": True}, 1.0), ({"fp16": True, "loss_scale": 1024.0}, 1024.0)],
    ids=str,
)
def test_other_formats_and_a_given_factor_are_constant(precision: dict, scale: float) -> None:
    scaler = build_grad_scaler(PrecisionConfig(**precision))
    assert type(scaler) is ConstantGradScaler and not scaler.is_dynamic
    for found_inf in (True, True, False):
        scaler.update(found_inf)
    assert scaler.scale == scale
    assert scaler.state_dict() == {}


def test_state_goes_round_in_megatrons_keys() -> None:
    scaler = DynamicGradScaler(64.0, 8.0, window=3, hysteresis=2)
    for kind, *_ in TABLE[:6]:
        scaler.update(kind == "x")
    buffer = io.BytesIO()
    torch.save(scaler.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert state["scale"].shape == (1,) and state["scale"].dtype == torch.float32
    fresh = DynamicGradScaler(2.0**32, 8.0, window=3, hysteresis=2)
    fresh.load_state_dict(state)
    for kind, scale, growth, hysteresis in TABLE[6:]:
        fresh.update(kind == "x")
        assert (fresh.scale, fresh.growth_tracker, fresh.hysteresis_tracker) == (scale, growth, hysteresis)


def test_a_checkpoint_of_another_format_leaves_the_factor() -> None:
    dynamic = DynamicGradScaler(64.0, 8.0, window=3, hysteresis=2)
    dynamic.load_state_dict({})
    assert (dynamic.scale, dynamic.growth_tracker, dynamic.hysteresis_tracker) == (64.0, 0, 2)
    constant = ConstantGradScaler(128.0)
    constant.load_state_dict(DynamicGradScaler(64.0, 8.0, window=3, hysteresis=2).state_dict())
    assert constant.scale == 128.0
