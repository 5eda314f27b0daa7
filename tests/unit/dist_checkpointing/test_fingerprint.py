from __future__ import annotations

import random

import pytest
import torch

from megalite.dist_checkpointing.fingerprint import fingerprint, fingerprint_by_key, fingerprint_of_plain
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.utils.dist import SINGLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128], ids=str)
def test_any_cut_has_the_fingerprint_of_the_whole(dtype):
    pick = random.Random(1)
    for _ in range(40):
        shape = tuple(pick.randint(1, 6) for _ in range(pick.randint(0, 4)))
        whole = (torch.rand(shape) * 9).to(dtype)
        expected = fingerprint_of_plain({"k": whole})
        cuts = sorted([0, whole.numel(), *(pick.randint(0, whole.numel()) for _ in range(4))])
        param = ShardedTensor.from_block("k", whole, shape, (0,) * len(shape))
        blocks = [
            sharded_tensors_of_range("k", whole.reshape(-1)[begin:end].clone(), param, begin, end)
            for begin, end in zip(cuts, cuts[1:], strict=False)
        ]
        assert fingerprint({"blocks": blocks}, SINGLE) == expected


def test_prepended_axes_replicas_and_objects_do_not_matter():
    whole = torch.rand(3, 4, 2)
    layers = [ShardedTensor.from_rank_offsets("k", whole[i], (0, i, 3), prepend_axis_num=1) for i in range(3)]
    copy = ShardedTensor.from_rank_offsets("k", torch.zeros(4, 2), (0, 0, 3), prepend_axis_num=1, replica_id=1)
    tree = {"layers": [*layers, copy], "object": ShardedObject("o", 1, (1,), (0,)), "plain": 3}
    assert fingerprint(tree, SINGLE) == fingerprint_of_plain({"k": whole})


def test_tensor_larger_than_one_step_of_the_computation():
    whole = torch.arange(3 * 700 * 1001, dtype=torch.int32).view(3, 700, 1001)
    columns = [
        ShardedTensor.from_block("k", whole[:, :, a:b], whole.shape, (0, 0, a)) for a, b in [(0, 500), (500, 1001)]
    ]
    assert fingerprint({"columns": columns}, SINGLE) == fingerprint_of_plain({"k": whole})


def test_every_change_changes_it():
    base = torch.arange(12.0).view(3, 4)
    changed = base.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    swapped = base.clone()
    swapped[0, 0], swapped[2, 3] = base[2, 3], base[0, 0]
    states = [
        {"k": base},
        {"k": changed},
        {"k": swapped},
        {"other": base},
        {"k": base.to(torch.float64)},
        {"k": base, "l": torch.zeros(1)},
    ]
    assert len({fingerprint_of_plain(state) for state in states}) == len(states)
    assert all(len(fingerprint_of_plain(state)) == 16 for state in states)


def test_padding_rows_do_not_count():
    rows = torch.rand(5, 3)
    padded = torch.cat([rows, torch.rand(3, 3)])
    halves = [ShardedTensor.from_rank_offsets("e", padded[i * 4 : i * 4 + 4], (0, i, 2)) for i in range(2)]
    expected = fingerprint_of_plain({"e": rows})
    assert fingerprint({"halves": halves}, SINGLE, true_rows={"e": 5}) == expected
    assert fingerprint_of_plain({"e": padded}, true_rows={"e": 5}) == expected
    assert fingerprint_of_plain({"e": padded}) != expected


def test_prefixes_select_and_keys_add_up():
    tensors = {"model.a": torch.rand(3), "model.b": torch.rand(2), "optimizer.a": torch.rand(3)}
    tree = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    by_key = fingerprint_by_key(tree, SINGLE)
    assert by_key == {key: fingerprint_of_plain({key: tensor}) for key, tensor in tensors.items()}
    assert sorted(fingerprint_by_key(tree, SINGLE, prefixes=["model."])) == ["model.a", "model.b"]
    total = sum(int(by_key[key], 16) for key in ("model.a", "model.b")) % 2**64
    assert fingerprint(tree, SINGLE, prefixes=["model."]) == f"{total:016x}"
