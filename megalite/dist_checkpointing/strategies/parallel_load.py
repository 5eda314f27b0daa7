"""Blocks that several ranks need: read by one of them, and handed to the others.

Which rank reads what is dealt out as for a save. Afterwards the pieces go around in one of Megatron's three ways; the
bits are the same in each:

* ``broadcast``: one broadcast per piece, straight into the tensors that need it.
* ``gather_rounds``: in each round every rank gives one piece, padded to the longest of the round.
* ``gather_object``: all pieces at once as pickled objects; the most memory, the fewest calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megalite.dist_checkpointing.mapping import ShardedTensor
from megalite.dist_checkpointing.strategies.fully_parallel import Holdings, Share
from megalite.utils.dist import Group

ExchangeAlgo = Literal["broadcast", "gather_rounds", "gather_object"]

BlockId = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Rows of a block that its owner has read."""

    id: BlockId
    first: int
    end: int
    num_bytes: int


class PieceExchange:
    """Hands the pieces of all ranks of a group to all ranks that hold the same blocks."""

    def __init__(self, leaves: Sequence[ShardedTensor], holdings: Holdings, share: Share, group: Group) -> None:
        self.group = group
        self._holders: dict[BlockId, list[ShardedTensor]] = defaultdict(list)
        ids = [(int(high), int(low)) for high, low in holdings.ids.tolist()]
        for leaf, block_id in zip(leaves, ids, strict=True):
            self._holders[block_id].append(leaf)
        # A block that nobody else holds goes nowhere.
        self._own = [
            Piece(ids[block], first, end, int((end - first) * holdings.row_bytes[block]))
            for block, first, end, copies in share.tolist()
            if copies > 1 and holdings.row_bytes[block]
        ]
        self._has_cuda = any(leaf.data.is_cuda for leaf in leaves)
        self._device = torch.device("cpu")

    def run(self, algorithm: ExchangeAlgo) -> None:
        """Fill all copies. Collective over the group."""
        gathered = self.group.all_gather_object((self._has_cuda, self._own))
        if any(has_cuda for has_cuda, _ in gathered):
            # One device for all, whatever a rank's own tensors are on: it chooses the backend of the exchange.
            self._device = torch.device("cuda", torch.cuda.current_device())
        pieces: list[list[Piece]] = [own for _, own in gathered]
        exchanges: dict[str, Callable[[list[list[Piece]]], None]] = {
            "broadcast": self._broadcast,
            "gather_rounds": self._gather_rounds,
            "gather_object": self._gather_object,
        }
        exchanges[algorithm](pieces)

    def _broadcast(self, pieces: list[list[Piece]]) -> None:
        for owner, owned in enumerate(pieces):
            for piece in owned:
                data = self._bytes_of(piece) if owner == self.group.rank else self._empty(piece.num_bytes)
                self._place(piece, self.group.broadcast(data, owner))

    def _gather_rounds(self, pieces: list[list[Piece]]) -> None:
        for number in range(max(map(len, pieces), default=0)):
            given = [owned[number] if number < len(owned) else None for owned in pieces]
            longest = max(piece.num_bytes for piece in given if piece is not None)
            mine = self._empty(longest)
            own = given[self.group.rank]
            if own is not None:
                mine[: own.num_bytes] = self._bytes_of(own)
            for piece, data in zip(given, self.group.all_gather(mine), strict=True):
                if piece is not None:
                    self._place(piece, data[: piece.num_bytes])

    def _gather_object(self, pieces: list[list[Piece]]) -> None:
        own = [self._bytes_of(piece).cpu().numpy() for piece in self._own]
        for owned, contents in zip(pieces, self.group.all_gather_object(own), strict=True):
            for piece, data in zip(owned, contents, strict=True):
                self._place(piece, torch.from_numpy(data))

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _bytes_of(self, piece: Piece) -> torch.Tensor:
        leaf = self._holders[piece.id][0].rows(piece.first, piece.end)
        return leaf.data.detach().contiguous().reshape(-1).view(torch.uint8).to(self._device)

    def _place(self, piece: Piece, data: torch.Tensor) -> None:
        for leaf in self._targets(piece):
            # Copied first: a part of a longer buffer need not be aligned for the leaf's type.
            leaf.data.detach().copy_(data.clone().view(leaf.dtype).view(leaf.data.shape))

    def _targets(self, piece: Piece) -> Iterator[ShardedTensor]:
        for leaf in self._holders.get(piece.id, ()):
            yield leaf.rows(piece.first, piece.end)
