"""Learning rate and weight decay as functions of the number of samples whose updates were made.

The unit is samples, not iterations, so that the schedule does not depend on how the batch size changes. With n samples
done, W warm-up, D decay, hi and lo the largest and smallest rate, x = (n - W) / (D - W):

    n <= W (W > 0)       init + (hi - init) * n / W
    constant             hi
    n > D                lo
    inverse-square-root  max(lo, hi * sqrt(max(W, 1)) / sqrt(max(n, 1)))
    otherwise            lo + c * (hi - lo),  c = 1 - x (linear), (cos(pi x) + 1) / 2 (cosine)
    WSD                  c = 1 up to a = D - wsd, then with y = (n - a) / wsd: 1 - y, (cos(pi y) + 1) / 2,
                         2 * 0.5^y - 1 (exponential), 1 - sqrt(y) (minus_sqrt)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.utils.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A schedule in samples; nothing is left to be derived."""

    max_lr: float
    min_lr: float
    lr_warmup_init: float
    lr_warmup_steps: float
    lr_decay_steps: int
    lr_decay_style: str
    wsd_decay_steps: int | None
    lr_wsd_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str

    def learning_rate(self, n: int) -> float:
        """Return the rate after ``n`` samples."""
        hi, lo, warmup = self.max_lr, self.min_lr, self.lr_warmup_steps
        if warmup > 0 and n <= warmup:
            return self.lr_warmup_init + (hi - self.lr_warmup_init) * n / warmup
        if self.lr_decay_style == "constant":
            return hi
        if n > self.lr_decay_steps:
            return lo
        if self.lr_decay_style == "inverse-square-root":
            return max(lo, hi * math.sqrt(max(warmup, 1)) / math.sqrt(max(n, 1)))
        x = (n - warmup) / (self.lr_decay_steps - warmup)
        if self.lr_decay_style == "WSD":
            return lo + self._wsd(n) * (hi - lo)
        c = 1.0 - x if self.lr_decay_style == "linear" else (math.cos(math.pi * x) + 1.0) / 2.0
        return lo + c * (hi - lo)

    def _wsd(self, n: int) -> float:
        start = self.lr_decay_steps - self.wsd_decay_steps
        if n <= start:
            return 1.0
        y = (n - start) / self.wsd_decay_steps
        return {
            "linear": 1.0 - y,
            "cosine": (math.cos(math.pi * y) + 1.0) / 2.0,
            "exponential": 2.0 * 0.5**y - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(y),
        }[self.lr_wsd_decay_style]

    def weight_decay(self, n: int) -> float:
        """Return the decay after ``n`` samples: from ``start_wd`` to ``end_wd`` over ``wd_incr_steps``."""
        if n > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        r = n / self.wd_incr_steps
        c = r if self.wd_incr_style == "linear" else (math.cos(math.pi * (1.0 - r)) + 1.0) / 2.0
        return self.start_wd + c * (self.end_wd - self.start_wd)


_COMPARED = (
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
    # Megatron does not save these.
    "lr_warmup_init",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
)


class OptimizerParamScheduler:
    """Sets ``lr`` and ``weight_decay`` of the parameter groups from the number of samples done."""

    def __init__(self, param_groups: Sequence[dict[str, Any]], config: ScheduleConfig) -> None:
        self.param_groups = param_groups
        self.config = config
        self.num_steps = 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Count ``increment`` samples whose update was made, and set the groups for the next one."""
        self.num_steps += increment
        for group in self.param_groups:
            group["lr"] = self.config.learning_rate(self.num_steps) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.weight_decay(self.num_steps) * group.get("wd_mult", 1.0)

    @property
    def lr(self) -> float:
        return self.config.learning_rate(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return Megatron's keys and three more, as plain values."""
        return {name: getattr(self.config, name) for name in _COMPARED} | {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any], override: bool = False, use_checkpoint: bool = False) -> None:
        """Go on from the saved number of samples.

        A schedule that differs from the run's is refused, unless ``override`` says to take the run's or
        ``use_checkpoint`` to take the saved one. Megatron's checkpoints say nothing of WSD's last phase.
        """
        saved = {name: state[name] for name in _COMPARED if name in state}
        different = [name for name in self._effective(saved) if saved[name] != getattr(self.config, name)]
        if different and not (override or use_checkpoint):
            lines = ", ".join(f"{name} {saved[name]} -> {getattr(self.config, name)}" for name in different)
            raise CheckpointError(
                f"the schedule of learning rate and weight decay in the checkpoint differs from the run's: {lines} "
                "(counts in samples). Restore the settings, or choose: optimizer.override_opt_param_scheduler takes "
                "the run's, optimizer.use_checkpoint_opt_param_scheduler the checkpoint's"
            )
        if use_checkpoint:
            self.config = self._adopted(saved)
        self.num_steps = 0
        self.step(int(state["num_steps"]))

    def _adopted(self, saved: Mapping[str, Any]) -> ScheduleConfig:
        config = replace(self.config, **saved)
        if config.lr_decay_style == "WSD" and config.wsd_decay_steps is None:
            raise CheckpointError(
                f"the checkpoint's lr_decay_style is WSD, the run's is {self.config.lr_decay_style}, and the length of "
                "WSD's last phase is not saved; set optimizer.lr_decay_style to WSD with lr_wsd_decay_iters or "
                "lr_wsd_decay_samples, or choose optimizer.override_opt_param_scheduler"
            )
        return config

    def _effective(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names that matter to either schedule: a constant rate or decay does not depend on a length."""
        unused = set()
        if saved.get("lr_decay_style") == self.config.lr_decay_style == "constant":
            unused |= {"lr_decay_steps", "min_lr"}
        if "WSD" not in (saved.get("lr_decay_style"), self.config.lr_decay_style):
            unused |= {"wsd_decay_steps", "lr_wsd_decay_style"}
        if saved.get("lr_warmup_steps") == self.config.lr_warmup_steps == 0:
            unused |= {"lr_warmup_init"}
        if saved.get("wd_incr_style") == self.config.wd_incr_style == "constant":
            unused |= {"wd_incr_steps", "start_wd"}
        return [name for name in saved if name not in unused]
