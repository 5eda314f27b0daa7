"""Save and load of a sharded state dict: the order of events, and who learns of a failure.

A save writes into a folder that exists, in this order: ``common.pt`` (rank 0) and the data files, all flushed to the
device; then, once every rank has reported success, ``.metadata`` by rename (rank 0). The folder becomes a checkpoint
only by ``write_marker``, which is the caller's step. The path of the bytes is drawn in ``strategies.base``.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.dist_checkpointing.core import COMMON_FILE, INDEX_FILE, MARKER_FILE, TORCH_DIST, require_torch_dist
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.mapping import ShardedTensor
from megalite.dist_checkpointing.safe import find_unreadable, load_archive
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves, common_part
from megalite.dist_checkpointing.strategies.base import (
    ByteSource,
    CheckpointIndex,
    ChunkRead,
    ItemFraming,
    LoadPlan,
    Staging,
    SynchronousStaging,
)
from megalite.dist_checkpointing.strategies.filesystem import FileSink, FileSource
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.torch_dist import (
    LocalSave,
    file_sizes,
    index_bytes,
    merge_plans,
    parse_index,
    plan_load,
    plan_local_save,
)
from megalite.dist_checkpointing.validation import check_exactly_once, check_keys, check_shapes, shown_names
from megalite.utils.dist import Group
from megalite.utils.errors import CheckpointError, SaveError
from megalite.utils.files import FaultHook, fsync_directory, no_fault, replace_atomically, write_durably

logger = logging.getLogger(__name__)


def save(
    sharded_state_dict: dict,
    folder: Path,
    *,
    group: Group,
    content_metadata: dict | None = None,
    hook: FaultHook = no_fault,
) -> None:
    """Write the main replicas of all ranks and rank 0's plain values into the existing ``folder``, durably.

    Collective over ``group``. Raises SaveError on every rank, with one text, when a block is written not exactly
    once, a value could not be read back, or a file cannot be written; ``.metadata`` does not exist then.
    """
    folder = Path(folder)
    framing = TorchSaveFraming()

    def plan_locally() -> tuple[LocalSave, bytes]:
        local = plan_local_save(ShardedLeaves(sharded_state_dict), group.ranks[group.rank], framing)
        return local, _common_bytes(sharded_state_dict, content_metadata) if group.is_first else b""

    local, common = agreed(group, f"planning the save into {folder}", plan_locally)
    plans = group.gather_object(local.plan)

    def check_globally() -> tuple[bytes, dict[str, int]]:
        if plans is None:
            return b"", {}
        plan = merge_plans(plans)
        check_exactly_once(plan)
        return index_bytes(plan, folder), file_sizes(plan)

    index, sizes = agreed(group, f"checking the plan of the save into {folder}", check_globally)

    def write() -> None:
        with _explained(folder):
            if group.is_first:
                write_durably(folder / COMMON_FILE, common, hook)
            _write_items(local, folder, SynchronousStaging(), framing, hook)

    agreed(group, f"writing into {folder}", write)

    def finish() -> None:
        if group.is_first:
            _check_files(folder, sizes)
            with _explained(folder):
                replace_atomically(folder / INDEX_FILE, index, hook)

    agreed(group, f"writing the index of {folder}", finish)


def write_marker(folder: Path, hook: FaultHook = no_fault) -> None:
    """Make ``folder`` a checkpoint: the marker appears by rename and the folder is flushed. One rank calls it, last."""
    replace_atomically(Path(folder) / MARKER_FILE, TORCH_DIST.marker_bytes(), hook)


def _check_files(folder: Path, sizes: dict[str, int]) -> None:
    """Raise SaveError unless every rank's file is where this rank sees it: a folder that nodes do not share is none."""
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise SaveError(
                f"{path} {state}, but its rank wrote {size} bytes; all ranks have to see one folder, so put it on a "
                "filesystem that the nodes share"
            )


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an I/O error of the body into a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write into {folder}: {error}; check its space and mount, then save again") from error


def _common_bytes(sharded_state_dict: dict, content_metadata: dict | None) -> bytes:
    common = common_part(sharded_state_dict)
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    if (bad := find_unreadable(common, COMMON_FILE)) is not None:
        raise SaveError(f"{bad} cannot be read back safely from a checkpoint; store plain Python data")
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


def _write_items(local: LocalSave, folder: Path, staging: Staging, framing: ItemFraming, hook: FaultHook) -> None:
    plan = local.plan
    if not len(plan.lengths):
        return
    sink = FileSink(folder / plan.file, hook)
    try:
        for data in local.objects:
            sink.write([data])
        lengths = plan.lengths[len(local.objects) :].tolist()
        for tensor, planned in zip(staging.stage(local.tensors), lengths, strict=True):
            pieces = framing.frame_tensor(tensor)
            assert sum(len(piece) for piece in pieces) == planned, "an item is not as long as its plan says"
            sink.write(pieces)
    except BaseException:
        sink.abort()
        raise
    sink.close()
    hook("fsync_directory", folder)
    fsync_directory(folder)


@dataclass(frozen=True)
class _Header:
    """The small files of a checkpoint: read by one rank, parsed by all."""

    common: bytes
    index: bytes


def _read_header(folder: Path) -> _Header:
    require_torch_dist(folder)
    return _Header(_small_file(folder / COMMON_FILE), _small_file(folder / INDEX_FILE))


def _small_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; the checkpoint is damaged, use another") from error


def _parse_common(data: bytes, folder: Path) -> dict:
    common = load_archive(data, str(folder / COMMON_FILE))
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / COMMON_FILE} holds a {type(common).__name__}, expected a dict; use another")
    return common


def load(
    sharded_state_dict: dict,
    folder: Path,
    *,
    group: Group,
    strict: bool = True,
    ignore_keys: Callable[[str], bool] | None = None,
) -> dict:
    """Return the state dict of the checkpoint in the structure of the request; tensors are filled in place.

    Collective over ``group``; the request may be cut in any way. Plain values come from the file, stored elements are
    converted to the requested dtype. ``ignore_keys`` gets a key on disk (of objects with ``/shard_...``) and says
    whether it is knowingly not asked for. With ``strict`` off, other differences of the key sets are one WARNING, and
    what the file lacks keeps its local value. After an error the content of the tensors is undefined. Raises
    CheckpointError, with the same text on every rank, when the folder is not a complete checkpoint, is damaged or
    hostile, or its keys or global shapes are not those asked for.
    """
    folder = Path(folder)
    header = agreed(group, f"reading {folder}", lambda: _read_header(folder) if group.is_first else None)
    header = group.broadcast_object(header)

    def parse() -> tuple[dict, CheckpointIndex, ShardedLeaves]:
        index = parse_index(header.index, str(folder / INDEX_FILE))
        return _parse_common(header.common, folder), index, ShardedLeaves(sharded_state_dict)

    common, index, leaves = agreed(group, f"parsing {folder}", parse)
    missing, unexpected = _differing_keys(leaves, index, group, ignore_keys)
    if strict:
        check_keys(folder, missing, unexpected)
    elif group.is_first and (missing or unexpected):
        logger.warning(
            "%s and the run differ, load is not strict: not in the file, local values kept: [%s]; not asked for: [%s]",
            folder,
            shown_names(unexpected),
            shown_names(missing),
        )

    def plan() -> LoadPlan:
        check_shapes(leaves.tensors, index, folder)
        return plan_load(leaves, index, folder)

    load_plan = agreed(group, f"planning the load of {folder}", plan)
    framing = TorchSaveFraming()
    objects = agreed(group, f"loading {folder}", lambda: _read_items(load_plan, folder, framing))
    return agreed(group, f"assembling {folder}", lambda: leaves.assemble(common, objects))


def _differing_keys(
    leaves: ShardedLeaves, index: CheckpointIndex, group: Group, ignore_keys: Callable[[str], bool] | None
) -> tuple[list[str], list[str]]:
    """Return stored keys that no rank requests, and requested ones that are not stored. Collective over ``group``."""
    stored = index.keys
    requested = {leaf.key for leaf in leaves.tensors} | {leaf.unique_key for leaf in leaves.objects}
    # All ranks know the stored keys in the same order: a bit for each is all that has to be exchanged.
    bits = [int(key in requested) for key in stored]
    seen = group.all_reduce(torch.tensor([*bits, 0], dtype=torch.int64)).tolist()
    strangers = {leaf.key for leaf in leaves.tensors if leaf.key not in index.tensors}
    strangers |= {leaf.unique_key for leaf in leaves.objects if leaf.unique_key not in index.objects}
    unexpected: set[str] = set().union(*group.all_gather_object(sorted(strangers)))
    ignored: Callable[[str], bool] = ignore_keys or (lambda key: False)
    missing = [key for key, count in zip(stored, seen[:-1], strict=True) if not count and not ignored(key)]
    return missing, sorted(unexpected)


def _read_items(plan: LoadPlan, folder: Path, framing: ItemFraming) -> dict[str, Any]:
    """Fill the leaves of ``plan`` and return the loaded objects by unique key."""
    source = FileSource(folder)
    try:
        objects = {}
        for key, item in plan.objects:
            data = source.read(item.file, item.offset, item.length)
            objects[key] = framing.parse_object(data, f"{key} in {folder / item.file}")
        for leaf in plan.zeroed:
            leaf.data.detach().zero_()
        for read in plan.chunks:
            _fill(read, folder, source, framing)
    finally:
        source.close()
    return objects


def _fill(read: ChunkRead, folder: Path, source: ByteSource, framing: ItemFraming) -> None:
    item = read.chunk.item
    data = source.read(item.file, item.offset, item.length)
    tensor = framing.parse_tensor(data, read.dtype, read.chunk.sizes, f"{read.name}/{item.file}")
    for copy in read.copies:
        target = copy.leaf.global_data
        part = tensor.detach()
        for axis, (start, goal, size) in enumerate(zip(copy.source, copy.target, copy.sizes, strict=True)):
            part = part.narrow(axis, start, size)
            target = target.narrow(axis, goal, size)
        target.copy_(part)


def load_common_state_dict(folder: Path) -> dict:
    """Return the plain values of a complete checkpoint, as one process reads them."""
    folder = Path(folder)
    require_torch_dist(folder)
    return _parse_common(_small_file(folder / COMMON_FILE), folder)


def load_content_metadata(folder: Path) -> dict | None:
    """Return the ``content_metadata`` of a complete checkpoint, or None for a file that has none."""
    return load_common_state_dict(folder).get("content_metadata")


def load_tensor_metadata(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return global shape and dtype of every tensor of a complete checkpoint."""
    return {key: (stored.shape, stored.dtype) for key, stored in read_index(folder).tensors.items()}


def read_index(folder: Path) -> CheckpointIndex:
    """Return where every item of a complete checkpoint lies."""
    folder = Path(folder)
    return parse_index(_read_header(folder).index, str(folder / INDEX_FILE))


def load_plain_tensors(folder: Path, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return whole global tensors of a complete checkpoint on one process; all of them without ``keys``."""
    folder = Path(folder)
    index = read_index(folder)
    wanted = list(index.tensors) if keys is None else list(keys)
    check_keys(folder, [], [key for key in wanted if key not in index.tensors])
    tensors = {key: torch.empty(index.tensors[key].shape, dtype=index.tensors[key].dtype) for key in wanted}
    request = {
        key: ShardedTensor.from_block(key, data, tuple(data.shape), (0,) * data.dim()) for key, data in tensors.items()
    }
    _read_items(plan_load(ShardedLeaves(request), index, folder), folder, TorchSaveFraming())
    return tensors
