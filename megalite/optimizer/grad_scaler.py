"""The factor on the loss that keeps small fp16 gradients from vanishing.

Dynamic: an overflow (a gradient that is not finite) resets the growth count and uses up one unit of hysteresis; with
none left the factor is halved, down to a minimum. ``window`` updates in a row without overflow double it and restore
the hysteresis. Halving does not restore it: after the first one, each further overflow halves at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megalite.config.schema import PrecisionConfig


class ConstantGradScaler:
    """A factor that never changes; 1 for formats that need none."""

    is_dynamic = False
    can_shrink = False
    """Whether an overflow may still be helped by a smaller factor."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Learn whether the step's gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """Return Megatron's keys; none for a constant factor."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the run's factor."""


class DynamicGradScaler(ConstantGradScaler):
    """Finds the largest factor that does not overflow."""

    is_dynamic = True

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        super().__init__(initial)
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

    @property
    def can_shrink(self) -> bool:
        return self.scale > self.minimum

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": torch.tensor([self.scale], dtype=torch.float32),
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved factor; a checkpoint without one (another format) leaves the initial factor."""
        if state:
            self.scale = float(state["scale"].item())
            self.growth_tracker = int(state["growth_tracker"])
            self.hysteresis_tracker = int(state["hysteresis_tracker"])


def build_grad_scaler(precision: PrecisionConfig) -> ConstantGradScaler:
    """Return the scaler that the settings ask for."""
    if not precision.fp16:
        return ConstantGradScaler()
    if precision.loss_scale is not None:
        return ConstantGradScaler(precision.loss_scale)
    return DynamicGradScaler(
        precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis
    )
