"""Bytes to and from files of a checkpoint folder with plain system calls."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.dist_checkpointing.core import is_file_name, require_inside, unreadable
from megalite.dist_checkpointing.strategies.base import Piece
from megalite.utils.errors import DamagedCheckpointError
from megalite.utils.files import FaultHook, no_fault

_MOST_AT_ONCE = 1 << 30
_WRITE_BACK = 8 << 20
"""Bytes after which the device is asked to begin."""
_BEGIN_ONLY = 2
"""SYNC_FILE_RANGE_WRITE: start, do not wait."""


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    """Return the system's function, where there is one; Python has none."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def _start_write_back(handle: int, offset: int, length: int) -> None:
    """Let the device begin with these bytes instead of with all of them at the end.

    Advice: a filesystem may not take it, and what goes wrong on the way is what ``fsync`` reports.
    """
    if (start := _sync_file_range()) is not None:
        start(handle, ctypes.c_int64(offset), ctypes.c_int64(length), _BEGIN_ONLY)


class FileSink:
    """A new file written through the page cache, durable once closed."""

    def __init__(self, path: Path, hook: FaultHook = no_fault) -> None:
        self._path, self._hook = path, hook
        hook("open", path)
        # Unbuffered: pieces are large, a buffer would only copy them.
        self._file = open(path, "wb", buffering=0)
        self._written = self._on_its_way = 0

    def write(self, pieces: Sequence[Piece]) -> None:
        self._hook("write", self._path)
        for piece in pieces:
            rest = memoryview(piece)
            # In parts, so that the device can begin with one; a call may also take less, as on a full device.
            while rest:
                done = self._file.write(rest[:_WRITE_BACK])
                self._written += done
                rest = rest[done:]
                if self._written - self._on_its_way >= _WRITE_BACK:
                    _start_write_back(self._file.fileno(), self._on_its_way, self._written - self._on_its_way)
                    self._on_its_way = self._written

    def close(self) -> None:
        try:
            self._hook("fsync", self._path)
            os.fsync(self._file.fileno())
            self._hook("close", self._path)
        finally:
            self._file.close()

    def abort(self) -> None:
        self._file.close()


class FileSource:
    """Files of one folder, the last used one kept open; nothing outside the folder is opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._name: str | None = None
        self._handle = -1
        self._size = 0

    def read(self, file: str, offset: int, length: int) -> bytes:
        self._require(file, offset, length)
        data = bytearray(length)
        self._fill(file, offset, memoryview(data))
        return bytes(data)

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on; CheckpointError as for ``read``."""
        self._require(file, offset, len(target))
        self._fill(file, offset, target)

    def _require(self, file: str, offset: int, length: int) -> None:
        """Raise unless the file has these bytes: a length decides how much memory is taken, so it is never trusted."""
        if self._name != file:
            try:
                self._open(file)
            except OSError as error:
                raise unreadable(self._folder / file, error) from error
        if offset + length > self._size:
            raise DamagedCheckpointError(
                f"{self._folder / file} is cut short: it has {self._size} bytes, the index needs {offset + length}; "
                "use another checkpoint"
            )

    def _fill(self, file: str, offset: int, target: memoryview) -> None:
        try:
            while target:
                done = os.preadv(self._handle, [target[:_MOST_AT_ONCE]], offset)
                if not done:
                    raise OSError(errno.EIO, "the file has become shorter", str(self._folder / file))
                target, offset = target[done:], offset + done
        except OSError as error:
            raise unreadable(self._folder / file, error) from error

    def _open(self, file: str) -> None:
        self.close()
        if not is_file_name(file):
            raise DamagedCheckpointError(
                f"{self._folder}: the index names {file!r}, not a file of the folder; do not use it"
            )
        path = self._folder / file
        require_inside(path)
        if os.path.exists(path) and not os.path.isfile(path):
            raise DamagedCheckpointError(f"{path} is not a regular file; do not use this checkpoint")
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._handle).st_size
        self._name = file

    def close(self) -> None:
        if self._name is not None:
            os.close(self._handle)
        self._name = None
