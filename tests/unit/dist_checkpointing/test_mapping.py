from __future__ import annotations

import pytest
import torch

from megalite.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    parse_unique_key,
)


def test_embedding_cut_in_two_by_tensor_parallelism():
    leaf = ShardedTensor.from_rank_offsets("e.weight", torch.zeros(8, 3), (0, 1, 2), replica_id=(0, 0, 1))
    assert (leaf.global_shape, leaf.global_offset, leaf.axis_fragmentations) == ((16, 3), (8, 0), (2, 1))
    assert not is_main_replica(leaf.replica_id)
    assert is_main_replica((0, 0, 0)) and is_main_replica(0) and not is_main_replica(2)


def test_prepended_axes_exist_only_globally():
    leaf = ShardedTensor.from_rank_offsets("l.weight", torch.zeros(8, 3), (0, 2, 4), (1, 1, 2), prepend_axis_num=1)
    assert (leaf.local_shape, leaf.global_shape, leaf.global_offset) == ((8, 3), (4, 16, 3), (2, 8, 0))
    assert leaf.chunk_shape == (1, 8, 3)
    assert leaf.global_data.shape == (1, 8, 3) and leaf.global_data.data_ptr() == leaf.data.data_ptr()


def test_scalar_gets_a_layer_axis():
    leaf = ShardedTensor.from_rank_offsets("scale", torch.tensor(1.0), (0, 1, 3), prepend_axis_num=1)
    assert (leaf.global_shape, leaf.global_offset) == ((3,), (1,))


@pytest.mark.parametrize("offsets", [(-1, 0, 1), (2, 0, 1), (0, -1, 2), (0, 2, 2), (0, 0, 0)])
def test_rank_offsets_that_do_not_exist_are_refused(offsets):
    with pytest.raises(ValueError, match="w: .*axis"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2), offsets)


def test_axis_named_twice_is_refused():
    with pytest.raises(ValueError, match="once"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2), (0, 0, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"local_shape": (3, 2)}, r"\(3, 2\)"),
        ({"prepend_axis_num": 1}, "add up"),
        ({"global_offset": (0,)}, "add up"),
        ({"global_offset": (3, 0)}, "leaves the global shape"),
        ({"global_offset": (1, 0)}, "no cell of the grid"),
        ({"axis_fragmentations": (3, 1)}, "no cell of the grid"),
        ({"key": "a/b"}, "contains '/'"),
        ({"replica_id": -1}, "negative"),
    ],
)
def test_blocks_that_contradict_themselves_are_refused(change, message):
    fields = {
        "key": "w",
        "data": torch.zeros(2, 2),
        "dtype": torch.float32,
        "local_shape": (2, 2),
        "global_shape": (4, 2),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    ShardedTensor(**fields)
    with pytest.raises(ValueError, match=message):
        ShardedTensor(**fields | change)


def test_block_of_any_position_is_accepted_without_a_grid():
    leaf = ShardedTensor.from_block("w", torch.zeros(2, 3), (5, 7), (1, 4))
    assert leaf.axis_fragmentations is None and leaf.chunk_shape == (2, 3)


def test_object_key_on_disk_carries_its_cell():
    leaf = ShardedObject("rng_state", [1], (2, 2), (0, 1))
    assert leaf.unique_key == "rng_state/shard_0.1_2.2"
    assert parse_unique_key(leaf.unique_key) == ("rng_state", (0, 1), (2, 2))
    assert parse_unique_key("a_b.c/shard_3_4") == ("a_b.c", (3,), (4,))
    assert parse_unique_key("decoder.weight") is None and parse_unique_key("x/shard_a_b") is None


def test_object_outside_its_grid_is_refused():
    with pytest.raises(ValueError, match="not in the grid"):
        ShardedObject("rng_state", [1], (2,), (2,))


def test_factory_builds_leaves_that_view_its_tensor():
    data = torch.arange(4.0)
    factory = ShardedTensorFactory(
        "w",
        data,
        lambda key, t, replica: {"a": ShardedTensor.from_rank_offsets(key, t[:2], replica_id=replica)},
        sum,
        3,
    )
    built = factory.build()["a"]
    assert built.data.data_ptr() == data.data_ptr() and built.replica_id == 3
