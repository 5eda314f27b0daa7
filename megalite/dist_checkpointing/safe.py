"""Reading files of others without running their code.

``.metadata`` is a bare pickle: an unpickler with an allow-list turns every class in it into an inert record, so that
nothing of torch is even called. ``common.pt`` and all items are ``torch.save`` archives: their checksums are
verified, then torch's weights-only unpickler reads them with a short list of further classes. Classes of Megatron
become inert records.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import pathlib
import pickle
import re
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.archive import check_records, find_records
from megalite.utils.errors import CheckpointError, DamagedCheckpointError

FOREIGN_PREFIXES = ("megatron.", "nvidia_resiliency_ext.")

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class Record:
    """What is left of a class of a foreign file: its name, the arguments of its call and its state. Runs nothing."""

    name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args


class _RecordOfAnyState(Record):
    """Keeps a state that is no plain dict as it is: TensorProperties has a tuple."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.__dict__.update(state)
        else:
            self.state = state


_WITH_DICTS = ("MetadataIndex", "_StorageInfo", "ChunkStorageMetadata")
"""Classes of which there is one for each chunk. Their state is a dict; another one is refused by pickle itself."""


def _record_class(name: str) -> type[Record]:
    base = Record if name.rpartition(".")[2] in _WITH_DICTS else _RecordOfAnyState
    return type("Record", (base,), {"name": name})


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            if name == "Size":
                return tuple
            if isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
        elif name in _INDEX_CLASSES.get(module, ()) or module.startswith(FOREIGN_PREFIXES):
            full_name = f"{module}.{name}"
            return self._classes.setdefault(full_name, _record_class(full_name))
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index has no use for")


_SHOWN_TEXT = 200


def shown(value: Any) -> str:
    """Return a value of a stranger's file for a message: short, whatever it is."""
    if isinstance(value, str):
        return value if len(value) <= _SHOWN_TEXT and value.isprintable() else ascii(value[:_SHOWN_TEXT])
    if value is None or (type(value) is int and value.bit_length() <= 128):
        return str(value)
    if type(value) is tuple and len(value) <= 8 and all(type(part) is int for part in value):
        return f"({', '.join(shown(part) for part in value)}{',' * (len(value) == 1)})"
    return f"a {type(value).__name__}"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from looking at hundreds of thousands of new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unpickle_index(data: bytes, where: str) -> Record:
    """Return the pickled index as inert records; CheckpointError when it is damaged or names anything else."""
    try:
        found = _IndexUnpickler(data).load()
    except MemoryError as error:
        raise _too_large(where) from error
    # Bytes of a stranger can make the unpickler raise nearly anything.
    except Exception as error:
        raise DamagedCheckpointError(f"{where} is damaged or hostile: {error}; do not use this checkpoint") from error
    if not isinstance(found, Record):
        raise DamagedCheckpointError(
            f"{where} holds a {type(found).__name__}, expected an index; do not use this checkpoint"
        )
    return found


def _too_large(where: str) -> CheckpointError:
    # Not damage: it may be this process that has too little, and an older step would fare no better.
    return CheckpointError(
        f"{where} needs more memory than there is: it is damaged or hostile, or this process has too little; look at "
        "it with tools/inspect_checkpoint.py verify"
    )


def archive_sizes(data: bytes, where: str) -> dict[str, int]:
    """Return record name -> bytes of a ``torch.save`` archive after checking structure and checksums.

    CheckpointError when it is no archive, is cut short, or a checksum differs. A checksum of 0 was not computed.
    """
    view = memoryview(data)

    def read(start: int, length: int) -> memoryview:
        return view[start : start + length]

    records = find_records(read, len(view), where)
    check_records(read, records, where)
    return {record.name: record.size for record in records}


def load_archive(data: bytes, where: str) -> Any:
    """Return the object of a ``torch.save`` archive on the CPU; CheckpointError when damaged or not plain data."""
    archive_sizes(data, where)
    return load_checked_archive(data, where)


def load_checked_archive(data: bytes, where: str) -> Any:
    """Return the object of an archive whose records ``archive_sizes`` has already checked."""
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            try:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                foreign = _foreign_classes(data)
                if not foreign:
                    raise
        with torch.serialization.safe_globals(_plain_classes() + foreign):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise _too_large(where) from error
    # Bytes of a stranger can make the unpickler raise nearly anything.
    except Exception as error:
        names = ", ".join(_unsafe_names(data))
        # torch explains at length how to load without protection; its last line but one says what is wrong.
        reason = re.search(r"WeightsUnpickler error: (.*)", str(error))
        detail = f"it names {names}" if names else reason[1] if reason else f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(f"{where} is damaged or hostile: {detail}; do not use this checkpoint") from error


def _plain_classes() -> list[Any]:
    reconstruct = np.empty(0, np.uint32).__reduce__()[0]
    return [
        argparse.Namespace,
        types.SimpleNamespace,
        (pathlib.PosixPath, "pathlib.PosixPath"),
        (pathlib.PosixPath, "pathlib._local.PosixPath"),
        (io.BytesIO, "_io.BytesIO"),
        # numpy 2 renamed numpy.core; files of both are read by both.
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]


def _unsafe_names(data: bytes) -> list[str]:
    try:
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # A damaged archive has no names to show; the caller reports the damage itself.
        return []


def _foreign_classes(data: bytes) -> list[Any]:
    names = _unsafe_names(data)
    return [(_record_class(name), name) for name in names if name.startswith(FOREIGN_PREFIXES)]


_MOST_VALUES = 2_000_000
_DEEPEST = 200


def require_modest(value: Any, where: str) -> None:
    """Raise DamagedCheckpointError for a tree that is deeper or larger than any state is.

    A few bytes can describe a list that holds itself many times over; whoever walks it later would not come back.
    """
    rest: list[tuple[Any, int]] = [(value, 0)]
    seen = 0
    while rest:
        part, depth = rest.pop()
        seen += 1
        if seen > _MOST_VALUES or depth > _DEEPEST:
            raise DamagedCheckpointError(
                f"{where} is damaged or hostile: it has more than {_MOST_VALUES} values or {_DEEPEST} levels; do not "
                "use this checkpoint"
            )
        if isinstance(part, dict):
            rest += [(inner, depth + 1) for inner in (*part.keys(), *part.values())]
        elif isinstance(part, (list, tuple, set, frozenset)) and not isinstance(part, torch.Size):
            rest += [(inner, depth + 1) for inner in part]
        elif isinstance(part, (argparse.Namespace, types.SimpleNamespace)):
            rest.append((vars(part), depth + 1))


_PLAIN_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.Size,
    torch.device,
    pathlib.PosixPath,
)


def find_unreadable(value: Any, path: str) -> str | None:
    """Return what in ``value`` the readers of a checkpoint would refuse (``path: type``), or None when all is plain.

    Megatron's reader allows the same types: no numpy scalars, no enums, no classes of ours.
    """
    if type(value) in _PLAIN_TYPES or type(value) in (torch.Tensor, torch.nn.Parameter):
        return None
    if type(value) is np.ndarray and value.dtype == np.uint32:
        return None
    if type(value) in (list, tuple, set):
        parts = ((f"{path}.{index}", part) for index, part in enumerate(value))
    elif type(value) in (dict, OrderedDict):
        for key in value:
            if (bad := find_unreadable(key, f"key of {path}")) is not None:
                return bad
        parts = ((f"{path}.{key}", part) for key, part in value.items())
    elif type(value) in (argparse.Namespace, types.SimpleNamespace):
        parts = ((f"{path}.{key}", part) for key, part in vars(value).items())
    else:
        shown = f"numpy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__qualname__
        return f"{path}: {shown}"
    return next((bad for name, part in parts if (bad := find_unreadable(part, name)) is not None), None)
