from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megalite.parallel.random import CudaRNGStatesTracker
from megalite.parallel.recompute import recompute

Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _tracker() -> CudaRNGStatesTracker:
    torch.manual_seed(3)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 17)
    tracker.add("expert-parallel-rng", 18)
    return tracker


def _block(tracker: CudaRNGStatesTracker, masks: list[torch.Tensor]) -> Block:
    """Dropout from the default stream and from the tracker's, with what was kept noted."""

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.dropout(torch.tanh(x @ weight), 0.5)
        with tracker.fork():
            z = F.dropout(torch.sin(y), 0.5)
        masks.append(torch.stack([y != 0.0, z != 0.0]))
        return z @ weight

    return block


State = tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]


def _run(is_recomputed: bool, order: str) -> State:
    """Return gradients, the default stream and the tracker's after all, and the masks in the order they were drawn.

    ``order`` says when the forward (F) of the next and the backward (B) of the oldest micro-batch is done.
    """
    tracker, masks = _tracker(), []
    block = _block(tracker, masks)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 6, dtype=torch.float64, generator=generator).requires_grad_()
    pending, gradients = [], []
    for kind in order:
        if kind == "F":
            x = torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_()
            y = recompute(block, tracker, x, weight) if is_recomputed else block(x, weight)
            pending.append((x, (y**2).sum()))
            continue
        x, loss = pending.pop(0)
        loss.backward()
        gradients.append(x.grad)
    return [*gradients, weight.grad], torch.get_rng_state(), tracker.get_states(), masks


@pytest.mark.parametrize("order", ["FB", "FBFB", "FFBB", "FFBFBB"])
def test_gradients_and_streams_are_those_without_recomputation(order: str) -> None:
    gradients, default, streams, masks = _run(False, order)
    again, default_again, streams_again, masks_again = _run(True, order)
    assert len({bytes(mask.numpy()) for mask in masks}) == len(masks) > 0, "every forward drops other values"
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert torch.equal(default, default_again), "the default stream stands where it would"
    assert all(torch.equal(streams[name], state) for name, state in streams_again.items())
    # Each block ran twice with the same masks; which of them first depends on the order.
    assert len(masks_again) == 2 * len(masks)
    for mask in masks:
        assert sum(torch.equal(mask, other) for other in masks_again) == 2


def test_the_stream_is_put_back_when_the_block_fails_in_the_backward() -> None:
    tracker = _tracker()
    is_first = [True]

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            y = F.dropout(x * 2.0, 0.5)
            if not is_first[0]:
                raise RuntimeError("inside")
        return y.exp()

    x = torch.ones(5, requires_grad=True)
    y = recompute(block, tracker, x)
    is_first[0] = False
    with tracker.fork():
        torch.rand(3)
    before, default = tracker.get_states(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        y.sum().backward()
    assert all(torch.equal(before[name], state) for name, state in tracker.get_states().items())
    assert torch.equal(torch.get_rng_state(), default)


def test_inner_activations_are_not_kept() -> None:
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin().exp().sin()

    x = torch.ones(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x).sum()
        assert sum(size == 1000 for size in sizes) == 4
        sizes.clear()
        recompute(block, _tracker(), x).sum()
        assert sum(size == 1000 for size in sizes) == 1, "the input alone"
