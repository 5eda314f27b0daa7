"""Autograd functions that move activations between the regions of a tensor-parallel group.

| function                        | forward                   | backward                   |
|---------------------------------|---------------------------|----------------------------|
| copy_to_tensor_region           | identity                  | all-reduce                 |
| reduce_from_tensor_region       | all-reduce                | identity                   |
| gather_from_tensor_region       | all-gather last dim       | split                      |
| gather_partial_from_tensor_region | all-gather last dim     | reduce-scatter last dim    |
| scatter_to_sequence_region      | split first dim           | all-gather                 |
| gather_from_sequence_region     | all-gather first dim      | reduce-scatter             |
| reduce_scatter_to_sequence_region | reduce-scatter first dim | all-gather                 |

Activations are [sequence, batch, hidden]; "first dim" is the sequence. With one rank each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch

from megalite.utils.dist import Group, all_gather_single, reduce_scatter_single


def all_gather_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' ``x`` along dim 0. Collective over the group."""
    if group.size == 1:
        return x
    output = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    all_gather_single(output, x.contiguous(), group=group.handle)
    return output


def reduce_scatter_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum ``x`` over the ranks and keep this rank's piece of dim 0. Collective over the group."""
    if group.size == 1:
        return x
    output = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    reduce_scatter_single(output, x.contiguous(), group=group.handle)
    return output


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    return group.all_reduce(x.contiguous().clone()) if group.size > 1 else x


def _split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return x.chunk(group.size, dim=dim)[group.rank].contiguous() if group.size > 1 else x


def _all_gather_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    if group.size == 1:
        return x
    pieces = all_gather_first_dim(x.unsqueeze(0), group)
    return torch.cat(pieces.unbind(0), dim=-1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather_last_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _split(grad, ctx.group, dim=-1), None


class _GatherPartialLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather_last_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # One piece per rank along a new first axis, which is what a reduce-scatter cuts.
        pieces = torch.stack(grad.chunk(ctx.group.size, dim=-1))
        return reduce_scatter_first_dim(pieces, ctx.group).squeeze(0), None


class _ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _split(x, group, dim=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first_dim(grad, ctx.group), None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_first_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_first_dim(grad, ctx.group), None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_first_dim(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first_dim(grad, ctx.group), None


def copy_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a tensor-parallel region with a tensor that all ranks hold whole."""
    return _Copy.apply(x, group) if group.size > 1 else x


def reduce_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: add up the ranks' partial results."""
    return _Reduce.apply(x, group) if group.size > 1 else x


def gather_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: concatenate the ranks' columns."""
    return _GatherLastDim.apply(x, group) if group.size > 1 else x


def gather_partial_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' columns where each rank then uses a part of them, so that gradients have to be summed."""
    return _GatherPartialLastDim.apply(x, group) if group.size > 1 else x


def scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep this rank's part of the sequence of a tensor that all ranks hold whole."""
    return _ScatterToSequence.apply(x, group) if group.size > 1 else x


def gather_from_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a tensor-parallel region with a tensor that is cut along the sequence."""
    return _GatherFromSequence.apply(x, group) if group.size > 1 else x


def reduce_scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: add up partial results and keep this rank's part of the sequence."""
    return _ReduceScatterToSequence.apply(x, group) if group.size > 1 else x
