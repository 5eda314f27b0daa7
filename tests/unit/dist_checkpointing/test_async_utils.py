"""The queue of saves that are being written: order, agreement, failure."""

from __future__ import annotations

import threading

import pytest

from megalite.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import on_threads


def _request(name: str, done: list[str], gate: threading.Event | None = None, error: Exception | None = None):
    def write() -> None:
        if gate is not None:
            assert gate.wait(30)
        done.append(f"{name} written")

    def finalize() -> None:
        if error is not None:
            raise error
        done.append(f"{name} finalized")

    return AsyncRequest(name, write, (finalize, lambda: done.append(f"{name} logged")))


def test_requests_are_finalized_in_the_order_of_the_calls() -> None:
    queue, done, first = AsyncCallsQueue(SINGLE), [], threading.Event()
    assert queue.maybe_finalize() == []
    assert queue.schedule(_request("a", done, first)) == 1
    assert queue.schedule(_request("b", done)) == 2
    assert queue.maybe_finalize() == [] and queue.num_unfinalized == 2
    first.set()
    assert queue.maybe_finalize(blocking=True) == ["a", "b"] and queue.num_unfinalized == 0
    assert [text for text in done if "written" not in text] == ["a finalized", "a logged", "b finalized", "b logged"]


def test_a_failure_ends_its_own_request_only() -> None:
    queue, done = AsyncCallsQueue(SINGLE), []
    queue.schedule(_request("a", done, error=ValueError("broken")))
    queue.schedule(_request("b", done))
    with pytest.raises(ValueError, match="broken"):
        queue.maybe_finalize(blocking=True)
    assert queue.maybe_finalize(blocking=True) == ["b"] and "a logged" not in done


def test_nothing_is_finalized_before_all_ranks_have_written() -> None:
    gates = [threading.Event(), threading.Event()]
    asked = threading.Barrier(2)

    def body(group: Group) -> tuple[list[str], list[str]]:
        queue, done = AsyncCallsQueue(group), []
        queue.schedule(_request("a", done, gates[group.rank]))
        gates[0].set()
        early = queue.maybe_finalize()
        asked.wait()
        gates[1].set()
        return early, queue.maybe_finalize(blocking=True)

    assert on_threads(2, body) == [([], ["a"])] * 2


def test_ranks_that_mean_different_saves_are_told() -> None:
    def body(group: Group) -> str:
        queue = AsyncCallsQueue(group)
        for _ in range(1 + group.rank):
            queue.schedule(_request("a", []))
        queue._calls = type(queue._calls)([queue._calls[-1]])
        with pytest.raises(RuntimeError, match="ranks finalize different saves"):
            queue.maybe_finalize(blocking=True)
        return "told"

    assert on_threads(2, body) == ["told", "told"]


def test_closing_waits_and_finalizes_nothing() -> None:
    queue, done, gate = AsyncCallsQueue(SINGLE), [], threading.Event()
    queue.schedule(_request("a", done, gate))
    gate.set()
    queue.close()
    assert done == ["a written"] and queue.num_unfinalized == 0
