from __future__ import annotations

import argparse
import copy

import pytest
import torch

from megalite.dist_checkpointing.dict_utils import iter_leaves
from megalite.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves, common_part, digests_of_common
from megalite.utils.errors import CheckpointError


def _tensor(key="w", value=0.0):
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value))


def test_emptied_containers_disappear_empty_ones_stay_and_lists_close_up():
    tree = {
        "model": {"w": _tensor()},
        "nothing": {},
        "mixed": [_tensor(), 5, [_tensor()], []],
        "optimizer": {"groups": [{"params": LocalNonpersistentObject([1]), "lr": 0.1}]},
        "iteration": 3,
    }
    assert common_part(tree) == {
        "nothing": {},
        "mixed": [5, []],
        "optimizer": {"groups": [{"lr": 0.1}]},
        "iteration": 3,
    }
    assert common_part({"model": {"w": _tensor()}}) == {}


def test_paths_of_leaves():
    assert [path for path, _ in iter_leaves({"a": [1, {"b": 2}]})] == [("a", 0), ("a", 1, "b")]


def test_loaded_values_go_back_to_their_places():
    tensor, other = _tensor("w", 1.0), _tensor("v", 2.0)
    request = {
        "model": {"w": tensor},
        "mixed": [other, None, ShardedObject("o", "local", (1,), (0,))],
        "groups": [{"params": LocalNonpersistentObject("mine"), "lr": "local"}],
        "only_local": 7,
    }
    result = ShardedLeaves(request).assemble(
        {"mixed": [5], "groups": [{"lr": 0.1}], "iteration": 3}, {"o/shard_0_1": "loaded"}
    )
    assert result == {
        "model": {"w": tensor.data},
        "mixed": [other.data, 5, "loaded"],
        "groups": [{"params": "mine", "lr": 0.1}],
        "iteration": 3,
    }


def test_request_may_leave_out_the_plain_values():
    request = {"groups": [{"params": LocalNonpersistentObject("mine")}]}
    assert ShardedLeaves(request).assemble({"groups": [{"lr": 0.1}]}, {}) == {"groups": [{"lr": 0.1, "params": "mine"}]}


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(CheckpointError, match="2 elements at groups, the run asks for 3"):
        ShardedLeaves({"groups": [1, 2, 3]}).assemble({"groups": [1, 2]}, {})
    with pytest.raises(CheckpointError, match="holds a int at groups"):
        ShardedLeaves({"groups": [1, 2, 3]}).assemble({"groups": 1}, {})


def test_factories_are_expanded_and_merged_without_touching_the_request():
    def build(key, data, replica_id):
        return {"lo": ShardedTensor.from_rank_offsets(f"{key}.lo", data[:1]), "hi": [_tensor(f"{key}.hi", 4.0)]}

    factory = ShardedTensorFactory("f", torch.tensor([3.0, 0.0]), build, lambda parts: [parts["lo"], parts["hi"]])
    request = {"f": factory}
    before = copy.copy(request)
    leaves = ShardedLeaves(request)
    assert [leaf.key for leaf in leaves.tensors] == ["f.lo", "f.hi"]
    low, (high,) = leaves.assemble({}, {})["f"]
    assert low.tolist() == [3.0] and high.tolist() == [4.0, 4.0]
    assert request == before and common_part(request) == {}


def test_sharded_leaf_inside_a_tuple_is_refused():
    with pytest.raises(ValueError, match="a.b is a tuple with sharded leaves"):
        ShardedLeaves({"a": {"b": (1, _tensor())}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": {}, "b": 1}, {"b": 1}),
        ({"a": [1]}, {"a": {0: 1}}),
        ({"a": ((1, 2), 3)}, {"a": ((1,), 2, 3)}),
        ({"a": []}, {"a": ()}),
        ({"a": 1}, {"a": True}),
        ({"a": 1.0}, {"a": 1}),
        ({"a": argparse.Namespace(x=1)}, {"a": {"x": 1}}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_plain_values_that_differ_in_anything_have_other_digests(one, other):
    assert digests_of_common(one) != digests_of_common(other)
    assert digests_of_common(one) == digests_of_common(copy.deepcopy(one))
