"""Every dropout site says where in the run it is, also where activations or heads are cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megalite.parallel import layers, mappings
from megalite.parallel.random import DropoutContext
from megalite.parallel.state import ParallelState
from megalite.utils.dist import Group
from tests.unit.samples import build_model, place, transformer_config

B = 2
RATES = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
START = DropoutContext((40, 41))


@dataclass
class _Call:
    context: DropoutContext
    rate: float
    is_local: bool | None


class _RecordingDropout:
    """Drops nothing and notes what it was asked for."""

    tracker = None

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def hidden(self, x: torch.Tensor, p: float, context: DropoutContext, is_local: bool) -> torch.Tensor:
        self.calls.append(_Call(context, p, is_local))
        return x

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        p: float,
        context: DropoutContext,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(_Call(context, p, None))
        return v


class _SilentGroup(Group):
    """Has a size; what it reduces is left as it is."""

    def all_reduce(self, tensor: torch.Tensor, op: object = None) -> torch.Tensor:
        return tensor


@pytest.fixture
def no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(output: torch.Tensor, x: torch.Tensor, group: object = None, async_op: bool = False) -> None:
        output.zero_()

    for module in (mappings, layers):
        monkeypatch.setattr(module, "all_gather_single", leave)
        monkeypatch.setattr(module, "reduce_scatter_single", leave)


def _run(parallel: ParallelState, training: bool = True, sequence_parallel: bool = False) -> list[_Call]:
    dropout = _RecordingDropout()
    config = transformer_config(**RATES, num_layers=4, sequence_parallel=sequence_parallel)
    model = build_model(config, parallel, dropout).train(training)
    inputs = {"stage_input": torch.zeros(model.activation_shape(B), dtype=torch.float64)}
    if parallel.pp.is_first:
        ids = torch.zeros(B, config.seq_length, dtype=torch.long)
        inputs = {"tokens": ids, "position_ids": ids}
    if parallel.pp.is_last:
        inputs["labels"] = torch.zeros(B, config.seq_length, dtype=torch.long)
    model(START, **inputs)
    return dropout.calls


def _sites(layers: range) -> list[tuple[int, str]]:
    return [(layer, site) for layer in layers for site in ("attention", "self_attention", "mlp")]


def test_every_site_is_named_and_numbered_from_one() -> None:
    calls = _run(ParallelState())
    assert [(c.context.layer, c.context.site) for c in calls] == [(0, "embedding"), *_sites(range(1, 5))]
    assert all(c.context.sample_ordinals == (40, 41) for c in calls)
    assert all((c.context.position_offset, c.context.head_offset) == (0, 0) for c in calls)
    assert {c.rate for c in calls if c.context.site == "attention"} == {0.2}
    assert {c.rate for c in calls if c.context.site != "attention"} == {0.1}
    assert len({c.context for c in calls}) == len(calls), "two sites would share a mask"


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [(0, "embedding"), *_sites(range(1, 3))]), (1, _sites(range(3, 5)))]
)
def test_stages_count_layers_of_the_whole_model(rank: int, expected: list[tuple[int, str]]) -> None:
    calls = _run(place(pp=(2, rank)))
    assert [(c.context.layer, c.context.site) for c in calls] == expected


def _tensor_parallel(rank: int) -> ParallelState:
    group = _SilentGroup((0, 1), rank, None)
    return ParallelState(world=group, tp=group, model_parallel=group)


@pytest.mark.parametrize("rank", [0, 1])
def test_heads_are_numbered_over_all_ranks(rank: int, no_communication: None) -> None:
    for call in _run(_tensor_parallel(rank)):
        is_attention = call.context.site == "attention"
        # 4 heads over 2 ranks; hidden activations are whole on each.
        assert call.context.head_offset == (2 * rank if is_attention else 0)
        assert call.context.position_offset == 0
        assert call.is_local in (False, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_numbered_over_all_ranks_with_sequence_parallelism(rank: int, no_communication: None) -> None:
    for call in _run(_tensor_parallel(rank), sequence_parallel=True):
        is_attention = call.context.site == "attention"
        # 8 positions over 2 ranks; attention sees the whole sequence.
        assert call.context.position_offset == (0 if is_attention else 4 * rank)
        assert call.is_local is (None if is_attention else True)


def test_evaluation_drops_nothing() -> None:
    assert {call.rate for call in _run(ParallelState(), training=False)} == {0.0}
