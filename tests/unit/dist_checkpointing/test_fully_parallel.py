from __future__ import annotations

import random

import numpy as np
import pytest

from megalite.dist_checkpointing.strategies.fully_parallel import Holdings, deal_out

OVERHEAD = 1200


def _rank(*blocks):
    """Return holdings of (id, rows, bytes of a row, is main)."""
    ids, rows, row_bytes, is_main = (np.array(column) for column in zip(*blocks, strict=True))
    pairs = np.stack([ids.astype(np.uint64), ids.astype(np.uint64) * 7], axis=1)
    return Holdings(pairs, rows, row_bytes, np.full(len(blocks), OVERHEAD), is_main.astype(bool))


def _bytes(rank, share):
    return sum(OVERHEAD + (end - first) * int(rank.row_bytes[block]) for block, first, end, _ in share.tolist())


def _covered(ranks, shares):
    """Return block id -> sorted row ranges over all ranks."""
    pieces = {}
    for rank, share in zip(ranks, shares, strict=True):
        for block, first, end, _ in share.tolist():
            pieces.setdefault(int(rank.ids[block, 0]), []).append((first, end))
    return {block: sorted(ranges) for block, ranges in pieces.items()}


def test_a_large_block_is_cut_along_its_rows_into_equal_shares():
    ranks = [_rank((1, 1000, 10_000, rank == 0), (2, 50, 10_000, rank == 0)) for rank in range(4)]
    shares = deal_out(ranks)
    sizes = [_bytes(rank, share) for rank, share in zip(ranks, shares, strict=True)]
    assert max(sizes) <= 1.02 * sum(sizes) / 4
    ranges = _covered(ranks, shares)[1]
    assert ranges[0][0] == 0 and ranges[-1][1] == 1000 and len(ranges) <= 5
    assert all(end == first for (_, end), (first, _) in zip(ranges, ranges[1:], strict=False))


def test_blocks_of_one_holder_stay_and_count():
    own = [(10 + rank, 500, 1000 * (rank == 0) + 1, True) for rank in range(3)]
    ranks = [_rank(own[rank], (1, 400, 1000, rank == 0)) for rank in range(3)]
    shares = deal_out(ranks)
    assert all([0, 0, 500, 1] in share.tolist() for share in shares)
    # Rank 0 has more than its part already.
    assert len(shares[0]) == 1
    sizes = [_bytes(rank, share) for rank, share in zip(ranks, shares, strict=True)]
    assert abs(sizes[1] - sizes[2]) < 0.05 * sizes[1]


def test_block_that_belongs_to_another_group_is_left_to_it():
    ranks = [_rank((1, 10, 10, False), (2, 10, 10, rank == 1)) for rank in range(2)]
    assert set(_covered(ranks, deal_out(ranks))) == {2}
    assert set(_covered(ranks, deal_out(ranks, only_owned=False))) == {1, 2}


def test_small_blocks_are_not_cut_into_slivers():
    ranks = [_rank((1, 64, 4, rank == 0), (2, 64, 64, rank == 0)) for rank in range(8)]
    assert all(len(ranges) == 1 for ranges in _covered(ranks, deal_out(ranks)).values())


def test_ranks_that_hold_nothing_get_nothing():
    empty = Holdings(
        *(np.zeros(shape, dtype) for shape, dtype in [((0, 2), np.uint64)] + [((0,), np.int64)] * 3), np.zeros(0, bool)
    )
    assert [len(share) for share in deal_out([empty, empty])] == [0, 0]
    assert [len(share) for share in deal_out([empty, _rank((1, 5, 5, True))])] == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_is_covered_once_and_nearly_equal(seed):
    pick = random.Random(seed)
    size = pick.randint(2, 12)
    blocks = [(number, pick.randint(1, 3000), pick.choice([4, 100, 8192])) for number in range(pick.randint(1, 60))]
    holders = {number: set(range(size)) for number, _, _ in blocks}
    own = [(1000 + rank, 100, 5000) for rank in range(size)]
    ranks = []
    for rank in range(size):
        held = [(n, rows, row, min(holders[n]) == rank) for n, rows, row in blocks if rank in holders[n]]
        pick.shuffle(held)
        ranks.append(_rank(*held, (*own[rank], True)))
    shares = deal_out(ranks)
    covered = _covered(ranks, shares)
    for number, rows, _ in blocks:
        ranges = covered[number]
        assert ranges[0][0] == 0 and ranges[-1][1] == rows
        assert all(end == first for (_, end), (first, _) in zip(ranges, ranges[1:], strict=False))
    sizes = [_bytes(rank, share) for rank, share in zip(ranks, shares, strict=True)]
    # A piece is never shorter than a row or a few times its own overhead; beyond that the shares are equal.
    assert max(sizes) <= 1.011 * sum(sizes) / size + 9 * OVERHEAD + 8192
    assert [share.tolist() for share in deal_out(ranks)] == [share.tolist() for share in shares]
