"""Activations and their gradients between neighbouring pipeline stages.

Every tensor has one shape and one dtype, [S (/ tp), B, H] in the pipeline's dtype, known to both sides; so nothing but
the values travels. A send and a receive that may cross are posted together, or two stages would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.utils.dist import Group


@dataclass(frozen=True)
class StageLink:
    """The two neighbours of a stage in its pipeline, and the tensors they exchange."""

    pp: Group
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def _exchange(self, send: list[tuple[torch.Tensor, int]], receive_from: list[int]) -> list[torch.Tensor]:
        received = [torch.empty(self.shape, dtype=self.dtype, device=self.device) for _ in receive_from]
        operations = [dist.P2POp(dist.isend, t.contiguous(), self.pp.ranks[to], self.pp.handle) for t, to in send]
        operations += [
            dist.P2POp(dist.irecv, t, self.pp.ranks[source], self.pp.handle)
            for t, source in zip(received, receive_from, strict=True)
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received

    def receive_forward(self) -> torch.Tensor | None:
        """Return the previous stage's activations; None on the first stage."""
        if self.pp.is_first:
            return None
        return self._exchange([], [self.pp.rank - 1])[0].requires_grad_()

    def send_forward(self, output: torch.Tensor | None) -> None:
        """Give activations to the next stage; nothing on the last stage."""
        if not self.pp.is_last and output is not None:
            self._exchange([(output.detach(), self.pp.rank + 1)], [])

    def receive_backward(self) -> torch.Tensor | None:
        """Return the gradient of this stage's output; None on the last stage, whose output is the loss."""
        if self.pp.is_last:
            return None
        return self._exchange([], [self.pp.rank + 1])[0]

    def send_backward(self, input_grad: torch.Tensor | None) -> None:
        """Give the gradient of this stage's input to the previous stage; nothing on the first stage."""
        if not self.pp.is_first and input_grad is not None:
            self._exchange([(input_grad, self.pp.rank - 1)], [])

    def send_forward_receive_backward(self, output: torch.Tensor) -> torch.Tensor | None:
        """Give activations to the next stage and take the gradient of an earlier micro-batch from it."""
        if self.pp.is_last:
            return None
        return self._exchange([(output.detach(), self.pp.rank + 1)], [self.pp.rank + 1])[0]

    def send_backward_receive_forward(self, input_grad: torch.Tensor | None) -> torch.Tensor | None:
        """Give a gradient to the previous stage and take the next micro-batch's activations from it."""
        if self.pp.is_first:
            return None
        return self._exchange([(input_grad, self.pp.rank - 1)], [self.pp.rank - 1])[0].requires_grad_()
