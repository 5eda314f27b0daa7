from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalite.parallel import mappings
from megalite.parallel.layers import (
    ColumnParallelLinear,
    ParameterTraits,
    RowParallelLinear,
    VocabParallelEmbedding,
    mark,
    traits,
)
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import axis, on_threads


def test_an_unmarked_parameter_is_whole_and_not_shared() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert traits(parameter) == ParameterTraits(
        tp_axis=None, tp_blocks=1, init_std=None, sums_over_tp=False, shared_embedding=False, is_copy=False
    )
    assert mark(parameter, ParameterTraits(tp_axis=1)) is parameter
    assert traits(parameter).tp_axis == 1


@pytest.mark.parametrize(
    ("kind", "weight", "bias", "axes"),
    [
        (ColumnParallelLinear, (3, 8), (3,), (0, 0)),
        (RowParallelLinear, (12, 2), (12,), (1, None)),
    ],
)
def test_weights_are_cut_and_say_so(
    kind: type, weight: tuple[int, ...], bias: tuple[int, ...], axes: tuple[int, int | None]
) -> None:
    layer = kind(8, 12, tp=axis(4, 1), init_std=0.5, sequence_parallel=True)
    assert (tuple(layer.weight.shape), tuple(layer.bias.shape)) == (weight, bias)
    assert (traits(layer.weight).tp_axis, traits(layer.bias).tp_axis) == axes
    assert traits(layer.weight).init_std == 0.5 and not layer.bias.any()
    # A bias that every rank holds whole sees its part of the sequence only.
    assert traits(layer.bias).sums_over_tp == (kind is RowParallelLinear)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_one_rank_is_an_ordinary_linear_layer(kind: type, bias: bool) -> None:
    layer = kind(8, 12, tp=SINGLE, init_std=1.0, bias=bias, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_row_bias_counts_once_over_the_ranks() -> None:
    x, whole = torch.randn(5, 2, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64)

    def body(group: Group) -> torch.Tensor:
        layer = RowParallelLinear(8, 6, tp=group, init_std=1.0, dtype=torch.float64)
        layer.weight.data.copy_(whole.weight.chunk(2, 1)[group.rank])
        layer.bias.data.copy_(whole.bias)
        return layer(x.chunk(2, -1)[group.rank]).detach()

    for result in on_threads(2, body):
        torch.testing.assert_close(result, whole(x).detach())


def test_embedding_rows_are_looked_up_where_they_are() -> None:
    table, ids = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 12, (3, 5))

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        layer = VocabParallelEmbedding(12, 4, tp=group, init_std=1.0, dtype=torch.float64)
        layer.weight.data.copy_(table.chunk(3)[group.rank])
        y = layer(ids)
        y.sum().backward()
        return y.detach(), layer.weight.grad

    results = on_threads(3, body)
    for y, _ in results:
        assert torch.equal(y, F.embedding(ids, table).transpose(0, 1))
    counts = torch.bincount(ids.reshape(-1), minlength=12).double()
    assert torch.equal(torch.cat([gradient for _, gradient in results])[:, 0], counts)


@pytest.mark.parametrize(
    "name",
    [
        "copy_to_tensor_region",
        "reduce_from_tensor_region",
        "gather_from_tensor_region",
        "gather_partial_from_tensor_region",
        "scatter_to_sequence_region",
        "gather_from_sequence_region",
        "reduce_scatter_to_sequence_region",
    ],
)
def test_mappings_of_one_rank_are_the_identity(name: str) -> None:
    x = torch.randn(4, 2, 3)
    assert getattr(mappings, name)(x, SINGLE) is x


def test_gathered_columns_that_each_rank_uses_have_their_gradients_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(4.0).view(2, 2).add(10.0 * group.rank).requires_grad_()
        whole = mappings.gather_partial_from_tensor_region(x, group)
        # Every rank uses all columns, each with a factor of its own.
        (whole * torch.arange(1.0, 5.0) * (1.0 + group.rank)).sum().backward()
        return whole.detach(), x.grad

    def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
        return torch.cat(group.all_gather_object(x))

    def reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
        return sum(group.all_gather_object(x)).chunk(group.size)[group.rank]

    monkeypatch.setattr(mappings, "all_gather_first_dim", all_gather)
    monkeypatch.setattr(mappings, "reduce_scatter_first_dim", reduce_scatter)
    for rank, (whole, gradient) in enumerate(on_threads(2, body)):
        assert whole.tolist() == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
        own = torch.arange(1.0, 5.0)[2 * rank : 2 * rank + 2]
        assert gradient.tolist() == [(3.0 * own).tolist()] * 2


def test_copy_adds_gradients_up_and_reduce_adds_values_up() -> None:
    def body(group: Group) -> tuple[torch.Tensor, ...]:
        x = torch.full((2,), 1.0 + group.rank, requires_grad=True)
        copied = mappings.copy_to_tensor_region(x, group)
        copied.backward(torch.full((2,), 10.0 + group.rank))
        y = torch.full((2,), 1.0 + group.rank, requires_grad=True)
        reduced = mappings.reduce_from_tensor_region(y, group)
        reduced.backward(torch.full((2,), 7.0))
        return copied.detach(), x.grad, reduced.detach(), y.grad

    for rank, values in enumerate(on_threads(2, body)):
        assert [v[0].item() for v in values] == [1.0 + rank, 21.0, 3.0, 7.0]
