"""Rotary position embedding: queries and keys are turned by an angle that grows with their position.

Half rotation, as in Megatron and Llama: with d = rotary_percent * head size, component i < d / 2 is turned together
with component i + d / 2 by position * base^(-2 i / d). Components from d on are left alone.
"""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Turns [S, B, N, D] tensors whose row s is position s; the angles are kept per device and dtype."""

    def __init__(self, head_size: int, percent: float, base: float) -> None:
        self.width = int(head_size * percent)
        self.base = base
        self._angles: dict[tuple[torch.device, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = (x.device, x.dtype, x.shape[0])
        if key not in self._angles:
            # Angles in at least fp32: in bfloat16 neighbouring positions would coincide.
            exact = torch.float64 if x.dtype == torch.float64 else torch.float32
            exponents = torch.arange(0, self.width, 2, dtype=exact, device=x.device) / self.width
            positions = torch.arange(x.shape[0], dtype=exact, device=x.device)
            angles = torch.outer(positions, 1.0 / self.base**exponents).repeat(1, 2)[:, None, None, :]
            self._angles[key] = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self._angles[key]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with its first components turned."""
        cos, sin = self._cos_sin(x)
        turned, rest = x[..., : self.width], x[..., self.width :]
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
