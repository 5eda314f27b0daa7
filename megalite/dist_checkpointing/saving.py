"""Saving a sharded state dict: the order of events, and who learns of a failure.

A save writes into a folder that exists, in this order: ``common.pt`` (one rank) and the data files, all flushed to the
device; then, once every rank has reported success, ``.metadata`` and the hashes by rename (one rank). The folder
becomes a checkpoint only by ``write_marker``, which is the caller's step. The path of the bytes is drawn in
``strategies.base``.

What is exchanged: a few numbers per rank while the structure of the state is that of the save before; else the plans,
as arrays, once and to one rank, which checks that every element is written exactly once. After the writes the lengths
of the objects and the hashes, if there are any, go to the same rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megalite.dist_checkpointing.core import COMMON_FILE, INDEX_FILE, MARKER_FILE, TORCH_DIST
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.integrity import SHA256_FILE, XXH3_FILE, HashedFile, Integrity, hash_of, manifest
from megalite.dist_checkpointing.mapping import ShardedTensor, volume
from megalite.dist_checkpointing.safe import find_unreadable
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves, common_part, digests_of_common
from megalite.dist_checkpointing.strategies.base import (
    GlobalSavePlan,
    ItemFraming,
    SavePlan,
    Staging,
    SynchronousStaging,
)
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.fully_parallel import (
    Holdings,
    Share,
    checked_share,
    describe,
    exchange_shares,
)
from megalite.dist_checkpointing.strategies.index_writer import IndexWriter
from megalite.dist_checkpointing.strategies.planning import (
    file_sizes,
    frame_objects,
    merge_plans,
    plan_local_save,
    structure_digest,
)
from megalite.dist_checkpointing.strategies.writer import ItemWriter
from megalite.dist_checkpointing.validation import check_declared, check_exactly_once, check_objects, shown_names
from megalite.utils.dist import SINGLE, Group, is_failure
from megalite.utils.errors import SaveError
from megalite.utils.files import FaultHook, no_fault, replace_atomically, write_durably

MAY_DIFFER = frozenset({"args.rank", "args.local_rank"})
"""Plain values that describe the rank and not the state: the ranks need not agree about them."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a state dict is written; nothing here changes what is read back."""

    parallel_group: Group | None = None
    """Ranks that hold copies of each other's blocks: each writes an equal share. None: main replicas are written as
    they are declared."""
    num_files: int = 1
    """Files that a rank writes at the same time, each in its own thread."""
    verify_integrity: Integrity = "off"
    """Hashes that are stored beside the data."""
    assume_constant_structure: bool = False
    """Take the plan of the save before without looking whether the structure is still the same."""


class SaveCache:
    """What one save leaves to the next of the same run: the plans and the verdict over them."""

    def __init__(self) -> None:
        self.digest: bytes | None = None
        self.share: Share = np.zeros((0, 4), dtype=np.int64)
        self.plan: SavePlan | None = None
        self.num_leaves = 0
        self.global_plan: GlobalSavePlan | None = None
        """On the first rank only, as the index below."""
        self.index: IndexWriter | None = None
        self.plannings = 0
        """How often a plan was made."""


@dataclass(frozen=True)
class _Draft:
    """This rank's part of a save, before it is known who writes what."""

    leaves: ShardedLeaves
    objects: dict[str, bytes]
    common: bytes
    common_digests: dict[str, bytes]
    structure: bytes


@dataclass(frozen=True)
class _Report:
    """What a rank tells about what it wrote."""

    object_lengths: list[int]
    files: list[HashedFile]


class PreparedSave:
    """A save that is planned and whose values are fixed.

    ``write`` is local and may run in any thread, ``finish`` communicates. What it needs is its own: the state may
    change while it is written.
    """

    def __init__(
        self,
        folder: Path,
        draft: _Draft,
        tensors: Sequence[torch.Tensor],
        *,
        group: Group,
        options: SaveOptions,
        cache: SaveCache,
        hook: FaultHook,
    ) -> None:
        assert cache.plan is not None, "planned before"
        self.folder = folder
        self._draft, self._tensors = draft, tensors
        self._plan, self._global_plan, self._index = cache.plan, cache.global_plan, cache.index
        self._group, self._options, self._hook = group, options, hook
        self._report: _Report | None = None
        self._error: BaseException | None = None

    def write(self) -> None:
        """Write this rank's files, durably. No communication; what goes wrong is kept for ``finish``."""
        try:
            with _explained(self.folder):
                if self._group.is_first:
                    write_durably(self.folder / COMMON_FILE, self._draft.common, self._hook)
                # What was copied by another staging lies on the host by now.
                staging, integrity = SynchronousStaging(), self._options.verify_integrity
                writer = ItemWriter(self.folder, staging, TorchSaveFraming(), integrity, self._hook)
                objects = self._draft.objects.values()
                files = writer.write(self._plan, self._tensors, list(objects))
            self._report = _Report([len(data) for data in objects], files)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._error = error

    def finish(self) -> None:
        """Write the index once all ranks have written. Collective over the group.

        Raises SaveError on every rank, with one text, when a file of any could not be written.
        """
        report = agreed(self._group, f"writing into {self.folder}", self._written)
        reports = self._group.gather_object(report)

        def write_index() -> None:
            if reports is not None:
                with _explained(self.folder):
                    self._write_index(reports)

        agreed(self._group, f"writing the index of {self.folder}", write_index)

    def _written(self) -> _Report:
        if self._error is not None:
            raise self._error
        assert self._report is not None, "finish() comes after write()"
        return self._report

    def _write_index(self, reports: Sequence[_Report]) -> None:
        folder, kind = self.folder, self._options.verify_integrity
        lengths = [report.object_lengths for report in reports]
        _check_files(folder, file_sizes(self._global_plan, lengths))
        index = self._index.content(lengths, folder)
        replace_atomically(folder / INDEX_FILE, index, self._hook)
        # The marker does not exist yet, but its bytes are known: a crash between the two leaves no complete checkpoint
        # that fails its own check.
        small = {COMMON_FILE: self._draft.common, INDEX_FILE: index, MARKER_FILE: TORCH_DIST.marker_bytes()}
        hashed = [HashedFile(name, [(0, len(data))], hash_of(data, kind)) for name, data in small.items()]
        stored = manifest(kind, hashed + [file for report in reports for file in report.files])
        if stored is not None:
            replace_atomically(folder / stored[0], stored[1], self._hook)


def prepare_save(
    sharded_state_dict: dict,
    folder: Path,
    *,
    group: Group,
    staging: Staging | None = None,
    content_metadata: dict | None = None,
    options: SaveOptions | None = None,
    cache: SaveCache | None = None,
    hook: FaultHook = no_fault,
) -> PreparedSave:
    """Plan a save into the existing ``folder`` and fix its values. Collective over ``group``.

    With a ``staging`` all tensors are copied by it before this returns; without, they are read while they are written,
    and must not change until then. ``cache``, kept by the caller from save to save, spares planning while the
    structure is the same. Raises SaveError on every rank, with one text, when a block is written not exactly once, or
    plain values differ between ranks or could not be read back.
    """
    folder, options, cache = Path(folder), options or SaveOptions(), cache or SaveCache()
    framing = TorchSaveFraming()

    def describe_locally() -> _Draft:
        if group.is_first:
            _clear(folder, hook)
        return _draft(sharded_state_dict, content_metadata, options, cache, framing)

    draft = agreed(group, f"describing the save into {folder}", describe_locally)
    if not _is_unchanged(draft, cache, group):
        _plan(draft, cache, options, group, framing, folder)
    tensors = [leaf.global_data for leaf in _share_of(draft.leaves, cache.share)]
    if staging is not None:
        tensors = agreed(group, "copying the state", lambda: list(staging.stage(tensors)))
    return PreparedSave(folder, draft, tensors, group=group, options=options, cache=cache, hook=hook)


def save(
    sharded_state_dict: dict,
    folder: Path,
    *,
    group: Group,
    content_metadata: dict | None = None,
    options: SaveOptions | None = None,
    cache: SaveCache | None = None,
    hook: FaultHook = no_fault,
) -> None:
    """Write all ranks' blocks and the plain values into the existing ``folder``, durably.

    Collective over ``group``; for the arguments see ``prepare_save``. Raises SaveError on every rank, with one text,
    when a block is written not exactly once, plain values differ between ranks or could not be read back, or a file
    cannot be written; ``.metadata`` does not exist then.
    """
    prepared = prepare_save(
        sharded_state_dict,
        folder,
        group=group,
        content_metadata=content_metadata,
        options=options,
        cache=cache,
        hook=hook,
    )
    prepared.write()
    prepared.finish()


def write_marker(folder: Path, hook: FaultHook = no_fault) -> None:
    """Make ``folder`` a checkpoint: the marker appears by rename and the folder is flushed. One rank calls it, last."""
    replace_atomically(Path(folder) / MARKER_FILE, TORCH_DIST.marker_bytes(), hook)


def _clear(folder: Path, hook: FaultHook) -> None:
    """Remove what an unfinished save left; a finished one is not overwritten."""
    if not folder.is_dir():
        raise SaveError(f"{folder} is no folder; create it before saving into it")
    if (folder / MARKER_FILE).exists():
        raise SaveError(f"{folder} holds a finished checkpoint, which a save would damage; remove it or name another")
    with _explained(folder):
        for path in folder.iterdir():
            is_temporary = path.name.startswith(".") and path.suffix == ".tmp"
            is_ours = path.name in (COMMON_FILE, INDEX_FILE, SHA256_FILE, XXH3_FILE) or path.suffix == ".distcp"
            if is_temporary or is_ours:
                hook("unlink", path)
                path.unlink()


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an I/O error of the body into a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write into {folder}: {error}; check its space and mount, then save again") from error


def _draft(
    sharded_state_dict: dict,
    content_metadata: dict | None,
    options: SaveOptions,
    cache: SaveCache,
    framing: ItemFraming,
) -> _Draft:
    leaves = ShardedLeaves(sharded_state_dict)
    common = common_part(sharded_state_dict)
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    if (bad := find_unreadable(common, COMMON_FILE)) is not None:
        raise SaveError(f"{bad} cannot be read back safely from a checkpoint; store plain Python data")
    buffer = io.BytesIO()
    torch.save(common, buffer)
    objects = frame_objects(leaves, framing)
    structure = cache.digest
    if structure is None or not options.assume_constant_structure:
        group_size = 0 if options.parallel_group is None else options.parallel_group.size
        structure = structure_digest(leaves, options.num_files, group_size)
    elif (len(leaves.tensors), tuple(objects)) != (cache.num_leaves, cache.plan.objects):
        raise SaveError(
            f"the state has {len(leaves.tensors)} tensor blocks and {len(objects)} objects, the save before had "
            f"{cache.num_leaves} and {len(cache.plan.objects)}: its structure is not constant, so set "
            "checkpoint.ckpt_assume_constant_structure to false"
        )
    return _Draft(leaves, objects, buffer.getvalue(), digests_of_common(common), structure)


def _is_unchanged(draft: _Draft, cache: SaveCache, group: Group) -> bool:
    """Return whether no rank's structure changed since the save that filled ``cache``. Collective over ``group``.

    Raises SaveError on all ranks when the plain values of the ranks differ.
    """
    compared = sorted((name, digest) for name, digest in draft.common_digests.items() if name not in MAY_DIFFER)
    whole = int.from_bytes(hashlib.blake2b(repr(compared).encode(), digest_size=7).digest(), "big")
    changed = int(draft.structure != cache.digest)
    # The largest of a number and of its negative: equal exactly when all ranks have the same number.
    agreement = torch.tensor([changed, whole, -whole], dtype=torch.int64)
    any_changed, largest, negated = group.all_reduce(agreement, op=torch.distributed.ReduceOp.MAX).tolist()
    if largest != -negated:
        _raise_common_difference(draft.common_digests, group)
    return not any_changed


def _raise_common_difference(digests: dict[str, bytes], group: Group) -> None:
    expected = group.broadcast_object(digests)
    names = sorted(
        name
        for name in digests.keys() | expected.keys()
        if name not in MAY_DIFFER and digests.get(name) != expected.get(name)
    )
    differing = {rank: names for rank, names in zip(group.ranks, group.all_gather_object(names), strict=True) if names}
    raise SaveError(
        f"plain values of the state differ between ranks, which have to agree about {COMMON_FILE}: "
        + "; ".join(
            f"rank {rank} from rank {group.ranks[0]} in {shown_names(names)}" for rank, names in differing.items()
        )
        + ". Make them equal, or store them as a ShardedObject with a cell per rank"
    )


def _plan(
    draft: _Draft, cache: SaveCache, options: SaveOptions, group: Group, framing: ItemFraming, folder: Path
) -> None:
    """Fill ``cache`` with a checked plan. Collective over ``group`` and, in it, over the group that shares blocks."""
    what = f"planning the save into {folder}"
    cache.digest = None
    tensors = draft.leaves.tensors
    holdings = agreed(group, what, lambda: describe(tensors, framing))
    # A group of one needs no exchange; whether it is one may differ from rank to rank, what all ranks do must not.
    sharing = options.parallel_group or SINGLE
    answer = exchange_shares(holdings, sharing) if sharing.size > 1 else _declared_share(holdings)
    share = agreed(group, what, lambda: checked_share(tensors, answer, sharing))

    def plan_locally() -> SavePlan:
        own, objects = _share_of(draft.leaves, share), list(draft.objects)
        rank = group.ranks[group.rank]
        return plan_local_save(own, objects, rank, framing, options.num_files, draft.leaves.keys)

    plan = agreed(group, what, plan_locally)
    plans = group.gather_object(plan)

    def check_globally() -> None:
        if plans is not None:
            merged = merge_plans(plans, group.ranks)
            check_exactly_once(merged.blocks, lambda block: f"rank {merged.rank_of[block]}", "written", SaveError)
            check_objects(merged)
            check_declared(merged)
            cache.global_plan, cache.index = merged, IndexWriter(merged)

    agreed(group, f"checking the plan of the save into {folder}", check_globally)
    cache.share, cache.plan, cache.num_leaves = share, plan, len(tensors)
    cache.digest = draft.structure
    cache.plannings += 1


def _declared_share(holdings: Holdings) -> Share:
    """Return the share of a rank that writes what it declares to be its own."""
    mains = np.flatnonzero(holdings.is_main)
    return np.stack([mains, np.zeros_like(mains), holdings.rows[mains], np.ones_like(mains)], axis=1)


def _share_of(leaves: ShardedLeaves, share: Share) -> list[ShardedTensor]:
    """Return the blocks to write. An empty one is left out unless its whole tensor is empty: it would take the place
    of the block that begins where it does."""
    blocks = [leaves.tensors[block].rows(first, end) for block, first, end, _ in share.tolist()]
    return [block for block in blocks if block.data.numel() or not volume(block.global_shape)]


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
