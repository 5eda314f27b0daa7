"""Cross entropy over logits whose vocabulary is cut over a tensor-parallel group.

loss = log(sum_v exp(z_v - max)) - (z_label - max); gradient = softmax(z) - onehot(label), computed in at least fp32.
Nobody gathers the logits: the maximum, the label's logit and the sum of exponentials are three small all-reduces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megalite.utils.dist import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
        columns = logits.shape[-1]
        first = columns * tp.rank
        ctx.dtype = logits.dtype
        z = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
        # Padding rows exist only to make the table divisible and depend on TP. Left in, they would make the loss depend
        # on the topology, so they are no candidates.
        z[..., max(0, min(columns, vocab_size - first)) :] = float("-inf")
        z -= tp.all_reduce(z.amax(dim=-1), dist.ReduceOp.MAX).unsqueeze(-1)
        local = labels - first
        elsewhere = (local < 0) | (local >= columns)
        local = local.masked_fill(elsewhere, 0)
        label_logit = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        tp.all_reduce(label_logit)
        softmax = z.exp_()
        total = tp.all_reduce(softmax.sum(dim=-1))
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, elsewhere)
        return total.log() - label_logit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        # Backward runs once, so the saved softmax can become the gradient instead of a third copy of the logits.
        softmax.scatter_add_(-1, local.unsqueeze(-1), -(~elsewhere).to(softmax.dtype).unsqueeze(-1))
        softmax *= grad.unsqueeze(-1)
        return softmax.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group
) -> torch.Tensor:
    """Return the loss of each label, in nats, in fp32 (fp64 for fp64 logits). Collective over ``tp``.

    ``logits`` are [..., V_padded / tp], ``labels`` [...] with values below ``vocab_size``; columns from ``vocab_size``
    on are padding and take no part.
    """
    if tp.size == 1:
        # torch's own kernel needs fewer passes over the logits.
        exact = logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, tp)
