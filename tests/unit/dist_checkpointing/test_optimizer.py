from __future__ import annotations

import random
import time

import pytest
import torch

from megalite.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megalite.dist_checkpointing.optimizer import flat_range_to_blocks, sharded_tensors_of_range


def _cells(offset, sizes):
    return tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_cover_the_range_once_in_order_and_are_few(seed):
    pick = random.Random(seed)
    for _ in range(1500):
        shape = tuple(pick.randint(1, 5) for _ in range(pick.randint(0, 4)))
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        start = pick.randint(0, numbers.numel())
        end = pick.randint(start, numbers.numel())
        blocks = flat_range_to_blocks(shape, start, end)
        assert len(blocks) <= max(1, 2 * len(shape) - 1)
        found: list[int] = []
        for offset, sizes, begin in blocks:
            assert begin == len(found)
            found += numbers[_cells(offset, sizes)].reshape(-1).tolist()
        assert found == list(range(start, end)), (shape, start, end)


def test_the_bound_is_reached():
    assert len(flat_range_to_blocks((3, 3, 3), 5, 22)) == 5


def test_whole_tensor_is_one_block():
    assert flat_range_to_blocks((4, 5), 0, 20) == [((0, 0), (4, 5), 0)]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_range_outside_the_tensor_is_refused(start, end):
    with pytest.raises(ValueError, match="leaves a tensor"):
        flat_range_to_blocks((2, 3), start, end)


def test_cutting_does_not_depend_on_the_number_of_elements():
    begin = time.perf_counter()
    for _ in range(1000):
        flat_range_to_blocks((128, 8192, 28672), 12345, 128 * 8192 * 28672 - 777)
    assert time.perf_counter() - begin < 2


def test_range_of_a_layer_lies_in_the_stacked_tensor():
    param = ShardedTensor.from_rank_offsets(
        "decoder.weight", torch.zeros(4, 3), (0, 1, 2), (1, 1, 2), prepend_axis_num=1, replica_id=(0, 0, 5)
    )
    flat = torch.arange(10.0)[1:8]
    leaves = sharded_tensors_of_range("optimizer.state.param.decoder.weight", flat, param, 2, 9)
    assert [leaf.global_offset for leaf in leaves] == [(1, 4, 2), (1, 5, 0)]
    assert [leaf.local_shape for leaf in leaves] == [(1, 1), (2, 3)]
    assert all(leaf.global_shape == (2, 8, 3) and leaf.replica_id == (0, 0, 0) for leaf in leaves)
    leaves[1].data.fill_(-1)
    assert flat.tolist() == [1, -1, -1, -1, -1, -1, -1]


def test_replica_of_a_range_can_be_given():
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=(0, 2, 1))
    assert sharded_tensors_of_range("o.w", torch.zeros(4), param, 0, 4)[0].replica_id == (0, 2, 0)
    assert sharded_tensors_of_range("o.w", torch.zeros(4), param, 0, 4, replica_id=7)[0].replica_id == 7


def _gate_and_up(key, data, replica_id):
    half = data.shape[0] // 2
    return [
        ShardedTensor.from_rank_offsets(key + ".g", data[:half], (0, 1, 4), replica_id=replica_id),
        ShardedTensor.from_rank_offsets(key + ".u", data[half:], (0, 3, 4), replica_id=replica_id),
    ]


def test_range_over_both_parts_of_a_factory_is_cut_between_them():
    factory = ShardedTensorFactory("fc1", torch.zeros(4, 2), _gate_and_up, torch.cat)
    leaves = sharded_tensors_of_range("o.fc1", torch.arange(3.0), factory, 3, 6)
    assert [(leaf.key, leaf.global_offset, leaf.data.tolist()) for leaf in leaves] == [
        ("o.fc1.g", (3, 1), [[0.0]]),
        ("o.fc1.u", (6, 0), [[1.0, 2.0]]),
    ]


def test_factory_whose_parts_are_not_consecutive_is_refused():
    def columns(key, data, replica_id):
        return [ShardedTensor.from_rank_offsets(key, data[:, i : i + 1], (1, i, 2)) for i in range(2)]

    factory = ShardedTensorFactory("w", torch.zeros(4, 2), columns, torch.cat)
    with pytest.raises(ValueError, match="not consecutive"):
        sharded_tensors_of_range("o.w", torch.zeros(8), factory, 0, 8)


def test_flat_data_of_another_length_is_refused():
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
    with pytest.raises(ValueError, match="1-D tensor of 3 elements"):
        sharded_tensors_of_range("o.w", torch.zeros(4), param, 0, 3)
