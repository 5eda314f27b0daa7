"""Activations and their gradients between neighbouring pipeline stages.

Every tensor has one shape and one dtype, [S (/ tp), B, H] in the pipeline's dtype, known to both sides; so nothing but
the values travels. Each direction between two stages is a channel with a process group of its own, in which messages
arrive in the order in which they were sent. Sends return at once and receives may be posted ahead; as no channel
carries both directions, two stages never wait for each other crosswise, in whatever order they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist

from megalite.utils.dist import Group


class Channel(Enum):
    """A direction of travel. The wrapping ones join the last stage to the first, between virtual chunks."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_WRAP = "forward wrap"
    BACKWARD_WRAP = "backward wrap"


@dataclass
class Incoming:
    """A tensor that may still be on its way."""

    tensor: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """Return the tensor once it is there."""
        self.work.wait()
        return self.tensor


@dataclass
class StageLink:
    """The neighbours of a stage in its pipeline, and the tensors they exchange."""

    pp: Group
    channels: Mapping[Channel, dist.ProcessGroup]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    _outgoing: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def send_forward(self, output: torch.Tensor) -> None:
        """Give activations to the following stage; from the last stage to the first one's next chunk."""
        self._send(output.detach(), Channel.FORWARD_WRAP if self.pp.is_last else Channel.FORWARD, +1)

    def post_forward(self) -> Incoming:
        """Start to receive the next activations of the preceding stage."""
        return self._post(Channel.FORWARD_WRAP if self.pp.is_first else Channel.FORWARD, -1)

    def send_backward(self, input_grad: torch.Tensor) -> None:
        """Give a gradient to the preceding stage; from the first stage to the last one's previous chunk."""
        self._send(input_grad, Channel.BACKWARD_WRAP if self.pp.is_first else Channel.BACKWARD, -1)

    def post_backward(self) -> Incoming:
        """Start to receive the next gradient of the following stage."""
        return self._post(Channel.BACKWARD_WRAP if self.pp.is_last else Channel.BACKWARD, +1)

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._outgoing:
            work.wait()
        self._outgoing = []

    def _peer(self, step: int) -> int:
        return self.pp.ranks[(self.pp.rank + step) % self.pp.size]

    def _send(self, tensor: torch.Tensor, channel: Channel, step: int) -> None:
        # A tensor in flight must stay alive; those that have arrived are let go here.
        self._outgoing = [(work, sent) for work, sent in self._outgoing if not work.is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._peer(step), group=self.channels[channel])
        self._outgoing.append((work, tensor))

    def _post(self, channel: Channel, step: int) -> Incoming:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return Incoming(tensor, dist.irecv(tensor, self._peer(step), group=self.channels[channel]))
