"""Saves that are written while training goes on: a queue of requests, finalized in order by all ranks together.

    request --schedule--> its ``write``, in a thread --all ranks done--> its ``finalize_fns``, on the main thread

A thread is enough: checksums, hashes and system calls let the interpreter go. It never communicates, so that what it
does cannot cross what training does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.utils.dist import Group


@dataclass(frozen=True)
class AsyncRequest:
    """One save. Frozen: what is finalized is what was scheduled."""

    name: str
    write: Callable[[], None]
    """Local and without communication; it keeps its own failure for the functions below."""
    finalize_fns: tuple[Callable[[], None], ...]
    """Collective; run once the writes of all ranks have ended. The first one learns of a failure and raises it."""


class ThreadCaller:
    """Runs one function in a thread of its own."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        # Not one that holds the interpreter up: a process that must end, ends; what it was writing is debris.
        self._thread = threading.Thread(target=function, name=name, daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; equal on all ranks of ``group``."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._calls: deque[tuple[int, AsyncRequest, ThreadCaller]] = deque()
        self._last_index = 0

    @property
    def num_unfinalized(self) -> int:
        return len(self._calls)

    def schedule(self, request: AsyncRequest) -> int:
        """Begin to write and return the number of the call. All ranks schedule the same requests."""
        self._last_index += 1
        self._calls.append((self._last_index, request, ThreadCaller(request.write, request.name)))
        return self._last_index

    def maybe_finalize(self, *, blocking: bool = False) -> list[str]:
        """Finalize what all ranks have written, oldest first, and return the names. Collective over the group.

        With ``blocking`` all requests are waited for. What a finalize function raises is raised here; its request is
        gone then, and later ones stay.
        """
        finished = []
        while self._calls:
            index, request, caller = self._calls[0]
            if blocking:
                caller.wait()
            # One number says that all ranks are done, two more that they mean the same call.
            state = torch.tensor([int(not caller.is_done()), index, -index], dtype=torch.int64)
            unfinished, largest, negated = self.group.all_reduce(state, op=dist.ReduceOp.MAX).tolist()
            if largest != -negated:
                raise RuntimeError(f"ranks finalize different saves: this one {index}, others up to {largest}")
            if unfinished:
                break
            self._calls.popleft()
            for finalize in request.finalize_fns:
                finalize()
            finished.append(request.name)
        return finished

    def close(self) -> None:
        """Wait for what is being written and finalize nothing, as after an error of training. No communication."""
        for _, _, caller in self._calls:
            caller.wait()
        self._calls.clear()
