"""The order of forwards and backwards within one training step.

A plan is a list of operations; it is pure arithmetic. Without a pipeline each micro-batch goes forward and backward
before the next. With one it is 1F1B: stage s of p does w forwards ahead, then alternates one forward with one backward,
then drains w backwards; with m micro-batches

    w = min(p - s - 1, m)                        one chunk of layers per stage
    w = min(2 * (p - s - 1) + (v - 1) * g, v m)  v chunks per stage, in groups of g micro-batches (interleaved)

Interleaved, chunk c of all stages comes before chunk c + 1: the micro-batches of a group go through chunk 0, then 1,
and so on; then the next group. Backwards take the chunks in reverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megalite.parallel.p2p import Incoming, StageLink

ForwardStep = Callable[[int, int, "torch.Tensor | None"], torch.Tensor]
"""Run (micro-batch, chunk) on the stage's input and return its output: activations, or the scalar loss at the end of
the model, already scaled so that the sum over micro-batches and data-parallel ranks is what is differentiated."""


class GradientSync(Protocol):
    """What a schedule tells the gradient buffers of a chunk."""

    def start_last_backward(self) -> None:
        """Called before the step's last backward of the chunk, whose gradients complete the sum."""


@dataclass(frozen=True)
class Operation:
    """One forward or backward of one micro-batch through one chunk of this stage."""

    is_forward: bool
    microbatch: int
    chunk: int


def plan_step(
    pp_size: int, pp_rank: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> list[Operation]:
    """Return the operations of one stage in order. ``group_size`` defaults to the number of stages."""
    table = _chunk_table(num_microbatches, num_chunks, group_size or pp_size)
    forwards = [Operation(True, microbatch, chunk) for microbatch, chunk in table]
    backwards = [Operation(False, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in table]
    behind = pp_size - pp_rank - 1
    ahead = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * (group_size or pp_size)
    ahead = min(ahead, len(table))
    plan = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        plan += [forward, backward]
    return plan + backwards[len(table) - ahead :]


def plan_evaluation(pp_size: int, num_microbatches: int, num_chunks: int = 1) -> list[Operation]:
    """Return the forwards alone."""
    return [Operation(True, *entry) for entry in _chunk_table(num_microbatches, num_chunks, pp_size)]


def _chunk_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    table = []
    for start in range(0, num_microbatches, group_size):
        group = range(start, min(start + group_size, num_microbatches))
        table += [(microbatch, chunk) for chunk in range(num_chunks) for microbatch in group]
    return table


def run_schedule(
    forward_step: ForwardStep,
    num_microbatches: int,
    link: StageLink,
    gradients: Sequence[GradientSync] | None,
    num_chunks: int = 1,
) -> None:
    """Run ``num_microbatches`` through this stage. Collective over pp.

    ``gradients`` has the buffers of each chunk; with None there are no backwards, as in an evaluation.
    """
    pp = link.pp
    if gradients is None:
        plan = plan_evaluation(pp.size, num_microbatches, num_chunks)
    else:
        plan = plan_step(pp.size, pp.rank, num_microbatches, num_chunks)
    _Executor(forward_step, link, gradients, num_microbatches, num_chunks).run(plan)


class _Executor:
    """Runs a plan: what an operation needs from a neighbour is asked for one operation ahead."""

    def __init__(
        self,
        forward_step: ForwardStep,
        link: StageLink,
        gradients: Sequence[GradientSync] | None,
        num_microbatches: int,
        num_chunks: int,
    ) -> None:
        self.forward_step, self.link, self.gradients = forward_step, link, gradients
        self.last_microbatch = num_microbatches - 1
        self.last_chunk = num_chunks - 1
        self.pending: dict[int, deque[tuple[torch.Tensor | None, torch.Tensor]]] = {
            chunk: deque() for chunk in range(num_chunks)
        }

    def run(self, plan: Sequence[Operation]) -> None:
        incoming = self._post(plan[0]) if plan else None
        for index, operation in enumerate(plan):
            received = None if incoming is None else incoming.wait()
            # Posted before the computation, so that the next tensor travels meanwhile.
            incoming = self._post(plan[index + 1]) if index + 1 < len(plan) else None
            if operation.is_forward:
                self._forward(operation, received)
            else:
                self._backward(operation, received)
        self.link.flush()

    def _is_model_start(self, chunk: int) -> bool:
        return self.link.pp.is_first and chunk == 0

    def _is_model_end(self, chunk: int) -> bool:
        return self.link.pp.is_last and chunk == self.last_chunk

    def _post(self, operation: Operation) -> Incoming | None:
        if operation.is_forward:
            return None if self._is_model_start(operation.chunk) else self.link.post_forward()
        return None if self._is_model_end(operation.chunk) else self.link.post_backward()

    def _forward(self, operation: Operation, stage_input: torch.Tensor | None) -> None:
        if stage_input is not None and self.gradients is not None:
            stage_input.requires_grad_()
        output = self.forward_step(operation.microbatch, operation.chunk, stage_input)
        if not self._is_model_end(operation.chunk):
            self.link.send_forward(output)
        if self.gradients is not None:
            self.pending[operation.chunk].append((stage_input, output))

    def _backward(self, operation: Operation, output_grad: torch.Tensor | None) -> None:
        if operation.microbatch == self.last_microbatch:
            self.gradients[operation.chunk].start_last_backward()
        stage_input, output = self.pending[operation.chunk].popleft()
        torch.autograd.backward(output, grad_tensors=output_grad)
        if stage_input is not None:
            self.link.send_backward(stage_input.grad)
