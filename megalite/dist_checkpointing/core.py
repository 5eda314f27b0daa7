"""The completeness marker ``metadata.json``: a folder without a valid one is not a checkpoint."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megalite.utils.errors import CheckpointError, DamagedCheckpointError
from megalite.utils.files import read_regular_file

MARKER_FILE = "metadata.json"
COMMON_FILE = "common.pt"
INDEX_FILE = ".metadata"
_MOST_OF_MARKER = 1 << 16


@dataclass(frozen=True)
class CheckpointingConfig:
    """Content of the marker: which layout, in which version, lies in the folder."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    def marker_bytes(self) -> bytes:
        """Return the exact bytes of the marker: Megatron's separators and order, no newline at the end."""
        return json.dumps(asdict(self)).encode("ascii")


TORCH_DIST = CheckpointingConfig("torch_dist")


_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return what to raise when a file of a checkpoint cannot be read.

    Damage when it is not there or no file; else the disk or the permissions are at fault, and no other step would do.
    """
    if error.errno in _DAMAGE:
        return DamagedCheckpointError(f"cannot read {path}: {error}; the checkpoint is damaged, use another")
    return CheckpointError(f"cannot read {path}: {error}; check the file, its permissions and its disk")


def is_file_name(name: Any) -> bool:
    """Return whether ``name`` can only be an entry of the folder itself."""
    return type(name) is str and name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def read_entry(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a file of a checkpoint folder.

    OSError when it is no regular file or longer than ``limit``; DamagedCheckpointError when it is a link out of the
    folder.
    """
    require_inside(path)
    return read_regular_file(path, limit)


def require_inside(path: Path) -> None:
    """Raise DamagedCheckpointError when an entry of a checkpoint folder is a link to what lies elsewhere."""
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
        raise DamagedCheckpointError(f"{path} is a link out of the checkpoint folder; do not use this checkpoint")


def read_marker(folder: Path) -> CheckpointingConfig:
    """Return the marker of ``folder``; CheckpointError when the folder, the marker or its content is not valid."""
    path = Path(folder) / MARKER_FILE
    try:
        text = read_entry(path, _MOST_OF_MARKER)
    except FileNotFoundError as error:
        found = "holds no metadata.json, so its save did not finish" if path.parent.is_dir() else "does not exist"
        raise DamagedCheckpointError(f"{path.parent} {found}; choose another step or save again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        values = json.loads(text)
        known = {field.name for field in fields(CheckpointingConfig)}
        if isinstance(values, dict) and "sharded_backend" in values and (more := sorted(values.keys() - known)):
            raise CheckpointError(
                f"{path} has the keys {', '.join(map(repr, more[:5]))}, which this version does not know; read it with "
                "the program that wrote it"
            )
        config = CheckpointingConfig(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is not a valid marker: {error}; the checkpoint is damaged, use another"
        ) from error
    declared = {
        "sharded_backend": str,
        "sharded_backend_version": int,
        "common_backend": str,
        "common_backend_version": int,
    }
    for name, kind in declared.items():
        if type(getattr(config, name)) is not kind:
            raise DamagedCheckpointError(
                f"{path}: {name} is {getattr(config, name)!r}, expected {kind.__name__}; the checkpoint is damaged, "
                "use another"
            )
    return config


def is_complete(folder: Path) -> bool:
    """Return whether ``folder`` holds a valid marker."""
    try:
        read_marker(folder)
    except CheckpointError:
        return False
    return True


def require_torch_dist(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` is a complete checkpoint of the layout read here."""
    found = read_marker(folder)
    if found != TORCH_DIST:
        raise CheckpointError(
            f"{folder / MARKER_FILE} names layout {found.sharded_backend} version {found.sharded_backend_version} with "
            f"{found.common_backend} version {found.common_backend_version}, this reader knows torch_dist 1 with "
            "torch 1; convert it first"
        )
