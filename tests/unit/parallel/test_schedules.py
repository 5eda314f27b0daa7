from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megalite.parallel.p2p import StageLink
from megalite.parallel.schedules import NoSync, run_schedule
from tests.unit.samples import axis

PIPELINES = [(p, m) for p in (2, 3, 4) for m in range(1, 9)]


class _Recorder:
    """Notes forwards (F), backwards (B) and the word that the last backward follows (S)."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_last_backward(self) -> None:
        self.events.append("S")


class _Marked(torch.autograd.Function):
    """Identity whose backward is noted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str], index: int) -> torch.Tensor:
        ctx.note = (events, index)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        events, index = ctx.note
        events.append(f"B{index}")
        return grad, None, None


class _AloneLink(StageLink):
    """Neighbours that are always ready: made-up activations and gradients come, what is sent is noted."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(axis(size, rank), (2,), torch.float64, torch.device("cpu"))
        object.__setattr__(self, "sent", [])

    def _exchange(self, send: list[tuple[torch.Tensor, int]], receive_from: list[int]) -> list[torch.Tensor]:
        self.sent.extend(to for _, to in send)
        return [torch.ones(self.shape, dtype=self.dtype) for _ in receive_from]


def _run_stage(size: int, rank: int, count: int, forward_only: bool = False) -> tuple[list[str], list[int]]:
    link, recorder = _AloneLink(size, rank), _Recorder()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def forward_step(index: int, stage_input: torch.Tensor | None) -> torch.Tensor:
        recorder.events.append(f"F{index}")
        assert (stage_input is None) == (rank == 0)
        x = weight * (torch.ones(2, dtype=torch.float64) if stage_input is None else stage_input)
        y = _Marked.apply(x, recorder.events, index)
        return y.sum() if rank == size - 1 else y

    run_schedule(forward_step, count, link, recorder, forward_only)
    return recorder.events, link.sent


def _one_forward_one_backward(size: int, rank: int, count: int) -> list[str]:
    ahead = min(size - rank - 1, count)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(ahead, count):
        order += [f"F{i}", f"B{i - ahead}"]
    order += [f"B{i}" for i in range(count - ahead, count)]
    return [*order[:-1], "S", order[-1]]


@pytest.mark.parametrize(("size", "count"), PIPELINES)
def test_stages_follow_1f1b(size: int, count: int) -> None:
    for rank in range(size):
        events, sent = _run_stage(size, rank, count)
        assert events == _one_forward_one_backward(size, rank, count)
        # Every activation goes to the next stage, every gradient to the previous one.
        assert sent.count(rank + 1) == (0 if rank == size - 1 else count)
        assert sent.count(rank - 1) == (0 if rank == 0 else count)


@pytest.mark.parametrize(("size", "count"), [(4, 8), (4, 2)])
def test_a_stage_holds_few_activations(size: int, count: int) -> None:
    for rank in range(size):
        held = peak = 0
        for event in _run_stage(size, rank, count)[0]:
            held += {"F": 1, "B": -1, "S": 0}[event[0]]
            peak = max(peak, held)
        assert (held, peak) == (0, min(size - rank, count))


@pytest.mark.parametrize("count", range(1, 5))
def test_without_a_pipeline_each_backward_follows_its_forward(count: int) -> None:
    order = [f"{kind}{i}" for i in range(count) for kind in "FB"]
    assert _run_stage(1, 0, count) == ([*order[:-1], "S", order[-1]], [])


@pytest.mark.parametrize("size", [1, 3])
def test_forward_only_runs_no_backward(size: int) -> None:
    for rank in range(size):
        events, sent = _run_stage(size, rank, 3, forward_only=True)
        assert events == ["F0", "F1", "F2"]
        assert sent == ([] if rank == size - 1 else [rank + 1] * 3)
    NoSync().start_last_backward()


class _ThreadLink(StageLink):
    """Stages that are threads; a receive waits for the neighbour's send."""

    def __init__(self, size: int, rank: int, lines: dict[tuple[int, int], queue.Queue]) -> None:
        super().__init__(axis(size, rank), (2,), torch.float64, torch.device("cpu"))
        object.__setattr__(self, "lines", lines)

    def _exchange(self, send: list[tuple[torch.Tensor, int]], receive_from: list[int]) -> list[torch.Tensor]:
        for tensor, to in send:
            self.lines[self.pp.rank, to].put(tensor.clone())
        return [self.lines[source, self.pp.rank].get(timeout=20.0) for source in receive_from]


@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 5), (4, 2), (4, 8)])
def test_a_pipeline_differentiates_the_whole_product(size: int, count: int) -> None:
    lines = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    weights = [torch.tensor(1.0 + 0.1 * r, dtype=torch.float64, requires_grad=True) for r in range(size)]
    inputs = [torch.tensor([1.0 + i, 2.0 - i], dtype=torch.float64) for i in range(count)]

    def stage(rank: int) -> None:
        def forward_step(index: int, stage_input: torch.Tensor | None) -> torch.Tensor:
            x = inputs[index] if stage_input is None else stage_input
            y = torch.sin(weights[rank] * x)
            return y.sum() if rank == size - 1 else y

        run_schedule(forward_step, count, _ThreadLink(size, rank, lines), NoSync())

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(stage, rank) for rank in range(size)]:
            future.result()
    expected = [w.detach().clone().requires_grad_() for w in weights]
    for x in inputs:
        for weight in expected:
            x = torch.sin(weight * x)
        x.sum().backward()
    for own, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert all(line.empty() for line in lines.values())
