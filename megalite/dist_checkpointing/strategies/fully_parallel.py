"""Replicated blocks spread over the ranks of a group, so that each writes, or reads, its share.

Only descriptions are exchanged, through one rank: what a rank declares becomes a few arrays, one rank deals the blocks
out, and each gets its part back as rows of its own blocks. The rule is greedy and deterministic: blocks with the fewest
holders first, then the largest; each goes to its least loaded holder, which takes as many rows as it has room for.
Cutting is what makes the shares equal: dealt out whole, one large block (an embedding) sets the time of the slowest
rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megalite.dist_checkpointing.strategies.base import ItemFraming
from megalite.utils.dist import Group
from megalite.utils.errors import SaveError

_SLACK = 0.01
"""A rank may take this part more than its share, so that blocks are not cut for the last few bytes."""
_LEAST_PIECE = 8
"""A piece is at least this many times as long as what every piece costs besides its rows."""

_Piece = tuple[int, int, int, int]
Share = np.ndarray
"""[m, 4]: (block of this rank, first row, end row, copies of the block in the group), in the order of blocks."""


@dataclass(frozen=True)
class Holdings:
    """The blocks that one rank holds, as arrays with one row per block."""

    ids: np.ndarray
    """[n, 2] 64-bit halves of a hash of (key, type, place): equal on all ranks that hold the same block."""
    rows: np.ndarray
    """Length along the axis on which the block may be cut; 1 if there is none."""
    row_bytes: np.ndarray
    extra_bytes: np.ndarray
    """Bytes that every piece takes besides its rows."""
    is_main: np.ndarray


@dataclass(frozen=True)
class DoubledBlock:
    """A block with several main replicas in the group: the index of this rank's copy if it has one, and all owners."""

    own_index: int | None
    owners: tuple[int, ...]


def describe(leaves: Sequence[ShardedTensor], framing: ItemFraming) -> Holdings:
    """Return what this rank holds."""
    ids, rows, row_bytes, extra = [], [], [], []
    for leaf in leaves:
        what = repr((leaf.key, leaf.dtype, leaf.global_shape, leaf.global_offset, leaf.chunk_shape)).encode()
        ids.append(np.frombuffer(hashlib.blake2b(what, digest_size=16).digest(), dtype=np.uint64))
        axis = leaf.cut_axis
        rows.append(1 if axis is None else leaf.chunk_shape[axis])
        row_bytes.append(leaf.data.numel() // rows[-1] * leaf.dtype.itemsize)
        extra.append(framing.tensor_length(leaf.dtype, leaf.chunk_shape) - rows[-1] * row_bytes[-1])
    return Holdings(
        ids=np.array(ids, dtype=np.uint64).reshape(len(leaves), 2),
        rows=np.array(rows, dtype=np.int64),
        row_bytes=np.array(row_bytes, dtype=np.int64),
        extra_bytes=np.array(extra, dtype=np.int64),
        is_main=np.array([is_main_replica(leaf.replica_id) for leaf in leaves], dtype=bool),
    )


class _Pool:
    """The blocks of all ranks, copies of a block side by side."""

    def __init__(self, ranks: Sequence[Holdings]) -> None:
        counts = [len(rank.rows) for rank in ranks]
        ids = np.concatenate([rank.ids for rank in ranks])
        rank_of = np.repeat(np.arange(len(ranks)), counts)
        order = np.lexsort((rank_of, ids[:, 1], ids[:, 0]))
        self.rank_of = rank_of[order]
        self.own_index = np.concatenate([np.arange(count) for count in counts])[order]
        columns = ("rows", "row_bytes", "extra_bytes", "is_main")
        self.rows, self.row_bytes, self.extra_bytes, self.is_main = (
            np.concatenate([getattr(rank, name) for rank in ranks])[order] for name in columns
        )
        ids = ids[order]
        is_first = np.concatenate(([True], (ids[1:] != ids[:-1]).any(axis=1))) if len(ids) else np.zeros(0, bool)
        self.starts = np.flatnonzero(is_first)
        """First copy of each block, and one past its last below."""
        self.ends = np.append(self.starts[1:], len(ids))[: len(self.starts)]
        self.sizes = (self.extra_bytes + self.rows * self.row_bytes)[self.starts]
        self.mains = np.add.reduceat(self.is_main.astype(np.int64), self.starts) if len(ids) else np.zeros(0, np.int64)

    def copies(self, block: int) -> np.ndarray:
        """Return one copy of the block per rank that holds it."""
        copies = np.arange(self.starts[block], self.ends[block])
        return copies[np.unique(self.rank_of[copies], return_index=True)[1]]

    def doubled(self) -> tuple[list[int], list[int]] | None:
        """Return (ranks, their indices) of the first block that has several main replicas."""
        for block in np.flatnonzero(self.mains > 1).tolist():
            owners = [i for i in range(self.starts[block], self.ends[block]) if self.is_main[i]]
            return [int(self.rank_of[i]) for i in owners], [int(self.own_index[i]) for i in owners]
        return None


def deal_out(ranks: Sequence[Holdings], *, only_owned: bool = True) -> list[Share]:
    """Return each rank's share of the blocks that ``ranks`` hold: every row of every block once.

    With ``only_owned`` a block without a main replica among them is somebody else's and in nobody's share.
    """
    pool = _Pool(ranks)
    wanted = pool.mains > 0 if only_owned else np.ones(len(pool.starts), dtype=bool)
    holders = pool.ends - pool.starts
    dealt: list[list[_Piece]] = [[] for _ in ranks]
    loads = np.zeros(len(ranks), dtype=np.int64)
    for block in np.flatnonzero(wanted & (holders == 1)).tolist():
        copy = int(pool.starts[block])
        dealt[pool.rank_of[copy]].append((int(pool.own_index[copy]), 0, int(pool.rows[copy]), 1))
        loads[pool.rank_of[copy]] += pool.sizes[block]
    shared = np.flatnonzero(wanted & (holders > 1))
    limit = _level(loads, int(pool.sizes[shared].sum())) * (1 + _SLACK)
    for block in shared[np.lexsort((shared, -pool.sizes[shared], holders[shared]))].tolist():
        _deal_block(pool, block, loads, limit, dealt)
    return [np.array(sorted(share), dtype=np.int64).reshape(len(share), 4) for share in dealt]


def _deal_block(pool: _Pool, block: int, loads: np.ndarray, limit: float, dealt: list[list[_Piece]]) -> None:
    copies = pool.copies(block)
    holders = pool.rank_of[copies]
    rows, row_bytes, extra = (int(column[copies[0]]) for column in (pool.rows, pool.row_bytes, pool.extra_bytes))
    count = int(pool.ends[block] - pool.starts[block])
    least = -(-_LEAST_PIECE * extra // max(row_bytes, 1))
    first = 0
    while first < rows:
        place = int(np.argmin(loads[holders]))
        rank, left = int(holders[place]), rows - first
        fitting = int((limit - loads[rank] - extra) // max(row_bytes, 1))
        taken = max(fitting, least, 1)
        if left - taken < least:
            taken = left
        dealt[rank].append((int(pool.own_index[copies[place]]), first, first + taken, count))
        loads[rank] += extra + taken * row_bytes
        first += taken


def _level(loads: np.ndarray, shared: int) -> float:
    """Return the height to which ``shared`` bytes fill up the ranks that already have ``loads``."""
    filled = np.sort(loads)
    for count in range(1, len(filled) + 1):
        level = (shared + int(filled[:count].sum())) / count
        if count == len(filled) or level <= filled[count]:
            return level
    raise AssertionError("a group has at least one rank")


def exchange_shares(
    holdings: Holdings, group: Group, *, only_owned: bool = True
) -> Share | DoubledBlock | BaseException:
    """Return this rank's share, or what went wrong while dealing out. Collective over ``group``.

    Nothing is raised here: other groups do the same at this moment, and all ranks have to hear of a failure together.
    """
    gathered = group.gather_object(holdings)
    answers: list[Share | DoubledBlock | BaseException] | None = None
    if gathered is not None:
        try:
            answers = list(_answers(gathered, only_owned))
        except Exception as error:
            answers = [error] * group.size
    return group.scatter_object(answers)


def _answers(gathered: Sequence[Holdings], only_owned: bool) -> Sequence[Share | DoubledBlock]:
    doubled = _Pool(gathered).doubled() if only_owned else None
    if doubled is None:
        return deal_out(gathered, only_owned=only_owned)
    owners, indices = doubled
    index_of = dict(zip(owners, indices, strict=True))
    return [DoubledBlock(index_of.get(rank), tuple(owners)) for rank in range(len(gathered))]


def checked_share(leaves: Sequence[ShardedTensor], answer: Share | DoubledBlock | BaseException, group: Group) -> Share:
    """Return the share in an answer of ``exchange_shares``; the error that the exchange found is raised here."""
    if isinstance(answer, BaseException):
        raise answer
    if not isinstance(answer, DoubledBlock):
        return answer
    if answer.own_index is None:
        # One of the owners knows the block's name and raises for all.
        return np.zeros((0, 4), dtype=np.int64)
    leaf = leaves[answer.own_index]
    ranks = ", ".join(str(group.ranks[owner]) for owner in answer.owners)
    raise SaveError(
        f"{leaf.key}: the block {leaf.chunk_shape} at {leaf.global_offset} has replica_id 0 on the ranks {ranks}, so "
        "its copies overlap; only one copy of a block may have it, number the others from 1"
    )
