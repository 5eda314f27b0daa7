"""The order of forwards and backwards within one training step.

``run_schedule`` picks the schedule: without a pipeline one micro-batch after the other; with one 1F1B: stage s of p
runs w = min(p - s - 1, m) forwards ahead, then alternates one forward with one backward, then drains w backwards, so
that no stage holds the activations of more than p micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from megalite.parallel.p2p import StageLink

ForwardStep = Callable[[int, "torch.Tensor | None"], torch.Tensor]
"""Run micro-batch ``index`` on the stage's input and return its output: activations, or the scalar loss on the last
stage, already scaled so that the sum over micro-batches and data-parallel ranks is what is differentiated."""


class GradientSync(Protocol):
    """What a schedule tells the gradient buffers."""

    def start_last_backward(self) -> None:
        """Called before the step's last backward, whose gradients complete the sum."""


class NoSync:
    """For evaluation, where there are no gradients."""

    def start_last_backward(self) -> None:
        pass


def run_schedule(
    forward_step: ForwardStep,
    num_microbatches: int,
    link: StageLink,
    gradients: GradientSync,
    forward_only: bool = False,
) -> None:
    """Run ``num_microbatches`` through this stage, with their backwards unless ``forward_only``. Collective over pp."""
    if link.pp.size == 1:
        _without_pipeline(forward_step, num_microbatches, gradients, forward_only)
    elif forward_only:
        _forward_only(forward_step, num_microbatches, link)
    else:
        _one_forward_one_backward(forward_step, num_microbatches, link, gradients)


def _without_pipeline(
    forward_step: ForwardStep, num_microbatches: int, gradients: GradientSync, forward_only: bool
) -> None:
    for index in range(num_microbatches):
        loss = forward_step(index, None)
        if forward_only:
            continue
        if index == num_microbatches - 1:
            gradients.start_last_backward()
        loss.backward()


def _forward_only(forward_step: ForwardStep, num_microbatches: int, link: StageLink) -> None:
    for index in range(num_microbatches):
        link.send_forward(forward_step(index, link.receive_forward()))


def _one_forward_one_backward(
    forward_step: ForwardStep, num_microbatches: int, link: StageLink, gradients: GradientSync
) -> None:
    ahead = min(link.pp.size - link.pp.rank - 1, num_microbatches)
    alternating = num_microbatches - ahead
    pending: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()
    backwards_left = num_microbatches

    def backward(output_grad: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal backwards_left
        backwards_left -= 1
        if backwards_left == 0:
            gradients.start_last_backward()
        stage_input, output = pending.popleft()
        torch.autograd.backward(output, grad_tensors=output_grad)
        return None if stage_input is None else stage_input.grad

    for index in range(ahead):
        stage_input = link.receive_forward()
        output = forward_step(index, stage_input)
        link.send_forward(output)
        pending.append((stage_input, output))

    stage_input = link.receive_forward() if alternating else None
    for index in range(ahead, num_microbatches):
        output = forward_step(index, stage_input)
        pending.append((stage_input, output))
        input_grad = backward(link.send_forward_receive_backward(output))
        if index == num_microbatches - 1:
            link.send_backward(input_grad)
        else:
            stage_input = link.send_backward_receive_forward(input_grad)

    for _ in range(ahead):
        link.send_backward(backward(link.receive_backward()))
