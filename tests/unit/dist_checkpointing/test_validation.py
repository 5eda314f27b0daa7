from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.optimizer import flat_range_to_blocks, sharded_tensors_of_range
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.planning import frame_objects, merge_plans, plan_local_save
from megalite.dist_checkpointing.validation import (
    check_exactly_once,
    check_objects,
    find_hole,
    find_overlap,
    shown_names,
)
from megalite.utils.errors import SaveError


def _check(*ranks):
    plans = []
    for rank, leaves in enumerate(ranks):
        collected = ShardedLeaves({"leaves": list(leaves)})
        mains = [leaf for leaf in collected.tensors if leaf.is_main_replica]
        objects = frame_objects(collected, TorchSaveFraming())
        plans.append(plan_local_save(mains, list(objects), rank, TorchSaveFraming()))
    plan = merge_plans(plans, range(len(plans)))
    check_exactly_once(plan.blocks, lambda block: f"rank {plan.rank_of[block]}", "written", SaveError)
    check_objects(plan)


def _row(position, of=4, key="w", **options):
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3), (0, position, of), **options)


def test_grid_scalar_empty_tensor_and_objects_written_once_pass():
    _check(
        [_row(0), _row(2), ShardedTensor.from_rank_offsets("s", torch.tensor(1.0)), ShardedObject("o", 1, (2,), (1,))],
        [_row(1), _row(3), ShardedTensor.from_rank_offsets("e", torch.zeros(0, 3)), ShardedObject("o", 1, (2,), (0,))],
        [_row(3, replica_id=1), ShardedObject("o", 1, (2,), (0,), replica_id=(0, 1))],
        [],
    )


def test_hole_is_named_with_its_coordinates():
    with pytest.raises(SaveError, match=r"w: 18 of 24 elements of global shape \(8, 3\) .* at \(4, 0\) by nobody"):
        _check([_row(0)], [_row(1), _row(3)])


def test_overlap_is_named_with_both_blocks_and_files():
    with pytest.raises(SaveError, match=r"w: the blocks \(2, 3\) at \(2, 0\) of rank 0 and .* of rank 1 overlap"):
        _check([_row(0), _row(1), _row(2)], [_row(1)])
    with pytest.raises(SaveError, match="s: the blocks .* overlap"):
        _check(*[[ShardedTensor.from_rank_offsets("s", torch.tensor(1.0))]] * 2)


def test_overlap_and_hole_of_equal_size_are_noticed():
    block = ShardedTensor.from_block
    with pytest.raises(SaveError, match="overlap"):
        _check([block("w", torch.zeros(3), (6,), (0,)), block("w", torch.zeros(3), (6,), (2,))])


def test_disagreement_about_a_key_is_named():
    with pytest.raises(SaveError, match=r"w is declared as torch.float32 of global shape \(8, 3\) and .* \(6, 3\)"):
        _check([_row(0)], [_row(1, of=3)])
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3, dtype=torch.half), (0, 1, 4))
    with pytest.raises(SaveError, match="torch.float16"):
        _check([_row(0), half])


def test_objects_written_twice_or_not_at_all_are_named():
    cell = ShardedObject("rng", 1, (2,), (0,))
    with pytest.raises(SaveError, match="rng/shard_0_2 is in both __0_0.distcp and __1_0.distcp"):
        _check([cell], [cell])
    with pytest.raises(SaveError, match="declared twice on one rank"):
        _check([cell, cell])
    with pytest.raises(SaveError, match=r"1 of the 2 cells of its grid \(2,\)"):
        _check([cell])


def test_object_that_could_not_be_read_back_is_refused():
    with pytest.raises(SaveError, match=r"o/shard_0_1.x: float64 cannot be read back"):
        _check([ShardedObject("o", {"x": np.float64(1.0)}, (1,), (0,))])


def test_optimizer_ranges_of_uneven_ranks_pass():
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(5, 7), (0, 0, 1), prepend_axis_num=1)
    cuts = [0, 3, 10, 11, 30, 35]
    ranges = zip(cuts, cuts[1:], strict=False)
    _check(*[sharded_tensors_of_range("o.w", torch.zeros(end - begin), param, begin, end) for begin, end in ranges])


def _random_partition(pick, low, high):
    sizes = high - low
    if pick.random() < 0.3 or sizes.max() == 1:
        return [(low, sizes)]
    axis = pick.choice([a for a in range(len(low)) if sizes[a] > 1])
    middle = pick.randint(low[axis] + 1, high[axis] - 1)
    end, start = high.copy(), low.copy()
    end[axis] = start[axis] = middle
    return _random_partition(pick, low, end) + _random_partition(pick, start, high)


@pytest.mark.parametrize("seed", range(100))
def test_any_partition_into_rectangles_passes_and_any_change_is_found(seed):
    pick = random.Random(seed)
    shape = np.array([pick.randint(2, 9) for _ in range(pick.randint(1, 3))])
    blocks = _random_partition(pick, np.zeros_like(shape), shape)
    pick.shuffle(blocks)
    offsets, sizes = (np.array(column) for column in zip(*blocks, strict=True))
    groups = np.zeros(len(blocks), dtype=np.int64)
    assert find_overlap(groups, offsets, sizes) is None

    extra = pick.randrange(len(blocks))
    point = [offsets[extra] + [pick.randrange(n) for n in sizes[extra]]]
    twice = np.concatenate([offsets, point]), np.concatenate([sizes, np.ones((1, len(shape)), dtype=np.int64)])
    pair = find_overlap(np.append(groups, 0), *twice)
    assert pair is not None and set(pair) == {extra, len(blocks)}
    assert find_overlap(np.append(groups, 1), *twice) is None

    left = np.arange(len(blocks)) != extra
    hole, size = find_hole(tuple(shape.tolist()), offsets[left], sizes[left])
    assert all(offsets[extra] <= hole) and all(np.add(hole, size) <= offsets[extra] + sizes[extra])


def test_blocks_of_many_ranks_are_checked_in_one_go():
    shape, layers, ranks = (1024, 333), 24, 64
    cuts = np.linspace(0, shape[0] * shape[1], ranks + 1).astype(int).tolist()
    rows = [
        ((layer, *offset), (1, *sizes))
        for layer in range(layers)
        for begin, end in zip(cuts, cuts[1:], strict=False)
        for offset, sizes, _ in flat_range_to_blocks(shape, begin, end)
    ]
    offsets, sizes = (np.array(column * 4) for column in zip(*rows, strict=True))
    groups = np.repeat(np.arange(4), len(rows))
    begin = time.perf_counter()
    assert find_overlap(groups, offsets, sizes) is None
    assert time.perf_counter() - begin < 2


def test_long_lists_of_names_are_cut():
    assert shown_names(f"k{i:02d}" for i in range(25)).endswith("k19 and 5 more")
