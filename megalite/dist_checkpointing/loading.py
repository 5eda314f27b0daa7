"""Loading a sharded state dict from a checkpoint of any topology, and looking at one without a request.

One rank reads the small files, all parse them; every rank plans alone and reads what its own blocks need. With a
``parallel_group`` a block that several ranks need is read by one of them and handed on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.dist_checkpointing.core import (
    COMMON_FILE,
    INDEX_FILE,
    MARKER_FILE,
    read_entry,
    require_torch_dist,
    unreadable,
)
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.integrity import (
    SHA256_FILE,
    XXH3_FILE,
    BlockHashes,
    Integrity,
    parse_sha256,
    require_integrity,
    sha256_findings,
)
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor, parse_unique_key
from megalite.dist_checkpointing.safe import load_archive, require_modest
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.base import CheckpointIndex, LoadPlan
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.fully_parallel import checked_share, describe, exchange_shares
from megalite.dist_checkpointing.strategies.index import check_index, iter_items, parse_index
from megalite.dist_checkpointing.strategies.load_plan import plan_load
from megalite.dist_checkpointing.strategies.parallel_load import ExchangeAlgo, PieceExchange
from megalite.dist_checkpointing.strategies.planning import blocks_of, merge_blocks
from megalite.dist_checkpointing.strategies.reader import ItemReader
from megalite.dist_checkpointing.validation import (
    StrictHandling,
    check_exactly_once,
    check_keys,
    check_shapes,
    shown_names,
)
from megalite.utils.dist import SINGLE, Group
from megalite.utils.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is read and what is checked; nothing here changes what is restored."""

    parallel_group: Group | None = None
    """Ranks that need copies of the same blocks: each reads a share and they exchange it. None: each reads its own."""
    exchange: ExchangeAlgo = "broadcast"
    """How the shares go around."""
    validate_access_integrity: bool = True
    """Check that the ranks' requests together hold every element of each requested tensor exactly once."""
    verify_integrity: Integrity = "off"
    """Hashes that the bytes are compared with."""
    require_integrity: bool = True
    """A checkpoint without those hashes is an error; off, one WARNING."""


@dataclass(frozen=True)
class _Header:
    """The small files of a checkpoint: read by one rank, parsed by all."""

    common: bytes
    index: bytes
    hashes: bytes | None
    """The manifest to compare with, if there is to be one."""


def load(
    sharded_state_dict: dict,
    folder: Path,
    *,
    group: Group,
    strict: StrictHandling = StrictHandling.RAISE_ALL,
    ignore_keys: Callable[[str], bool] | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Return the state dict of the checkpoint in the structure of the request; tensors are filled in place.

    Collective over ``group``; the request may be cut in any way. Plain values come from the file, stored elements are
    converted to the requested dtype. ``ignore_keys`` gets a key on disk (of objects with ``/shard_...``) and says
    whether it is knowingly not asked for. Where ``strict`` does not raise, what the file lacks keeps its local value;
    with ``return_...`` the result is (state dict, missing keys, unexpected keys). After an error the content of the
    tensors is undefined. Raises CheckpointError, with the same text on every rank, when the folder is not a complete
    checkpoint, is damaged or hostile, or its keys or global shapes are not those asked for.
    """
    folder, options = Path(folder), options or LoadOptions()
    header = agreed(group, f"reading {folder}", lambda: _read_header(folder, options) if group.is_first else None)
    header = group.broadcast_object(header)
    if header.hashes is None and options.verify_integrity != "off" and group.is_first:
        logger.warning("%s has no %s hashes: its bytes are not verified", folder, options.verify_integrity)
    _verify_files(header, folder, group, options)

    def parse() -> tuple[dict, CheckpointIndex, ShardedLeaves, BlockHashes | None]:
        index = parse_index(header.index, str(folder / INDEX_FILE))
        if group.is_first:
            # One rank looks at the whole: every chunk once, no byte in two items.
            check_index(index, str(folder / INDEX_FILE))
        if options.verify_integrity == "sha256" and header.hashes is not None:
            _check_listed(header.hashes, index, folder)
        has_blocks = options.verify_integrity == "xxh3" and header.hashes is not None
        hashes = BlockHashes(header.hashes, str(folder / XXH3_FILE)) if has_blocks else None
        return _parse_common(header.common, folder), index, ShardedLeaves(sharded_state_dict), hashes

    common, index, leaves, hashes = agreed(group, f"parsing {folder}", parse)
    missing, unexpected = _differing_keys(leaves, index, group, ignore_keys)
    _handle_keys(folder, missing, unexpected, strict, group)
    stored = [leaf for leaf in leaves.tensors if leaf.key in index.tensors]
    agreed(group, f"comparing the request with {folder}", lambda: check_shapes(stored, index, folder))
    if options.validate_access_integrity:
        _check_request(stored, group)
    reader = ItemReader(folder, TorchSaveFraming(), hashes)
    objects = _read(stored, leaves.objects, index, reader, group, options)
    result = agreed(group, f"assembling {folder}", lambda: leaves.assemble(common, objects))
    if not strict.returns_keys:
        return result
    return result, set(missing) if strict.asks_for_missing else set(), set(unexpected)


def _read_header(folder: Path, options: LoadOptions) -> _Header:
    require_torch_dist(folder)
    common, index = _small_file(folder / COMMON_FILE), _small_file(folder / INDEX_FILE)
    if options.verify_integrity == "off":
        return _Header(common, index, None)
    require_integrity(options.verify_integrity)
    path = folder / (SHA256_FILE if options.verify_integrity == "sha256" else XXH3_FILE)
    if not os.path.lexists(path):
        if options.require_integrity:
            raise CheckpointError(
                f"{path} is missing, so the {options.verify_integrity} hashes that were asked for cannot be compared; "
                "to accept a checkpoint that was saved without them, set checkpoint.ckpt_load_require_integrity to "
                "false for this start"
            )
        return _Header(common, index, None)
    hashes = _small_file(path)
    if options.verify_integrity == "xxh3":
        blocks = BlockHashes(hashes, str(path))
        small = {COMMON_FILE: common, INDEX_FILE: index, MARKER_FILE: _small_file(folder / MARKER_FILE)}
        for name, data in small.items():
            blocks.check(name, 0, len(data), [data], f"{folder / name}")
    return _Header(common, index, hashes)


def _small_file(path: Path) -> bytes:
    try:
        return read_entry(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _verify_files(header: _Header, folder: Path, group: Group, options: LoadOptions) -> None:
    """Compare whole files with Megatron's manifest, each rank some of them. Collective over ``group``."""
    if options.verify_integrity != "sha256" or header.hashes is None:
        return

    def verify() -> list[str]:
        files = sorted(parse_sha256(header.hashes, str(folder / SHA256_FILE)).items())
        return sha256_findings(folder, dict(files[group.rank :: group.size]))

    found = agreed(group, f"verifying {folder}", verify)
    findings = sorted(sum(group.all_gather_object(found), []))
    if findings:
        raise DamagedCheckpointError(f"{folder} is damaged: {'; '.join(findings)}; use another checkpoint")


def _check_listed(manifest: bytes, index: CheckpointIndex, folder: Path) -> None:
    """Raise DamagedCheckpointError unless the manifest lists every file that is read; others were not verified."""
    where = folder / SHA256_FILE
    used = {item.file for _, item in iter_items(index)} | {COMMON_FILE, INDEX_FILE, MARKER_FILE}
    missing = sorted(used - parse_sha256(manifest, str(where)).keys())
    if missing:
        raise DamagedCheckpointError(
            f"{where} has no hash of {shown_names(missing)}: the manifest is of another save; use another checkpoint"
        )


def _parse_common(data: bytes, folder: Path) -> dict:
    common = load_archive(data, str(folder / COMMON_FILE))
    require_modest(common, str(folder / COMMON_FILE))
    if not isinstance(common, dict):
        raise DamagedCheckpointError(
            f"{folder / COMMON_FILE} holds a {type(common).__name__}, expected a dict; use another"
        )
    return common


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
    return missing, sorted(key for key in unexpected if not ignored(key))


def _handle_keys(
    folder: Path, missing: Sequence[str], unexpected: Sequence[str], strict: StrictHandling, group: Group
) -> None:
    missing = missing if strict.asks_for_missing else []
    if strict.raises:
        check_keys(folder, missing, unexpected)
    elif strict.logs and group.is_first and (missing or unexpected):
        logger.warning(
            "%s and the run differ, load is not strict: not in the file, local values kept: [%s]; not asked for: [%s]",
            folder,
            shown_names(unexpected),
            shown_names(missing),
        )


def _check_request(tensors: Sequence[ShardedTensor], group: Group) -> None:
    """Raise CheckpointError unless the ranks request every element of each tensor once. Collective over ``group``."""
    what = "checking what the ranks ask for"
    mains = [leaf for leaf in tensors if leaf.is_main_replica]
    asked = group.gather_object(agreed(group, what, lambda: blocks_of(mains, CheckpointError)))

    def check() -> None:
        if asked is not None:
            rank_of = [rank for rank, blocks in zip(group.ranks, asked, strict=True) for _ in range(len(blocks))]
            merged = merge_blocks(asked, CheckpointError)
            check_exactly_once(merged, lambda block: f"rank {rank_of[block]}", "asked for", CheckpointError)

    agreed(group, what, check)


def _read(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    index: CheckpointIndex,
    reader: ItemReader,
    group: Group,
    options: LoadOptions,
) -> dict[str, Any]:
    """Fill ``tensors`` and return the objects by unique key. Collective over ``group``."""
    # Whether a rank's group has more than one member may differ from rank to rank, what all ranks do must not.
    folder, sharing = reader.folder, options.parallel_group or SINGLE
    what = f"planning the load of {folder}"
    own, exchange = list(tensors), None
    holdings = agreed(group, what, lambda: describe(tensors, reader.framing))
    answer = exchange_shares(holdings, sharing, only_owned=False) if sharing.size > 1 else None
    share = agreed(group, what, lambda: answer if answer is None else checked_share(tensors, answer, sharing))
    if share is not None:
        own = [tensors[block].rows(first, end) for block, first, end, _ in share.tolist()]
        exchange = PieceExchange(tensors, holdings, share, sharing)

    def read() -> dict[str, Any]:
        plan: LoadPlan = plan_load(own, objects, index, folder)
        return reader.read(plan)

    loaded = agreed(group, f"loading {folder}", read)
    if exchange is not None:
        exchange.run(options.exchange)
    return loaded


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


def load_sharded_metadata(folder: Path) -> dict[str, ShardedTensor | ShardedObject]:
    """Return a leaf for every stored tensor, whole, and every object of a complete checkpoint, without their data.

    Tensors are on the ``meta`` device; an object has None.
    """
    index = read_index(folder)
    leaves: dict[str, ShardedTensor | ShardedObject] = {}
    for key, stored in index.tensors.items():
        data = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        leaves[key] = ShardedTensor.from_block(key, data, stored.shape, (0,) * len(stored.shape))
    for unique_key in index.objects:
        place = parse_unique_key(unique_key)
        if place is None:
            raise CheckpointError(
                f"object {unique_key!r} of {folder} has no place in a grid: the folder was written by another tool; "
                "read it with that tool"
            )
        key, offset, shape = place
        leaves[unique_key] = ShardedObject(key, None, shape, offset)
    return leaves


def read_index(folder: Path) -> CheckpointIndex:
    """Return where every item of a complete checkpoint lies."""
    folder = Path(folder)
    index = parse_index(_read_header(folder, LoadOptions()).index, str(folder / INDEX_FILE))
    check_index(index, str(folder / INDEX_FILE))
    return index


def load_plain_tensors(folder: Path, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return whole global tensors of a complete checkpoint on one process; all of them without ``keys``."""
    folder = Path(folder)
    index = read_index(folder)
    wanted = list(index.tensors) if keys is None else list(keys)
    check_keys(folder, [], [key for key in wanted if key not in index.tensors])
    tensors = {key: torch.empty(index.tensors[key].shape, dtype=index.tensors[key].dtype) for key in wanted}
    request = [
        ShardedTensor.from_block(key, data, tuple(data.shape), (0,) * data.dim()) for key, data in tensors.items()
    ]
    ItemReader(folder, TorchSaveFraming()).read(plan_load(request, [], index, folder))
    return tensors


def load_plain_objects(folder: Path, unique_keys: Collection[str]) -> dict[str, Any]:
    """Return objects of a complete checkpoint by their keys on disk, on one process."""
    folder = Path(folder)
    index = read_index(folder)
    check_keys(folder, [], [key for key in unique_keys if key not in index.objects])
    plan = LoadPlan([], [(key, index.objects[key]) for key in unique_keys], [])
    return ItemReader(folder, TorchSaveFraming()).read(plan)
