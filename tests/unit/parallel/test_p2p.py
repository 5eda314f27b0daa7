from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megalite.parallel import p2p
from megalite.parallel.p2p import Channel, StageLink
from megalite.utils.dist import Group
from tests.unit.samples import CPU

RANKS = (4, 6, 8)
"""Global ranks of a pipeline."""


@dataclass
class _Work:
    is_done: bool = False
    waits: int = 0

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.waits += 1
        self.is_done = True


@dataclass
class _Wire:
    """What was handed to torch.distributed: (peer, group, tensor, work)."""

    sent: list[tuple[int, Any, torch.Tensor, _Work]] = field(default_factory=list)
    posted: list[tuple[int, Any, torch.Tensor, _Work]] = field(default_factory=list)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> _Wire:
    wire = _Wire()

    def note(entries: list) -> Any:
        def call(tensor: torch.Tensor, peer: int, group: Any) -> _Work:
            entries.append((peer, group, tensor, _Work()))
            return entries[-1][3]

        return call

    monkeypatch.setattr(p2p.dist, "isend", note(wire.sent))
    monkeypatch.setattr(p2p.dist, "irecv", note(wire.posted))
    return wire


def _link(rank: int, ranks: tuple[int, ...] = RANKS) -> StageLink:
    channels = {channel: f"group of {channel.value}" for channel in Channel}
    return StageLink(Group(ranks, rank, None), channels, (4, 2, 3), torch.bfloat16, CPU)


F, B = Channel.FORWARD, Channel.BACKWARD
FW, BW = Channel.FORWARD_WRAP, Channel.BACKWARD_WRAP


@pytest.mark.parametrize(
    ("rank", "to_next", "from_previous", "to_previous", "from_next"),
    [
        # Between the ends of the pipeline messages go on to the next chunk, on channels of their own.
        (0, (6, F), (8, FW), (8, BW), (6, B)),
        (1, (8, F), (4, F), (4, B), (8, B)),
        (2, (4, FW), (6, F), (6, B), (4, BW)),
    ],
)
def test_neighbours_and_channels(
    rank: int,
    to_next: tuple[int, Channel],
    from_previous: tuple[int, Channel],
    to_previous: tuple[int, Channel],
    from_next: tuple[int, Channel],
    wire: _Wire,
) -> None:
    link = _link(rank)
    link.send_forward(torch.zeros(4, 2, 3))
    link.post_forward()
    link.send_backward(torch.zeros(4, 2, 3))
    link.post_backward()

    def named(entries: list) -> list[tuple[int, str]]:
        return [(peer, group) for peer, group, _, _ in entries]

    assert named(wire.sent) == [(peer, f"group of {c.value}") for peer, c in (to_next, to_previous)]
    assert named(wire.posted) == [(peer, f"group of {c.value}") for peer, c in (from_previous, from_next)]


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_stage_sends_on_a_channel_the_other_takes_from_it(size: int, wire: _Wire) -> None:
    lines: list[set[tuple[int, int, str]]] = [set(), set()]
    for rank in range(size):
        link = _link(rank, RANKS[:size])
        link.send_forward(torch.zeros(1))
        link.send_backward(torch.zeros(1))
        link.post_forward()
        link.post_backward()
        own = RANKS[rank]
        lines[0] |= {(own, peer, group) for peer, group, _, _ in wire.sent}
        lines[1] |= {(peer, own, group) for peer, group, _, _ in wire.posted}
        wire.sent.clear()
        wire.posted.clear()
    assert lines[0] == lines[1]
    # No channel carries two directions between the same two stages.
    assert not {(b, a, group) for a, b, group in lines[0]} & lines[0]


def test_a_receive_is_a_tensor_of_the_known_shape_that_is_waited_for(wire: _Wire) -> None:
    incoming = _link(1).post_forward()
    _, _, tensor, work = wire.posted[0]
    assert (tuple(tensor.shape), tensor.dtype, tensor.device) == ((4, 2, 3), torch.bfloat16, CPU)
    assert work.waits == 0, "posting does not wait"
    assert incoming.wait() is tensor and work.waits == 1


def test_what_is_sent_is_contiguous_and_outside_the_graph(wire: _Wire) -> None:
    output = torch.zeros(3, 4, requires_grad=True).t() * 2.0
    assert not output.is_contiguous()
    link = _link(0)
    link.send_forward(output)
    link.send_backward(torch.ones(3, 4).t())
    for _, _, tensor, _ in wire.sent:
        assert tensor.is_contiguous() and not tensor.requires_grad and tuple(tensor.shape) == (4, 3)


def test_a_tensor_in_flight_is_kept_until_it_has_arrived(wire: _Wire) -> None:
    link = _link(0)
    for _ in range(3):
        link.send_forward(torch.zeros(2))
    kept = [tensor.data_ptr() for _, tensor in link._outgoing]
    assert kept == [tensor.data_ptr() for _, _, tensor, _ in wire.sent]
    wire.sent[1][3].is_done = True
    link.send_forward(torch.zeros(2))
    assert [work for work, _ in link._outgoing] == [wire.sent[i][3] for i in (0, 2, 3)]


def test_a_flush_waits_for_all_that_is_under_way(wire: _Wire) -> None:
    link = _link(0)
    for _ in range(2):
        link.send_forward(torch.zeros(2))
    assert [work.waits for *_, work in wire.sent] == [0, 0], "sending does not wait"
    link.flush()
    assert [work.waits for *_, work in wire.sent] == [1, 1]
    assert link._outgoing == []
