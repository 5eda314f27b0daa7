"""Linear layers and the embedding, cut over a tensor-parallel group.

Legend: S sequence, B batch, H hidden, V vocabulary; activations are [S, B, H], weights [out, in]. With sequence
parallelism the activations outside the linear layers are cut along S: [S / tp, B, H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megalite.parallel.mappings import (
    all_gather_first_dim,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)
from megalite.utils.dist import Group, all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class ParameterTraits:
    """What the rest of the program must know about a parameter beside its values."""

    tp_axis: int | None = None
    """Axis that is cut over the tensor-parallel group; None when every rank holds the whole tensor."""
    tp_blocks: int = 1
    """Matrices that lie one upon the other along ``tp_axis``, each cut by itself (gate and up of a gated MLP)."""
    init_std: float | None = None
    """Standard deviation of its normal start values; None means that the module has set them itself."""
    sums_over_tp: bool = False
    """Whole on every rank but used on a part of the sequence or of the heads, so that its gradient has to be summed."""
    shared_embedding: bool = False
    """One of two copies, on the first and the last stage, of the tied embedding."""
    is_copy: bool = False
    """The copy that is neither counted in norms nor saved: the one of the last stage."""


_UNMARKED = ParameterTraits()


def traits(parameter: nn.Parameter) -> ParameterTraits:
    """Return the traits of ``parameter``; a parameter that nobody marked is whole, replicated and not shared."""
    return getattr(parameter, "traits", _UNMARKED)


def mark(parameter: nn.Parameter, value: ParameterTraits) -> nn.Parameter:
    """Attach ``value`` to ``parameter`` and return it."""
    parameter.traits = value
    return parameter


class _ColumnLinear(torch.autograd.Function):
    """y = x W^T + b with x gathered along the sequence, and communication hidden behind the matrix products.

    Saves the local piece of x and gathers it again in the backward, as a gathered copy of every layer's input would
    cost tp times the memory. The input gradient is reduced while the weight gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.sequence_parallel, ctx.has_bias = tp, sequence_parallel, bias is not None
        return F.linear(all_gather_first_dim(x, tp) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        gathering = None
        if ctx.sequence_parallel:
            whole_x = x.new_empty((x.shape[0] * ctx.tp.size, *x.shape[1:]))
            gathering = all_gather_single(whole_x, x.contiguous(), group=ctx.tp.handle, async_op=True)
        else:
            whole_x = x
        grad_x = grad_y.matmul(weight)
        if gathering is not None:
            gathering.wait()
            own_grad_x = torch.empty_like(x)
            reducing = reduce_scatter_single(own_grad_x, grad_x, group=ctx.tp.handle, async_op=True)
        else:
            own_grad_x = grad_x
            reducing = dist.all_reduce(grad_x, group=ctx.tp.handle, async_op=True)
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_weight = rows.t().matmul(whole_x.reshape(-1, whole_x.shape[-1])) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(dim=0) if ctx.has_bias else None
        reducing.wait()
        return own_grad_x, grad_weight, grad_bias, None, None


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, sequence_parallel: bool
) -> torch.Tensor:
    """Return x W^T + b, [S, B, out / tp], for a weight whose rows are cut over ``tp``. Collective over ``tp``."""
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, sequence_parallel)


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut over ``tp``: weight [out / tp, in], output [S, B, out / tp]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: Group,
        init_std: float,
        bias: bool = True,
        sequence_parallel: bool = False,
        blocks: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """``blocks`` matrices of ``output_size / blocks`` rows lie one upon the other, and each is cut by itself."""
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        rows = output_size // tp.size
        self.weight = nn.Parameter(torch.empty(rows, input_size, dtype=dtype, device=device))
        mark(self.weight, ParameterTraits(tp_axis=0, tp_blocks=blocks, init_std=init_std))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None
        if self.bias is not None:
            mark(self.bias, ParameterTraits(tp_axis=0, tp_blocks=blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_linear(x, self.weight, self.bias, self.tp, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut over ``tp``: weight [out, in / tp], input [S, B, in / tp].

    The bias is whole on every rank and added after the reduction, so that it counts once.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: Group,
        init_std: float,
        bias: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = nn.Parameter(torch.empty(output_size, input_size // tp.size, dtype=dtype, device=device))
        mark(self.weight, ParameterTraits(tp_axis=1, init_std=init_std))
        self.bias = nn.Parameter(torch.zeros(output_size, dtype=dtype, device=device)) if bias else None
        if self.bias is not None:
            mark(self.bias, ParameterTraits(sums_over_tp=sequence_parallel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        leave = reduce_scatter_to_sequence_region if self.sequence_parallel else reduce_from_tensor_region
        y = leave(y, self.tp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are cut over ``tp``: ids [B, S] in, [S, B, H] out.

    A rank looks up the ids of its rows and contributes zeros for the others; the sum over ``tp`` is the embedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        hidden_size: int,
        *,
        tp: Group,
        init_std: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        rows = num_embeddings // tp.size
        self.first_row = rows * tp.rank
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype, device=device))
        mark(self.weight, ParameterTraits(tp_axis=0, init_std=init_std))

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        ids_SB = ids_BS.transpose(0, 1)
        if self.tp.size == 1:
            return F.embedding(ids_SB, self.weight)
        local = ids_SB - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tensor_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
