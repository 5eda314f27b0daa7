from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megalite.parallel.p2p import Channel, StageLink
from megalite.parallel.schedules import Operation, plan_evaluation, plan_step, run_schedule
from tests.unit.samples import CPU, axis

PIPELINES = [(p, m) for p in (2, 3, 4) for m in range(1, 9)]
# (stages, chunks, micro-batches): several chunks need a pipeline, and micro-batches in whole groups.
STEPS = [(p, 1, m) for p in range(1, 5) for m in range(1, 9)]
STEPS += [(p, v, k * p) for p in range(2, 5) for v in (2, 3) for k in range(1, 4)]


def _interleaved_order(p: int, v: int, m: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of forwards: groups of p micro-batches go through chunk 0, then 1, ..."""
    return [(group * p + i, chunk) for group in range(m // p) for chunk in range(v) for i in range(p)]


def _forwards(plan: Sequence[Operation]) -> list[tuple[int, int]]:
    return [(op.microbatch, op.chunk) for op in plan if op.is_forward]


def _backwards(plan: Sequence[Operation]) -> list[tuple[int, int]]:
    return [(op.microbatch, op.chunk) for op in plan if not op.is_forward]


@pytest.mark.parametrize(("p", "v", "m"), STEPS)
def test_every_operation_is_done_once_and_the_backward_after_its_forward(p: int, v: int, m: int) -> None:
    every = sorted(itertools.product(range(m), range(v)))
    for rank in range(p):
        plan = plan_step(p, rank, m, v)
        assert sorted(_forwards(plan)) == sorted(_backwards(plan)) == every
        place = {op: position for position, op in enumerate(plan)}
        assert all(place[Operation(True, *each)] < place[Operation(False, *each)] for each in every)


@pytest.mark.parametrize(("p", "v", "m"), STEPS)
def test_the_forwards_ahead_are_those_of_the_formula(p: int, v: int, m: int) -> None:
    for rank in range(p):
        ahead = min(p - rank - 1, m) if v == 1 else min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        kinds = [op.is_forward for op in plan_step(p, rank, m, v)]
        steady = m * v - ahead
        assert kinds == [True] * ahead + [True, False] * steady + [False] * ahead


@pytest.mark.parametrize(("p", "v", "m"), [step for step in STEPS if step[1] > 1])
def test_groups_of_micro_batches_go_through_the_chunks(p: int, v: int, m: int) -> None:
    order = _interleaved_order(p, v, m)
    for rank in range(p):
        plan = plan_step(p, rank, m, v)
        assert _forwards(plan) == order
        assert _backwards(plan) == [(microbatch, v - 1 - chunk) for microbatch, chunk in order]


def test_a_plan_by_hand() -> None:
    # Two stages of two chunks, two micro-batches: the first stage does four forwards ahead, which is all of them.
    assert [(op.is_forward, op.microbatch, op.chunk) for op in plan_step(2, 0, 2, 2)] == [
        *((True, microbatch, chunk) for microbatch, chunk in ((0, 0), (1, 0), (0, 1), (1, 1))),
        *((False, microbatch, chunk) for microbatch, chunk in ((0, 1), (1, 1), (0, 0), (1, 0))),
    ]
    # The last stage does two ahead, then one and one.
    assert "".join("FB"[not op.is_forward] for op in plan_step(2, 1, 2, 2)) == "FFFBFBBB"


def test_groups_may_be_larger_than_the_pipeline() -> None:
    forwards = _forwards(plan_step(2, 0, 6, 2, group_size=3))
    assert forwards == [(i, c) for start in (0, 3) for c in (0, 1) for i in range(start, start + 3)]
    # 2 * (2 - 0 - 1) + (2 - 1) * 3 ahead, and the first forward of the steady state.
    kinds = [op.is_forward for op in plan_step(2, 0, 6, 2, group_size=3)]
    assert kinds.index(False) == 6
    # The last group may be smaller.
    assert _forwards(plan_step(2, 1, 5, 2, group_size=3))[6:] == [(3, 0), (4, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize(("p", "v", "m"), STEPS)
def test_an_evaluation_is_the_forwards_alone(p: int, v: int, m: int) -> None:
    assert plan_evaluation(p, m, v) == [op for op in plan_step(p, 0, m, v) if op.is_forward]


Line = tuple[str, int, int]
Message = tuple[str, int, int, int]


class _Simulation:
    """All stages at once. Messages of a line arrive in the order in which they were sent, and only the first can be
    taken; what is taken must be what the plan needs. ``chunk`` counts chunks of the whole model: v per stage."""

    def __init__(self, plans: Sequence[Sequence[Operation]], num_chunks: int) -> None:
        self.plans = [deque(plan) for plan in plans]
        self.size, self.num_chunks = len(plans), num_chunks
        self.lines: dict[Line, deque[Message]] = {}

    def _place(self, chunk: int, rank: int, step: int) -> tuple[int, int] | None:
        """The chunk and the stage that is ``step`` places further in the model, None beyond its ends."""
        position = chunk * self.size + rank + step
        if not 0 <= position < self.size * self.num_chunks:
            return None
        return divmod(position, self.size)

    def _line(self, kind: str, a: int, b: int) -> Line:
        is_wrap = abs(a - b) == self.size - 1 and (a > b) == (kind == "F")
        return (kind + " wrap" * is_wrap, a, b)

    def _try(self, rank: int) -> bool:
        op = self.plans[rank][0]
        kind, step = ("F", 1) if op.is_forward else ("B", -1)
        source = self._place(op.chunk, rank, -step)
        if source is not None:
            waiting = self.lines.get(self._line(kind, source[1], rank))
            if not waiting:
                return False
            assert waiting.popleft() == (kind, op.microbatch, op.chunk, rank), "another message is in front"
        target = self._place(op.chunk, rank, step)
        if target is not None:
            line = self.lines.setdefault(self._line(kind, rank, target[1]), deque())
            line.append((kind, op.microbatch, *target))
        self.plans[rank].popleft()
        return True

    def run(self, first: int) -> None:
        """Let each stage go on as far as it can, again and again, beginning with stage ``first``."""
        order = [(first + i) % self.size for i in range(self.size)]
        moved = True
        while moved:
            moved = False
            for rank in order:
                while self.plans[rank] and self._try(rank):
                    moved = True
        assert not any(self.plans), "stages wait for each other"
        assert not any(self.lines.values()), "messages that nobody takes"


@pytest.mark.parametrize(("p", "v", "m"), STEPS)
def test_messages_match_and_nobody_waits_for_ever(p: int, v: int, m: int) -> None:
    for first in range(p):
        _Simulation([plan_step(p, rank, m, v) for rank in range(p)], v).run(first)
        _Simulation([plan_evaluation(p, m, v) for _ in range(p)], v).run(first)


def test_the_simulation_sees_a_deadlock_and_a_wrong_order() -> None:
    plans = [plan_step(2, rank, 2) for rank in range(2)]
    # The first stage asks for a gradient before it has sent anything.
    backwards_first = [op for op in plans[0] if not op.is_forward] + [op for op in plans[0] if op.is_forward]
    with pytest.raises(AssertionError, match="wait for each other"):
        _Simulation([backwards_first, plans[1]], 1).run(0)
    swapped = [plans[0][1], plans[0][0], *plans[0][2:]]
    with pytest.raises(AssertionError, match="another message is in front"):
        _Simulation([swapped, plans[1]], 1).run(0)


class _Recorder:
    """Notes forwards (F), backwards (B) and the word that a chunk's last backward follows (S)."""

    def __init__(self, events: list[str], chunk: int) -> None:
        self.events, self.chunk = events, chunk

    def start_last_backward(self) -> None:
        self.events.append(f"S{self.chunk}")


class _Marked(torch.autograd.Function):
    """Identity whose backward is noted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str], name: str) -> torch.Tensor:
        ctx.note = (events, name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        events, name = ctx.note
        events.append(f"B{name}")
        return grad, None, None


class _Arrived:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class _AloneLink(StageLink):
    """Neighbours that are always ready: made-up activations and gradients come, what is sent is noted."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(axis(size, rank), {}, (2,), torch.float64, CPU)
        self.sent: list[tuple[Channel, int]] = []
        self.received: list[Channel] = []
        self.flushes = 0

    def _send(self, tensor: torch.Tensor, channel: Channel, step: int) -> None:
        self.sent.append((channel, self._peer(step)))

    def _post(self, channel: Channel, step: int) -> _Arrived:
        self.received.append(channel)
        return _Arrived(torch.ones(self.shape, dtype=self.dtype))

    def flush(self) -> None:
        self.flushes += 1


def _run_stage(
    size: int, rank: int, count: int, forward_only: bool = False, chunks: int = 1
) -> tuple[list[str], _AloneLink]:
    link = _AloneLink(size, rank)
    events: list[str] = []
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def forward_step(index: int, chunk: int, stage_input: torch.Tensor | None) -> torch.Tensor:
        name = f"{index}" if chunks == 1 else f"{index}.{chunk}"
        events.append(f"F{name}")
        assert (stage_input is None) == (rank == 0 and chunk == 0)
        x = weight * (torch.ones(2, dtype=torch.float64) if stage_input is None else stage_input)
        y = _Marked.apply(x, events, name)
        return y.sum() if rank == size - 1 and chunk == chunks - 1 else y

    gradients = None if forward_only else [_Recorder(events, chunk) for chunk in range(chunks)]
    run_schedule(forward_step, count, link, gradients, chunks)
    assert link.flushes == 1, "what was sent must have left before the step ends"
    return events, link


def _one_forward_one_backward(size: int, rank: int, count: int) -> list[str]:
    ahead = min(size - rank - 1, count)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(ahead, count):
        order += [f"F{i}", f"B{i - ahead}"]
    order += [f"B{i}" for i in range(count - ahead, count)]
    return [*order[:-1], "S0", order[-1]]


@pytest.mark.parametrize(("size", "count"), PIPELINES)
def test_stages_follow_1f1b(size: int, count: int) -> None:
    for rank in range(size):
        events, link = _run_stage(size, rank, count)
        assert events == _one_forward_one_backward(size, rank, count)
        # Every activation goes to the next stage, every gradient to the previous one.
        assert link.sent.count((Channel.FORWARD, rank + 1)) == (0 if rank == size - 1 else count)
        assert link.sent.count((Channel.BACKWARD, rank - 1)) == (0 if rank == 0 else count)
        assert len(link.sent) == len(link.received) == count * (1 if rank in (0, size - 1) else 2)


@pytest.mark.parametrize(("size", "count", "chunks"), [(2, 2, 2), (2, 4, 3), (3, 6, 2)])
def test_stages_follow_the_interleaved_plan(size: int, count: int, chunks: int) -> None:
    for rank in range(size):
        events, link = _run_stage(size, rank, count, chunks=chunks)
        expected: list[str] = []
        for op in plan_step(size, rank, count, chunks):
            # The gradients of a chunk are complete with the last micro-batch, each chunk by itself.
            expected += [f"S{op.chunk}"] if not op.is_forward and op.microbatch == count - 1 else []
            expected.append(f"{'F' if op.is_forward else 'B'}{op.microbatch}.{op.chunk}")
        assert events == expected
        forward, backward = Channel.FORWARD, Channel.BACKWARD
        if rank == size - 1:
            assert link.sent.count((Channel.FORWARD_WRAP, 0)) == count * (chunks - 1)
            assert forward not in [channel for channel, _ in link.sent]
        else:
            assert link.sent.count((forward, rank + 1)) == count * chunks
        if rank == 0:
            assert link.sent.count((Channel.BACKWARD_WRAP, size - 1)) == count * (chunks - 1)
            assert link.received.count(Channel.FORWARD_WRAP) == count * (chunks - 1)
        else:
            assert link.sent.count((backward, rank - 1)) == count * chunks


def test_what_comes_next_is_asked_for_before_the_computation() -> None:
    link = _AloneLink(2, 1)
    asked: list[int] = []

    def forward_step(index: int, chunk: int, stage_input: torch.Tensor | None) -> torch.Tensor:
        asked.append(len(link.received))
        return stage_input.sum()

    run_schedule(forward_step, 3, link, None)
    assert asked == [2, 3, 3]


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
    events, link = _run_stage(1, 0, count)
    assert events == [*order[:-1], "S0", order[-1]]
    assert link.sent == link.received == []


@pytest.mark.parametrize("size", [1, 3])
def test_forward_only_runs_no_backward(size: int) -> None:
    for rank in range(size):
        events, link = _run_stage(size, rank, 3, forward_only=True)
        assert events == ["F0", "F1", "F2"]
        assert link.sent == ([] if rank == size - 1 else [(Channel.FORWARD, rank + 1)] * 3)


class _Coming:
    """A receive that waits for the neighbour's send."""

    def __init__(self, line: queue.Queue) -> None:
        self.line = line

    def wait(self) -> torch.Tensor:
        return self.line.get(timeout=20.0)


class _ThreadLink(StageLink):
    """Stages that are threads, joined by one queue per channel and pair."""

    def __init__(self, size: int, rank: int, lines: dict[tuple[Channel, int, int], queue.Queue]) -> None:
        super().__init__(axis(size, rank), {}, (2,), torch.float64, CPU)
        self.lines = lines

    def _send(self, tensor: torch.Tensor, channel: Channel, step: int) -> None:
        self.lines[channel, self.pp.rank, self._peer(step)].put(tensor.clone())

    def _post(self, channel: Channel, step: int) -> _Coming:
        return _Coming(self.lines[channel, self._peer(step), self.pp.rank])


class _Unheard:
    def start_last_backward(self) -> None:
        pass


@pytest.mark.parametrize(
    ("size", "count", "chunks"),
    [(2, 1, 1), (3, 5, 1), (4, 2, 1), (4, 8, 1), (2, 2, 2), (2, 4, 3), (3, 6, 2), (4, 4, 2)],
)
def test_a_pipeline_differentiates_the_whole_product(size: int, count: int, chunks: int) -> None:
    lines = {(c, a, b): queue.Queue() for c in Channel for a in range(size) for b in range(size)}
    places = [(chunk, rank) for chunk in range(chunks) for rank in range(size)]
    weights = {
        place: torch.tensor(1.0 + 0.1 * i, dtype=torch.float64, requires_grad=True) for i, place in enumerate(places)
    }
    inputs = [torch.tensor([1.0 + i, 2.0 - i], dtype=torch.float64) for i in range(count)]

    def stage(rank: int) -> None:
        def forward_step(index: int, chunk: int, stage_input: torch.Tensor | None) -> torch.Tensor:
            x = inputs[index] if stage_input is None else stage_input
            y = torch.sin(weights[chunk, rank] * x)
            return y.sum() if (chunk, rank) == places[-1] else y

        run_schedule(forward_step, count, _ThreadLink(size, rank, lines), [_Unheard()] * chunks, chunks)

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(stage, rank) for rank in range(size)]:
            future.result()
    expected = {place: weight.detach().clone().requires_grad_() for place, weight in weights.items()}
    for x in inputs:
        for place in places:
            x = torch.sin(expected[place] * x)
        x.sum().backward()
    for place, weight in weights.items():
        torch.testing.assert_close(weight.grad, expected[place].grad, rtol=1e-12, atol=1e-14)
    assert all(line.empty() for line in lines.values())
