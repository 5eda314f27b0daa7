from __future__ import annotations

import pytest
import torch
from torch import nn

from megalite.parallel.ddp import DistributedDataParallel, finalize_model_grads
from megalite.parallel.layers import ParameterTraits, mark
from megalite.parallel.state import ParallelState
from megalite.utils.dist import Group
from tests.unit.samples import axis, place


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).sum()


def test_gradients_of_micro_batches_are_added_up_in_the_buffer() -> None:
    torch.manual_seed(1)
    plain, wrapped = _Two(), _Two()
    wrapped.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(wrapped, ParallelState(), bucket_size=1)
    inputs = [torch.randn(4, 3) for _ in range(3)]
    for _ in range(2):
        ddp.zero_gradients()
        for index, x in enumerate(inputs):
            if index == 2:
                ddp.start_last_backward()
            wrapped(x).backward()
        finalize_model_grads(ddp)
    for x in inputs:
        plain(x).backward()
    for own, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert own.grad is None
        torch.testing.assert_close(own.main_grad, other.grad)


def test_gradients_of_bfloat16_are_added_up_in_fp32() -> None:
    linear = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(linear, ParallelState(), bucket_size=40_000_000, grad_dtype=torch.float32)
    ddp.zero_gradients()
    for value in (256.0, 1.0, 1.0, 1.0):
        linear(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    # In bfloat16, 256 + 1 is 256.
    assert linear.weight.main_grad.item() == 259.0


def test_one_buffer_per_dtype() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)])
    ddp = DistributedDataParallel(module, ParallelState(), bucket_size=40_000_000)
    assert [(b.values.dtype, len(b.parameters)) for b in ddp.buffers] == [(torch.float32, 4), (torch.bfloat16, 2)]
    assert [b.gradients.dtype for b in ddp.buffers] == [torch.float32, torch.bfloat16]


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The starts of the buckets that are reduced, in order."""
    order: list[int] = []

    def reduce(buffer: object, bucket: object, async_op: bool) -> None:
        order.append(bucket.start)

    monkeypatch.setattr("megalite.parallel.buffers.ParamAndGradBuffer.reduce_scatter_gradients", reduce)
    return order


def test_overlap_reduces_buckets_in_order_during_the_last_backward_only(reduced: list[int]) -> None:
    module = _Two()
    ddp = DistributedDataParallel(module, place(dp=(2, 0)), bucket_size=1, overlap_grad_reduce=True)
    starts = [bucket.start for bucket in ddp.buffers[0].buckets]
    assert len(starts) == 4
    ddp.zero_gradients()
    module(torch.ones(1, 3)).backward()
    assert reduced == []
    ddp.start_last_backward()
    module(torch.ones(1, 3)).backward()
    assert reduced == starts, "all are under way when the backward ends"
    ddp.finish_gradient_sync()
    assert reduced == starts, "none is reduced twice"


def test_a_bucket_waits_for_the_ones_before_it(reduced: list[int]) -> None:
    module = _Two()
    ddp = DistributedDataParallel(module, place(dp=(2, 0)), bucket_size=1, overlap_grad_reduce=True)
    ddp.zero_gradients()
    ddp.start_last_backward()
    # Only the parameter of the last bucket gets a gradient: another rank may see another order.
    module.first.weight.sum().backward()
    assert reduced == []
    ddp.finish_gradient_sync()
    assert reduced == [bucket.start for bucket in ddp.buffers[0].buckets]


def test_without_overlap_buckets_are_reduced_at_the_end(reduced: list[int]) -> None:
    module = _Two()
    ddp = DistributedDataParallel(module, place(dp=(2, 0)), bucket_size=1)
    ddp.zero_gradients()
    ddp.start_last_backward()
    module(torch.ones(1, 3)).backward()
    assert reduced == []
    ddp.finish_gradient_sync()
    assert len(reduced) == 4


class _Doubling(Group):
    """Pretends that the other rank holds the same values."""

    def all_reduce(self, tensor: torch.Tensor, op: object = None) -> torch.Tensor:
        return tensor.mul_(2.0)


def _finalized(parallel: ParallelState, marks: ParameterTraits) -> tuple[float, float]:
    module = _Two()
    mark(module.first.bias, marks)
    ddp = DistributedDataParallel(module, parallel, bucket_size=40_000_000)
    ddp.zero_gradients()
    ddp.buffers[0].gradients.fill_(1.0)
    finalize_model_grads(ddp)
    return module.first.bias.main_grad[0].item(), module.first.weight.main_grad[0, 0].item()


def test_gradients_of_a_part_of_the_sequence_are_added_up_over_tp() -> None:
    parallel = ParallelState(tp=_Doubling((0, 1), 0, None))
    assert _finalized(parallel, ParameterTraits(sums_over_tp=True)) == (2.0, 1.0)
    assert _finalized(parallel, ParameterTraits()) == (1.0, 1.0)


def test_gradients_of_tied_embeddings_are_added_up_over_both_stages() -> None:
    both = ParallelState(pp=axis(2, 0), embedding=_Doubling((0, 1), 0, None))
    assert _finalized(both, ParameterTraits(shared_embedding=True)) == (2.0, 1.0)
    between = ParallelState(pp=axis(3, 1), embedding=None)
    assert _finalized(between, ParameterTraits()) == (1.0, 1.0)
