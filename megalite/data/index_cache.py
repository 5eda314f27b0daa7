"""Index tables kept as ``.npy`` files that several ranks and jobs may build, replace and read at the same time."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megalite.utils.files import make_directories

logger = logging.getLogger(__name__)

Tables = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and type of each table, by name."""


def default_cache_folder(prefix: Path) -> Path:
    """Return the folder beside the data that Megatron uses too."""
    return prefix.parent / "cache" / "GPTDataset_indices"


def store(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file that appears at ``path`` whole or not at all; raises OSError.

    Every caller writes a file of its own, so that no lock is needed: of several builders the last one wins, and a
    reader that has the replaced file open keeps it.
    """
    make_directories(path.parent)
    # The pid alone is not unique on a file system that several hosts share.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """Return the array at ``path`` mapped read-only, or None when it is not there or not what was expected.

    A damaged file is named in a WARNING. Nothing is unpickled: an array of objects counts as damaged.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
        problem = None
        if array.shape != shape or array.dtype != dtype:
            problem = f"it holds {array.dtype.name} {array.shape}, expected {dtype.name} {shape}"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem is None:
        return array
    logger.warning("index cache %s is damaged and is built again: %s", path, problem)
    return None


def load_or_build(
    folder: Path | None, label: str, definition: Mapping[str, Any], shapes: Shapes, build: Callable[[], Tables]
) -> Tables:
    """Return the tables of ``definition``: from ``folder``, or built and then kept there.

    A ``folder`` that is None or that cannot be written leaves them in memory. ``label`` is part of the file names.
    """
    if folder is None:
        return build()
    text = json.dumps(definition, indent=4).encode()
    start = f"{hashlib.sha256(text).hexdigest()[:32]}-{label}"
    paths = {name: folder / f"{start}-{name}.npy" for name in shapes}
    tables = _load(paths, shapes)
    if tables is not None:
        return tables
    tables = build()
    try:
        store(folder / f"{start}-description.txt", lambda file: file.write(text))
        for name, array in tables.items():
            store(paths[name], functools.partial(np.save, arr=array, allow_pickle=False))
    except OSError as error:
        logger.warning(
            "%s: the index cache folder %s cannot be written (%s); indices stay in memory and are built again at every "
            "start. Set data.data_cache_path to a folder that can be written.",
            label,
            folder,
            error.strerror,
        )
        return tables
    # Mapped instead of kept: the ranks of a host then share one copy.
    return _load(paths, shapes) or tables


def _load(paths: Mapping[str, Path], shapes: Shapes) -> Tables | None:
    tables = {}
    for name, path in paths.items():
        array = load_array(path, *shapes[name])
        if array is None:
            return None
        tables[name] = array
    return tables
