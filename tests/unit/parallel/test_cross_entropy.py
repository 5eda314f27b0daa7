from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import on_threads

S, B, V, PADDED = 5, 3, 13, 16


def _inputs(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(S, B, PADDED, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, (S, B), generator=generator)
    upstream = torch.randn(S, B, dtype=torch.float64, generator=generator)
    return logits, labels, upstream


def _reference(logits: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf[..., :V].reshape(-1, V), labels.reshape(-1), reduction="none").view(S, B)
    loss.backward(upstream)
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["small", "large"])
def test_loss_and_gradient_equal_torch(scale: float) -> None:
    logits, labels, upstream = _inputs(scale)
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels, V, SINGLE)
    loss.backward(upstream)
    expected_loss, expected_grad = _reference(logits, labels, upstream)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(leaf.grad, expected_grad, rtol=1e-12, atol=1e-14)
    assert loss.dtype == torch.float64


def test_gradient_equals_finite_differences() -> None:
    logits, labels, upstream = _inputs()
    leaf = logits.clone().requires_grad_()
    vocab_parallel_cross_entropy(leaf, labels, V, SINGLE).backward(upstream)

    def total(values: torch.Tensor) -> float:
        return (vocab_parallel_cross_entropy(values, labels, V, SINGLE) * upstream).sum().item()

    for index in ((0, 0, 0), (2, 1, int(labels[2, 1])), (4, 2, V - 1), (1, 0, V)):
        step = torch.zeros_like(logits)
        step[index] = 1e-5
        slope = (total(logits + step) - total(logits - step)) / 2e-5
        assert leaf.grad[index].item() == pytest.approx(slope, abs=1e-9)


def test_padding_columns_take_no_part() -> None:
    logits, labels, upstream = _inputs()
    changed = logits.clone()
    changed[..., V:] = 1e6
    results = []
    for values in (logits, changed):
        leaf = values.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, labels, V, SINGLE)
        loss.backward(upstream)
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not results[0][1][..., V:].any()


def test_the_callers_logits_are_kept() -> None:
    logits, labels, upstream = _inputs()
    leaf = logits.clone().requires_grad_()
    vocab_parallel_cross_entropy(leaf, labels, V, SINGLE).backward(upstream)
    assert torch.equal(leaf.detach(), logits)


def test_bfloat16_logits_are_summed_in_fp32() -> None:
    logits, labels, upstream = _inputs()
    low = logits.bfloat16()
    leaf = low.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels, V, SINGLE)
    loss.backward(upstream.float())
    expected_loss, expected_grad = _reference(low.double(), labels, upstream)
    assert loss.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.detach().double(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), expected_grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_cut_vocabulary_gives_the_same_loss(tp: int) -> None:
    logits, labels, upstream = _inputs()

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.chunk(tp, dim=-1)[group.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, labels, V, group)
        loss.backward(upstream)
        return loss.detach(), leaf.grad

    results = on_threads(tp, body)
    expected_loss, expected_grad = _reference(logits, labels, upstream)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=1e-13)
    gradient = torch.cat([gradient for _, gradient in results], dim=-1)
    torch.testing.assert_close(gradient, expected_grad, rtol=1e-12, atol=1e-14)
