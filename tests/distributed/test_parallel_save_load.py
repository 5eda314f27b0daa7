"""Saves and loads whose work is shared by the ranks that hold copies: the same bits, equal shares, few messages."""

from __future__ import annotations

import os
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.serialization import (
    LoadOptions,
    SaveCache,
    SaveOptions,
    load,
    load_plain_tensors,
    read_index,
    save,
    write_marker,
)
from megalite.utils.dist import SINGLE, Group, world_group
from megalite.utils.errors import CheckpointError, MegaliteError, SaveError
from tests.helpers.grid_state import STATES, WHOLE, Grid, block_of, parameters_of, state_of
from tests.helpers.ranks import run_on_ranks

GRID = (2, 1, 2)
ROWS = 400_000


def _save(path, shape, parallel, num_files, integrity):
    group, grid = world_group(), Grid(shape)
    options = SaveOptions(
        parallel_group=grid.dp_group() if parallel else None, num_files=num_files, verify_integrity=integrity
    )
    save(state_of(grid, fill=True), path, group=group, options=options)
    if group.is_first:
        write_marker(path)


def _load(path, shape, exchange, integrity):
    group, grid = world_group(), Grid(shape)
    options = LoadOptions(
        parallel_group=grid.dp_group() if exchange else None,
        exchange=exchange or "broadcast",
        verify_integrity=integrity,
    )
    request = state_of(grid, fill=False)
    del request["rng"]
    result = load(request, path, group=group, ignore_keys=lambda key: key.startswith("rng/"), options=options)
    expected = parameters_of(grid, fill=True)
    wrong = [name for name, leaf in expected.items() if not torch.equal(result["model"][name], leaf.data)]
    blocks = request["optimizer"]["blocks"]
    return wrong + [leaf.key for leaf in blocks if not torch.equal(leaf.global_data, block_of(STATES[leaf.key], leaf))]


@pytest.mark.parametrize(
    ("parallel", "num_files", "integrity", "exchange", "target"),
    [
        (True, 1, "off", None, (1, 1, 1)),
        (True, 3, "xxh3", "broadcast", (2, 1, 2)),
        (False, 3, "sha256", "gather_rounds", (1, 2, 3)),
        (True, 2, "sha256", "gather_object", (1, 1, 4)),
        (False, 1, "xxh3", "broadcast", (1, 1, 3)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(
                (True, False),
                (1, 3),
                ("off", "xxh3", "sha256"),
                (None, "broadcast", "gather_rounds", "gather_object"),
                ((1, 2, 3), (2, 1, 2)),
            )
        ),
    ],
)
def test_every_way_gives_the_same_bits(tmp_path, parallel, num_files, integrity, exchange, target):
    run_on_ranks(prod(GRID), _save, tmp_path, GRID, parallel, num_files, integrity)
    found = load_plain_tensors(tmp_path)
    assert [key for key, value in found.items() if not torch.equal(value, {**WHOLE, **STATES}[key])] == []
    assert run_on_ranks(prod(target), _load, tmp_path, target, exchange, integrity) == [[]] * prod(target)


def _replicated(rank, size):
    """Return one large and a few small tensors that all ranks hold, and a block of its own for each rank."""
    return {
        "large": ShardedTensor.from_rank_offsets("large", torch.arange(ROWS).view(-1, 4), replica_id=rank),
        "small": [
            ShardedTensor.from_rank_offsets("small", torch.full((50, 40), float(i)), (0, i, 9), replica_id=rank)
            for i in range(9)
        ],
        "own": ShardedTensor.from_rank_offsets("own", torch.full((2000 * (rank + 1),), 1.0), (0, 0, 1))
        if size == 1
        else ShardedTensor.from_block("own", torch.full((4000,), 1.0), (4000 * size,), (4000 * rank,)),
    }


def _save_replicated(path, parallel):
    group = world_group()
    options = SaveOptions(parallel_group=group if parallel else None)
    save(_replicated(group.rank, group.size), path, group=group, options=options)
    if group.is_first:
        write_marker(path)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_rank_writes_more_than_its_share(tmp_path, size):
    run_on_ranks(size, _save_replicated, tmp_path, True)
    written = [os.path.getsize(tmp_path / f"__{rank}_0.distcp") for rank in range(size)]
    assert max(written) <= 1.02 * sum(written) / size
    # Only what is needed is cut: the large tensor into about one piece for each rank.
    assert len(read_index(tmp_path).tensors["large"].chunks) <= size + 1
    assert torch.equal(load_plain_tensors(tmp_path, ["large"])["large"], torch.arange(ROWS).view(-1, 4))


def test_without_a_group_the_declared_main_replica_writes(tmp_path):
    run_on_ranks(3, _save_replicated, tmp_path, False)
    written = [os.path.getsize(tmp_path / f"__{rank}_0.distcp") for rank in range(3)]
    assert written[0] > 50 * written[1] and written[1] == written[2]


def _doubled(path, parallel):
    group = world_group()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=max(group.rank - 1, 0))}
    try:
        save(state, path, group=group, options=SaveOptions(parallel_group=group if parallel else None))
    except MegaliteError as error:
        return type(error), str(error)


@pytest.mark.parametrize("parallel", [True, False])
def test_p12_wrong_replica_id_is_an_error_and_not_repaired(tmp_path, parallel):
    """P12: spreading replicas rewrites their numbers, which must not hide that two ranks claim a block."""
    (outcome,) = set(run_on_ranks(3, _doubled, tmp_path, parallel))
    assert outcome[0] is SaveError and "w: the block" in outcome[1] and "replica_id" in outcome[1]
    assert not (tmp_path / ".metadata").exists()


def _no_main(path, parallel):
    group = world_group()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=group.rank + 1)}
    try:
        save(state, path, group=group, options=SaveOptions(parallel_group=group if parallel else None))
    except MegaliteError as error:
        return type(error), str(error)


def _state_of_step(group, step, width=3, extra=False):
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((2, width), float(step)), replica_id=group.rank),
        "rng": ShardedObject("rng", "x" * step, (group.size,), (group.rank,)),
        "step": step,
    }
    if extra:
        state["more"] = ShardedTensor.from_rank_offsets("more", torch.ones(2), replica_id=group.rank)
    return state


def _save_many(path, constant, changes):
    group, cache = world_group(), SaveCache()
    options = SaveOptions(parallel_group=group, num_files=2, assume_constant_structure=constant)
    plannings = []
    for step, change in enumerate(changes, start=1):
        folder = path / str(step)
        folder.mkdir(exist_ok=True)
        save(_state_of_step(group, step, **change), folder, group=group, options=options, cache=cache)
        if group.is_first:
            write_marker(folder)
        plannings.append(cache.plannings)
        group.barrier()
    return plannings


@pytest.mark.parametrize("constant", [False, True])
def test_plan_is_made_once_while_the_structure_stays(tmp_path, constant):
    assert run_on_ranks(2, _save_many, tmp_path, constant, [{}] * 3) == [[1, 1, 1]] * 2
    for step in (1, 2, 3):
        # Objects grow from save to save: their places are new each time.
        objects = {key: item.length for key, item in read_index(tmp_path / str(step)).objects.items()}
        assert len(objects) == 2
        assert load_plain_tensors(tmp_path / str(step))["w"].tolist() == [[step] * 3] * 2


def test_changed_structure_is_planned_anew(tmp_path):
    changes = [{}, {"width": 4}, {"width": 4, "extra": True}, {"width": 4, "extra": True}]
    assert run_on_ranks(2, _save_many, tmp_path, False, changes) == [[1, 2, 3, 3]] * 2
    assert load_plain_tensors(tmp_path / "4")["more"].tolist() == [1, 1]


def test_structure_that_is_not_constant_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="its structure is not constant"):
        run_on_ranks(2, _save_many, tmp_path, True, [{}, {"extra": True}])


def _differing_common(path, key):
    group = world_group()
    common = {"args": {"rank": group.rank, "seed": 7}, "iteration": 3, "list": [1, 2]}
    if key is not None and group.rank == 1:
        section, name = key
        common[section][name] = 9
    try:
        save(
            {**common, "w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=group.rank)},
            path,
            group=group,
        )
    except MegaliteError as error:
        return type(error), str(error)


def test_p11_plain_values_that_differ_are_an_error_naming_the_keys(tmp_path):
    """P11: common.pt is written by one rank; what others would have written differently must not be lost in silence."""
    for key, name in ((("args", "seed"), "args.seed"), (("list", 1), "list.1")):
        (outcome,) = set(run_on_ranks(3, _differing_common, tmp_path, key))
        assert outcome[0] is SaveError and f"rank 1 from rank 0 in {name}" in outcome[1]
        assert not (tmp_path / "common.pt").exists()
    # What describes the rank itself may differ.
    assert run_on_ranks(3, _differing_common, tmp_path, None) == [None] * 3


def _load_outcome(path, kind, required):
    group = world_group()
    request = _state_of_step(group, 0)
    try:
        load(request, path, group=group, options=LoadOptions(verify_integrity=kind, require_integrity=required))
    except MegaliteError as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_hashes_that_were_asked_for_and_are_absent_are_an_error(tmp_path, kind):
    run_on_ranks(2, _save_many, tmp_path, False, [{}])
    (outcome,) = set(run_on_ranks(2, _load_outcome, tmp_path / "1", kind, True))
    assert outcome[0] is CheckpointError and "is missing" in outcome[1] and "require_integrity" in outcome[1]
    assert run_on_ranks(2, _load_outcome, tmp_path / "1", kind, False) == [None, None]


@pytest.mark.parametrize("parallel", [True, False])
def test_p12_tensor_that_nobody_would_write_is_an_error(tmp_path, parallel):
    """P12: with every replica_id wrong, a tensor must not be missing in silence."""
    (outcome,) = set(run_on_ranks(2, _no_main, tmp_path, parallel))
    assert outcome[0] is SaveError and "no rank writes w: " in outcome[1]


def _uneven(path, empty_rank):
    """One rank has no rows of a tensor, and all hold nothing of another."""
    group = world_group()
    rows = [0 if rank == empty_rank else 4 for rank in range(group.size)]
    data = torch.full((rows[group.rank], 4), float(group.rank))
    offset = (sum(rows[: group.rank]), 0)
    nothing = ShardedTensor.from_rank_offsets("nothing", torch.zeros(0, 3), (0, group.rank, group.size))
    state = {"w": ShardedTensor.from_block("w", data, (sum(rows), 4), offset), "nothing": nothing}
    save(state, path, group=group)
    if group.is_first:
        write_marker(path)
    group.barrier()
    data.zero_()
    load(state, path, group=group)
    return bool((data == group.rank).all())


@pytest.mark.parametrize("empty_rank", [0, 1, 2])
def test_a_rank_without_rows_does_not_take_the_place_of_another(tmp_path, empty_rank):
    assert run_on_ranks(3, _uneven, tmp_path, empty_rank) == [True] * 3
    found = load_plain_tensors(tmp_path)
    assert found["w"].shape == (8, 4) and found["nothing"].shape == (0, 3)


def _unequal_groups(path, alone):
    """Two ranks share their blocks, the third is alone in its group or has none."""
    group = world_group()
    pair = dist.new_group([0, 1])
    sharing = Group((0, 1), group.rank, pair) if group.rank < 2 else (SINGLE if alone else None)
    leaf = ShardedTensor.from_rank_offsets(
        "w", torch.full((50, 4), float(group.rank // 2)), (0, group.rank // 2, 2), replica_id=group.rank % 2
    )
    save({"w": leaf}, path, group=group, options=SaveOptions(parallel_group=sharing))
    if group.is_first:
        write_marker(path)
    group.barrier()
    leaf.data.zero_()
    load({"w": leaf}, path, group=group, options=LoadOptions(parallel_group=sharing))
    return leaf.data.unique().tolist()


@pytest.mark.parametrize("alone", [True, False])
def test_groups_that_share_need_not_be_equally_large(tmp_path, alone):
    assert run_on_ranks(3, _unequal_groups, tmp_path, alone) == [[0.0], [0.0], [1.0]]
