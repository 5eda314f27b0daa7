from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from megalite.parallel import state
from megalite.parallel.p2p import Channel
from megalite.parallel.state import AXES, ParallelState, rank_groups
from megalite.utils.dist import Group
from megalite.utils.errors import ConfigError

Sizes = dict[str, int]
Members = list[tuple[int, ...]]


def _sizes(**given: int) -> Sizes:
    return {axis: given.get(axis, 1) for axis in AXES}


CP_EXAMPLE = _sizes(tp=2, cp=2, dp=2)
PP_EXAMPLE = _sizes(tp=2, pp=2, dp=2)


@pytest.mark.parametrize(
    ("sizes", "axes", "groups"),
    [
        (CP_EXAMPLE, ("cp",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (CP_EXAMPLE, ("dp",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (CP_EXAMPLE, ("dp", "cp"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (CP_EXAMPLE, ("cp", "dp"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (PP_EXAMPLE, ("tp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (PP_EXAMPLE, ("dp",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (PP_EXAMPLE, ("pp",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (PP_EXAMPLE, ("tp", "pp"), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (_sizes(), ("tp",), [(0,)]),
    ],
    ids=str,
)
def test_groups_of_megatrons_examples(sizes: Sizes, axes: tuple[str, ...], groups: Members) -> None:
    assert rank_groups(sizes, axes) == groups


def _rank(sizes: Sizes, place: Sizes) -> int:
    """The rank of a place by the formula tp + TP * (cp + CP * (ep + EP * (dp + DP * pp)))."""
    return place["tp"] + sizes["tp"] * (
        place["cp"] + sizes["cp"] * (place["ep"] + sizes["ep"] * (place["dp"] + sizes["dp"] * place["pp"]))
    )


@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("pp",), ("tp", "pp"), ("cp", "dp"), ("ep",)], ids=str)
def test_groups_follow_the_rank_formula(axes: tuple[str, ...]) -> None:
    sizes = _sizes(tp=2, cp=3, ep=2, dp=2, pp=3)
    places = [dict(zip(AXES, p, strict=True)) for p in itertools.product(*(range(sizes[a]) for a in AXES))]
    others = [axis for axis in AXES if axis not in axes]
    expected: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        expected.setdefault(tuple(place[axis] for axis in others), []).append(_rank(sizes, place))
    groups = rank_groups(sizes, axes)
    assert sorted(groups) == sorted(tuple(sorted(ranks)) for ranks in expected.values())
    assert sorted(itertools.chain(*groups)) == list(range(72))
    # Groups in the order of their smallest rank: the first of the remaining axes varies fastest.
    assert groups == sorted(groups)


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ParallelState, Members]]:
    """Build the state of one rank of a pretended world; the groups it makes are only noted."""

    def build(world: int, rank: int, **sizes: int) -> tuple[ParallelState, Members]:
        made: Members = []

        def new_group(ranks: list[int], timeout: timedelta) -> str:
            made.append(tuple(ranks))
            return f"group {len(made)} of {ranks}"

        monkeypatch.setattr(state, "world_group", lambda: Group(tuple(range(world)), rank, None))
        monkeypatch.setattr(state.dist, "new_group", new_group)
        return ParallelState.create(**sizes), made

    return build


def test_every_rank_makes_the_same_groups_in_the_same_order(grid: Callable) -> None:
    made = [grid(8, rank, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)[1] for rank in range(8)]
    assert all(order == made[0] for order in made)
    assert all(len(ranks) > 1 for ranks in made[0]), "a group of one needs no handle"


def test_a_rank_finds_its_place(grid: Callable) -> None:
    for rank in range(8):
        parallel, _ = grid(8, rank, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        assert parallel.topology == (2, 2, 2) and str(parallel) == "TP=2 PP=2 DP=2"
        place = {"tp": parallel.tp.rank, "cp": 0, "ep": 0, "dp": parallel.dp.rank, "pp": parallel.pp.rank}
        assert _rank(PP_EXAMPLE, place) == rank
        for group in (parallel.tp, parallel.dp, parallel.pp, parallel.model_parallel):
            assert group.ranks[group.rank] == rank and group.handle is not None
        assert parallel.dp_cp == parallel.dp
        assert parallel.model_parallel.ranks in [(0, 1, 4, 5), (2, 3, 6, 7)]
        assert parallel.cp.size == parallel.ep.size == 1


@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"pipeline": 4}], ids=str)
def test_one_axis_is_the_model_parallel_group_itself(grid: Callable, sizes: dict[str, int]) -> None:
    parallel, _ = grid(8, 5, **{f"{name}_model_parallel_size": size for name, size in sizes.items()})
    assert parallel.model_parallel is (parallel.tp if "tensor" in sizes else parallel.pp)


def test_embedding_group_is_first_and_last_stage(grid: Callable) -> None:
    ends = [grid(8, r, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)[0].embedding for r in range(8)]
    assert [None if group is None else group.ranks for group in ends] == [
        (0, 6),
        (1, 7),
        None,
        None,
        None,
        None,
        (0, 6),
        (1, 7),
    ]
    assert [group.rank for group in ends if group is not None] == [0, 0, 1, 1]


def test_embedding_group_of_short_pipelines(grid: Callable) -> None:
    alone, _ = grid(4, 3)
    assert alone.embedding == Group((3,))
    pair, _ = grid(4, 3, pipeline_model_parallel_size=2)
    assert pair.embedding is pair.pp and pair.pp.ranks == (1, 3)


def test_each_direction_of_travel_has_a_group_of_its_own(grid: Callable) -> None:
    parallel, made = grid(4, 3, pipeline_model_parallel_size=2)
    handles = [*parallel.channels.values(), parallel.pp.handle]
    assert set(parallel.channels) == set(Channel) and len(set(handles)) == 5
    assert all(str(handle).endswith("of [1, 3]") for handle in handles)
    assert made.count((0, 2)) == made.count((1, 3)) == 5, "every rank makes the groups of every pipeline"
    assert grid(4, 3)[0].channels == {}


def test_ranks_that_cannot_be_divided_are_refused(grid: Callable) -> None:
    with pytest.raises(ConfigError, match=r"6 ranks .* TP=2 x CP=1 x EP=1 x PP=2 = 4 .* multiple of 4"):
        grid(6, 0, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def test_one_process_needs_no_torch_distributed() -> None:
    parallel = ParallelState.create()
    assert parallel == ParallelState()
    assert parallel.topology == (1, 1, 1) and parallel.embedding is not None
    assert np.prod([getattr(parallel, axis).size for axis in AXES]) == 1
