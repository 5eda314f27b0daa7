"""Files that survive a crash: written beside their name, flushed to the device, renamed, and the folder flushed too."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

FaultHook = Callable[[str, Path], None]
"""Called as ``hook(point, path)`` before each file operation; a test raises or stops the process in it."""


def no_fault(point: str, path: Path) -> None:
    """The hook of a real run: does nothing."""


def read_regular_file(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a regular file; OSError when it is anything else or longer than ``limit``.

    A pipe or device that somebody put in its place does not hold the reader up.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes where at most {limit} are expected", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def fsync_directory(folder: Path) -> None:
    """Make the entries of ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes, hook: FaultHook = no_fault) -> None:
    """Write ``data`` to ``path`` and flush it to the device; the directory entry is the caller's to flush."""
    hook("write", path)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        hook("fsync", path)
        os.fsync(file.fileno())


def replace_atomically(path: Path, data: bytes, hook: FaultHook = no_fault) -> None:
    """Replace ``path`` by ``data`` so that a reader sees the old content or the new, also after a power loss."""
    # A leading dot and the pid keep readers of the folder from taking the temporary for the file itself.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, data, hook)
        hook("rename", path)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    hook("fsync_directory", path.parent)
    fsync_directory(path.parent)


def make_directories(path: Path) -> None:
    """Create ``path`` and its missing parents, and make each new entry durable."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)
