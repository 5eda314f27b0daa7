"""A file written past the page cache: small aligned buffers, filled in turn while the one before is on its way.

The device takes whole sectors from aligned memory; the last buffer is padded and the file then cut to its length. A
filesystem that does not take such writes (tmpfs, some network and overlay filesystems) says so when the file is opened
or at the first write; the caller then writes through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megalite.dist_checkpointing.strategies.base import ByteSink, Piece
from megalite.dist_checkpointing.strategies.filesystem import FileSink
from megalite.utils.files import FaultHook, no_fault

SECTOR = 4096
_BUFFER = 8 << 20
_NUM_BUFFERS = 2
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectNotSupported(OSError):
    """The filesystem does not take writes past its cache."""


class DirectSink:
    """A new file, durable once closed, whose bytes never lie in the page cache."""

    def __init__(self, path: Path, hook: FaultHook = no_fault) -> None:
        self._path, self._hook = path, hook
        hook("open", path)
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _refusal(error) from error
        # Anonymous maps begin at a page, which is what alignment asks for.
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER), dtype=np.uint8) for _ in range(_NUM_BUFFERS)]
        self._writing: list[Future | None] = [None] * _NUM_BUFFERS
        self._writer = ThreadPoolExecutor(1)
        self._current = self._filled = self._written = 0

    def write(self, pieces: Sequence[Piece]) -> None:
        self._hook("write", self._path)
        for piece in pieces:
            if not len(piece):
                continue
            rest = np.frombuffer(piece, dtype=np.uint8)
            while len(rest):
                part = rest[: _BUFFER - self._filled]
                np.copyto(self._buffers[self._current][self._filled : self._filled + len(part)], part)
                self._filled += len(part)
                rest = rest[len(part) :]
                if self._filled == _BUFFER:
                    self._hand_over(_BUFFER)

    def _hand_over(self, length: int) -> None:
        """Let the present buffer be written, and wait until the next one may be filled."""
        buffer, position = self._buffers[self._current], self._written
        self._writing[self._current] = self._writer.submit(self._put, buffer[:length], position)
        if position == 0:
            # The first write tells whether the filesystem takes them at all: nothing else is under way yet.
            self._writing[self._current].result()
        self._written += length
        self._current = (self._current + 1) % _NUM_BUFFERS
        self._filled = 0
        if (pending := self._writing[self._current]) is not None:
            pending.result()

    def _put(self, data: np.ndarray, position: int) -> None:
        rest = memoryview(data)
        while rest:
            try:
                done = os.pwrite(self._handle, rest, position)
            except OSError as error:
                raise (_refusal(error) if position == 0 else error) from error
            rest, position = rest[done:], position + done

    def close(self) -> None:
        try:
            length = self._written + self._filled
            if self._filled:
                padded = -(-self._filled // SECTOR) * SECTOR
                self._buffers[self._current][self._filled : padded] = 0
                self._hand_over(padded)
            for pending in self._writing:
                if pending is not None:
                    pending.result()
            os.ftruncate(self._handle, length)
            self._hook("fsync", self._path)
            os.fsync(self._handle)
            self._hook("close", self._path)
        finally:
            self._release()

    def abort(self) -> None:
        for pending in self._writing:
            if pending is not None:
                # Whatever failed is known; the thread must not write into a handle that is used again.
                with contextlib.suppress(OSError):
                    pending.result()
        self._release()

    def _release(self) -> None:
        self._writer.shutdown()
        os.close(self._handle)


def _refusal(error: OSError) -> OSError:
    return DirectNotSupported(*error.args) if error.errno in _REFUSALS else error


def takes_direct_writes(folder: Path) -> bool:
    """Return whether files in ``folder`` can be written past the page cache, by writing one."""
    if not hasattr(os, "O_DIRECT"):
        return False
    # The pid alone is not unique in a folder that several hosts share.
    path = folder / f".direct.{uuid.uuid4().hex}.tmp"
    try:
        sink = DirectSink(path)
        sink.write([b"x"])
        sink.close()
    except DirectNotSupported:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def open_sink(path: Path, is_direct: bool, hook: FaultHook) -> ByteSink:
    """Return the sink for a new file."""
    return DirectSink(path, hook) if is_direct else FileSink(path, hook)
