"""Flat buffers for parameters and gradients, cut into buckets, and the arithmetic of who owns what.

The layout is Megatron's: parameters in reverse order of registration (the order in which their gradients arrive), each
starting at a multiple of 64 elements; a bucket is closed once it holds ``bucket_size`` elements, and its end is padded
so that it can be cut over the data-parallel group. Two rules are ours:

* The layout depends on the parameters, the data-parallel size and ``bucket_size`` only; not on overlap, on the stage or
  on the kind of optimizer.
* Shards are cut at multiples of 64 elements, so that a row of 64 elements, over which norms are summed, and a vector
  register of an optimizer kernel never cross a cut. A bucket is padded to a multiple of lcm(64 * dp, 128).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.layers import traits
from megalite.utils.dist import Group, all_gather_single, reduce_scatter_single

ROW = 64


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BucketLayout:
    """Elements [start, end) of a buffer; the last ``end - start - numel_unpadded`` of them are padding."""

    start: int
    end: int
    numel_unpadded: int
    parameters: tuple[int, ...]
    """Indices of its parameters, in buffer order."""

    def shard(self, rank: int, size: int) -> tuple[int, int]:
        """Return the elements [start, end) of the buffer that data-parallel ``rank`` of ``size`` owns."""
        share = (self.end - self.start) // size
        return self.start + rank * share, self.start + (rank + 1) * share


@dataclass(frozen=True)
class BufferLayout:
    """Where each parameter lies in a buffer."""

    ranges: tuple[tuple[int, int], ...]
    """[start, end) of each parameter, by its index in order of registration."""
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1].end if self.buckets else 0


@dataclass
class _LayoutBuilder:
    multiple: int
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    buckets: list[BucketLayout] = field(default_factory=list)
    bucket_start: int = 0
    members: list[int] = field(default_factory=list)

    def close(self, end: int) -> int:
        numel = end - self.bucket_start
        padded_end = self.bucket_start + round_up(numel, self.multiple)
        self.buckets.append(BucketLayout(self.bucket_start, padded_end, numel, tuple(self.members)))
        self.bucket_start, self.members = padded_end, []
        return padded_end


def plan_buffer(numels: Sequence[int], shared: Sequence[bool], bucket_size: int, dp_size: int) -> BufferLayout:
    """Lay out parameters of ``numels`` elements, given in order of registration.

    ``shared`` marks a tied embedding that lives on two stages: it gets a bucket of its own, so that both copies are cut
    alike and their gradients can be added up after the cut.
    """
    builder = _LayoutBuilder(multiple=math.lcm(ROW * dp_size, 128))
    position = 0
    for index in reversed(range(len(numels))):
        position = round_up(position, ROW)
        if shared[index] and builder.members:
            position = builder.close(position)
        end = position + numels[index]
        builder.ranges[index] = (position, end)
        builder.members.append(index)
        is_full = end - builder.bucket_start >= bucket_size
        position = builder.close(end) if is_full or shared[index] else end
    if builder.members:
        builder.close(position)
    return BufferLayout(tuple(builder.ranges[i] for i in range(len(numels))), tuple(builder.buckets))


@dataclass(frozen=True)
class ShardPiece:
    """The part of one parameter that lies in one shard."""

    parameter: int
    buffer_start: int
    buffer_end: int
    parameter_start: int
    """Flat index in the parameter of the first element; the piece is contiguous in both."""


def pieces_of_shard(layout: BufferLayout, bucket: BucketLayout, start: int, end: int) -> list[ShardPiece]:
    """Return the pieces of the bucket's parameters within [start, end) of the buffer, in buffer order."""
    pieces = []
    for index in bucket.parameters:
        first, last = layout.ranges[index]
        low, high = max(first, start), min(last, end)
        if low < high:
            pieces.append(ShardPiece(index, low, high, low - first))
    return pieces


class ParamAndGradBuffer:
    """One flat tensor with the values and one with the gradients of parameters of equal dtype.

    Parameters become views of the first; ``parameter.main_grad`` is a view of the second. Padding and gaps stay zero.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int,
        dp: Group,
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.dp = dp
        self.layout = plan_buffer(
            [p.numel() for p in self.parameters],
            [traits(p).shared_embedding for p in self.parameters],
            bucket_size,
            dp.size,
        )
        first = self.parameters[0]
        self.values = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(self.layout.numel, dtype=grad_dtype, device=first.device)
        for parameter, (start, end) in zip(self.parameters, self.layout.ranges, strict=True):
            view = self.values[start:end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.main_grad = self.gradients[start:end].view(parameter.shape)

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        return self.layout.buckets

    def own_shard(self, bucket: BucketLayout) -> tuple[int, int]:
        """Return the [start, end) of ``bucket`` that this rank owns."""
        return bucket.shard(self.dp.rank, self.dp.size)

    def reduce_scatter_gradients(self, bucket: BucketLayout, async_op: bool) -> dist.Work | None:
        """Average the bucket's gradients over the group, valid in this rank's shard only. Collective over ``dp``."""
        whole = self.gradients[bucket.start : bucket.end]
        if self.dp.size == 1:
            return None
        # Scaled before the sum, as Megatron does: a sum first could overflow 16-bit gradients.
        whole.mul_(1.0 / self.dp.size)
        start, end = self.own_shard(bucket)
        return reduce_scatter_single(self.gradients[start:end], whole, group=self.dp.handle, async_op=async_op)

    def all_gather_shards(self, flat: torch.Tensor, bucket: BucketLayout, async_op: bool) -> dist.Work | None:
        """Give every rank all shards of ``bucket`` in ``flat``, ``values`` or ``gradients``. Collective over ``dp``."""
        if self.dp.size == 1:
            return None
        start, end = self.own_shard(bucket)
        return all_gather_single(
            flat[bucket.start : bucket.end], flat[start:end], group=self.dp.handle, async_op=async_op
        )
