from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.utils.dist import (
    SINGLE,
    Group,
    agree_any,
    backend_string,
    failing_together,
    initialize_world,
    raise_on_all,
    world_group,
)
from megalite.utils.errors import CheckpointError, DataError, MegaliteError, PeerError, SaveError
from tests.unit.samples import axis, on_threads


def test_a_group_of_one_needs_no_torch_distributed() -> None:
    assert not dist.is_initialized()
    x = torch.tensor([3.0])
    assert SINGLE.all_reduce(x) is x and x.item() == 3.0
    assert SINGLE.broadcast(x) is x
    assert SINGLE.all_gather_object("a") == SINGLE.gather_object("a") == ["a"]
    assert SINGLE.broadcast_object("a") == "a"
    SINGLE.barrier()
    assert world_group() is SINGLE and initialize_world(1, 10.0) is SINGLE
    assert not dist.is_initialized()


def test_places_in_a_group() -> None:
    first, middle, last = (axis(3, rank) for rank in range(3))
    assert [g.is_first for g in (first, middle, last)] == [True, False, False]
    assert [g.is_last for g in (first, middle, last)] == [False, False, True]
    assert SINGLE.is_first and SINGLE.is_last and SINGLE.size == 1
    assert Group((4, 9), 1, None).size == 2


def test_backend_of_a_cpu_build() -> None:
    assert backend_string() == ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


@pytest.mark.parametrize(("flags", "expected"), [((0, 0, 0), False), ((0, 1, 0), True), ((1, 1, 1), True)])
def test_any_rank_decides_for_all(flags: tuple[int, ...], expected: bool) -> None:
    assert on_threads(3, lambda group: agree_any(bool(flags[group.rank]), group)) == [expected] * 3


def _failing(group: Group, error: BaseException, failing_rank: int) -> BaseException | None:
    try:
        with failing_together(group, "reading the index"):
            if group.rank == failing_rank:
                raise error
    except Exception as caught:
        return caught
    return None


def test_a_failure_of_one_rank_fails_all() -> None:
    own = SaveError("disk is full")
    results = on_threads(3, lambda group: _failing(group, own, 1))
    assert results[1] is own
    for other in (results[0], results[2]):
        assert type(other) is PeerError and other.exit_status == 4
        assert str(other) == "reading the index failed on rank 1: SaveError: disk is full"


def test_an_unexplained_failure_has_status_1() -> None:
    results = on_threads(2, lambda group: _failing(group, OSError("no space"), 0))
    assert type(results[0]) is OSError
    assert type(results[1]) is PeerError and results[1].exit_status == 1


def test_no_failure_passes_and_each_rank_keeps_its_own() -> None:
    assert on_threads(2, lambda group: _failing(group, OSError("x"), 7)) == [None, None]
    both = on_threads(2, lambda group: _failing(group, DataError(f"rank {group.rank}"), group.rank))
    assert [str(error) for error in both] == ["rank 0", "rank 1"]


def test_an_interrupt_is_not_shared() -> None:
    # Nobody else is asked: an interrupted rank does not enter a collective.
    with pytest.raises(KeyboardInterrupt), failing_together(axis(2, 0), "x"):
        raise KeyboardInterrupt


def test_torchs_own_failure_class_is_shared() -> None:
    kind = type("CheckpointException", (BaseException,), {})

    def body(group: Group) -> str:
        try:
            with failing_together(group, "loading"):
                if group.is_first:
                    raise kind("damaged")
        except BaseException as caught:
            return type(caught).__name__
        return "nothing"

    assert on_threads(2, body) == ["CheckpointException", "PeerError"]


def test_the_first_error_is_raised_on_all_ranks_alike() -> None:
    def body(group: Group) -> MegaliteError | None:
        own = [None, CheckpointError("key a"), DataError("key b")][group.rank]
        try:
            raise_on_all(own, group)
        except MegaliteError as caught:
            return caught
        return None

    results = on_threads(3, body)
    assert [(type(error), str(error)) for error in results] == [(CheckpointError, "key a")] * 3
    raise_on_all(None, SINGLE)
