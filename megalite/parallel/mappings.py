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

from collections.abc import Callable
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
    return group.all_reduce(x.contiguous().clone())


def _identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.view_as(x)


def _split_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size, dim=0)[group.rank].contiguous()


def _split_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


def _all_gather_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = all_gather_first_dim(x.unsqueeze(0), group)
    return torch.cat(pieces.unbind(0), dim=-1)


def _reduce_scatter_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    # One piece per rank along a new first axis, which is what a reduce-scatter cuts.
    return reduce_scatter_first_dim(torch.stack(x.chunk(group.size, dim=-1)), group).squeeze(0)


Move = Callable[[torch.Tensor, Group], torch.Tensor]


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, forward: Move, backward: Move) -> torch.Tensor:
        ctx.group, ctx.move_back = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.move_back(grad, ctx.group), None, None, None


def _map(x: torch.Tensor, group: Group, forward: Move, backward: Move) -> torch.Tensor:
    """Apply ``forward`` to ``x``, and ``backward`` to its gradient; nothing with one rank."""
    return _Mapping.apply(x, group, forward, backward) if group.size > 1 else x


def copy_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a tensor-parallel region with a tensor that all ranks hold whole."""
    return _map(x, group, _identity, _all_reduce)


def reduce_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: add up the ranks' partial results."""
    return _map(x, group, _all_reduce, _identity)


def gather_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: concatenate the ranks' columns."""
    return _map(x, group, _all_gather_last_dim, _split_last_dim)


def gather_partial_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the ranks' columns where each rank then uses a part of them, so that gradients have to be summed."""
    return _map(x, group, _all_gather_last_dim, _reduce_scatter_last_dim)


def scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep this rank's part of the sequence of a tensor that all ranks hold whole."""
    return _map(x, group, _split_first_dim, all_gather_first_dim)


def gather_from_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a tensor-parallel region with a tensor that is cut along the sequence."""
    return _map(x, group, all_gather_first_dim, reduce_scatter_first_dim)


def reduce_scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a tensor-parallel region: add up partial results and keep this rank's part of the sequence."""
    return _map(x, group, reduce_scatter_first_dim, all_gather_first_dim)
