"""Process groups that also work with one rank, and failures that are shared by all ranks.

``Group`` is what the rest of megalite sees of ``torch.distributed``: the ranks along one axis of the grid. A group of
one has no handle and its collectives do nothing, so that no caller asks "is torch.distributed initialised?".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megalite.utils.errors import MegaliteError, PeerError

# Newer versions of torch have these under new names and warn about the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """The ranks along one axis; ``rank`` is this process's position among them, ``ranks`` are their global ranks."""

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce ``tensor`` in place over the group and return it. Collective over the group."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.handle)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of the group's rank ``source``. Collective over the group."""
        if self.size > 1:
            dist.broadcast(tensor, src=self.ranks[source], group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``tensor``, all of one shape, in group order. Collective over the group."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.handle)
        return gathered

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable ``value`` of every rank, in group order. Collective over the group."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def gather_object(self, value: Any, target: int = 0) -> list[Any] | None:
        """Return every ``value`` on the group's rank ``target``, None elsewhere. Collective over the group."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == target else None
        dist.gather_object(value, values, dst=self.ranks[target], group=self.handle)
        return values

    def scatter_object(self, values: Sequence[Any] | None, source: int = 0) -> Any:
        """Return this rank's entry of the list ``values`` of the group's rank ``source``. Collective over the group."""
        if self.size == 1:
            return values[0]
        received: list[Any] = [None]
        given = list(values) if self.rank == source else None
        dist.scatter_object_list(received, given, src=self.ranks[source], group=self.handle)
        return received[0]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable ``value`` of the group's rank ``source``. Collective over the group."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[source], group=self.handle)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks of the group. Collective over the group."""
        if self.size > 1:
            # An all-reduce of a CPU scalar: dist.barrier() would touch the accelerator on NCCL.
            self.all_reduce(torch.zeros(1))


SINGLE = Group()


def world_group() -> Group:
    """Return the group of all ranks, or a group of one when torch.distributed is not initialised."""
    if not dist.is_initialized():
        return SINGLE
    size = dist.get_world_size()
    return Group(tuple(range(size)), dist.get_rank(), dist.group.WORLD if size > 1 else None)


def backend_string() -> str:
    """Return gloo on CPU builds, and gloo for CPU tensors beside NCCL for CUDA ones elsewhere."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def initialize_world(world_size: int, timeout_minutes: float) -> Group:
    """Join the world that torchrun describes in the environment. Collective over the world."""
    if world_size > 1 and not dist.is_initialized():
        # Imported now, as other parts of torch import it later: its default arguments are the world group of that
        # moment, and would keep it, with its threads, beyond destroy_process_group().
        from torch.distributed.nn import functional  # noqa: F401

        dist.init_process_group(backend_string(), timeout=timedelta(minutes=timeout_minutes))
    return world_group()


def agree_any(flag: bool, group: Group) -> bool:
    """Return whether ``flag`` is true on any rank. Collective over the group."""
    return bool(group.all_reduce(torch.tensor([int(flag)]), op=dist.ReduceOp.MAX).item())


@contextlib.contextmanager
def failing_together(group: Group, what: str) -> Iterator[None]:
    """Make a failure of the body on one rank a failure of all ranks. Collective over the group.

    The body must be local: a rank that raises inside it would leave the others in the body's own collectives. The
    failing rank re-raises its own error; the others raise ``PeerError`` with the failing rank's message and status.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        if not is_failure(caught):
            raise
        error = caught
    # Success costs one number; texts are exchanged only where there are some.
    if not agree_any(error is not None, group):
        return
    status = getattr(error, "exit_status", 1)
    reports = group.all_gather_object(None if error is None else (f"{type(error).__name__}: {error}", status))
    if error is not None:
        raise error
    for position, report in enumerate(reports):
        if report is not None:
            raise PeerError(f"{what} failed on rank {group.ranks[position]}: {report[0]}", report[1])


def is_failure(caught: BaseException) -> bool:
    """Return whether what was caught is an error, not a request to leave such as KeyboardInterrupt."""
    # torch's CheckpointException derives from BaseException: "except Exception" would miss every DCP failure. It is
    # told by name, because importing its module costs a second that most processes never need.
    return isinstance(caught, Exception) or type(caught).__name__ == "CheckpointException"


def raise_on_all(error: MegaliteError | None, group: Group) -> None:
    """Raise the first rank's ``error`` on every rank, as the same class and text. Collective over the group."""
    if not agree_any(error is not None, group):
        return
    reports = group.all_gather_object(None if error is None else (type(error), str(error)))
    for report in reports:
        if report is not None:
            raise report[0](report[1])
