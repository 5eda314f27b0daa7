from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megalite.optimizer.clip_grads import clip_coefficient, exact_sum, gradient_norm, row_sums_of_squares
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import CPU, on_threads


def _spread(count: int, seed: int = 1, low: float = -60.0, high: float = 60.0) -> torch.Tensor:
    """Non-negative numbers of many magnitudes, powers of two between ``low`` and ``high``."""
    generator = torch.Generator().manual_seed(seed)
    exponents = low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)
    return torch.rand(count, dtype=torch.float64, generator=generator) * torch.exp2(exponents)


def _sum(*parts: torch.Tensor) -> float:
    return exact_sum(parts, SINGLE, CPU)


@pytest.mark.parametrize("span", [(-1.0, 0.0), (-30.0, 30.0), (-200.0, 200.0), (150.0, 260.0)], ids=str)
def test_sums_are_as_accurate_as_fsum(span: tuple[float, float]) -> None:
    for seed in range(5):
        values = _spread(3000, seed, *span)
        assert _sum(values) == pytest.approx(math.fsum(values.tolist()), rel=2**-52)


def test_order_and_splitting_do_not_change_a_bit() -> None:
    values = _spread(5000)
    expected = _sum(values)
    naive = {values.sum().item()}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        shuffled = values[torch.randperm(len(values), generator=generator)]
        cuts = torch.randint(1, 500, (9,), generator=generator).tolist()
        parts = shuffled.split([*cuts, len(values) - sum(cuts)])
        assert _sum(*parts) == expected
        naive.add(math.fsum(part.sum().item() for part in parts))
    assert len(naive) > 1, "ordinary sums would have differed"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_cut_over_ranks_does_not_change_a_bit(ranks: int) -> None:
    values = _spread(2000)
    expected = _sum(values)

    def body(group: Group) -> float:
        # Uneven parts, one of them empty.
        bounds = [2000 * rank // ranks for rank in range(ranks)] + [2000]
        own = values[bounds[group.rank] : bounds[group.rank + 1]] if group.rank else values[:0]
        return exact_sum([own, values[: bounds[1]]] if group.rank == 1 else [own], group, CPU)

    assert on_threads(ranks, body) == [expected] * ranks


def test_what_is_cut_off_is_below_the_promise() -> None:
    values = torch.tensor([1.0, 2.0**-60, 2.0**-90] + [3.0 * 2.0**-62] * 1000, dtype=torch.float64)
    exact = sum(Fraction(v) for v in values.tolist())
    assert abs(Fraction(_sum(values)) - exact) <= Fraction(2) ** -52


def test_long_sums_stay_exact() -> None:
    # All ones times one bit pattern: the sum is known, and a running float64 sum would round.
    value = 1.0 + 2.0**-52
    values = torch.full((2**20,), value, dtype=torch.float64)
    assert _sum(values) == float(Fraction(value) * 2**20)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_value_that_is_not_finite_makes_the_sum_infinite(bad: float) -> None:
    values = _spread(100)
    values[17] = bad
    assert _sum(_spread(10), values, _spread(10)) == math.inf

    def body(group: Group) -> float:
        return exact_sum([values if group.rank == 1 else _spread(10)], group, CPU)

    assert on_threads(2, body) == [math.inf, math.inf]


def test_zeros_and_nothing() -> None:
    assert _sum(torch.zeros(64, dtype=torch.float64)) == 0.0
    assert _sum(torch.empty(0, dtype=torch.float64)) == 0.0
    assert exact_sum([], SINGLE, CPU) == 0.0


def test_tiny_values() -> None:
    tiny = torch.full((100,), 2.0**-850, dtype=torch.float64)
    assert _sum(tiny) == 100 * 2.0**-850
    below = torch.full((100,), 5e-324, dtype=torch.float64)
    assert 0.0 <= _sum(below) < 1e-270, "below every grid: no NaN, and no larger than it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_squared_and_summed_in_float64(dtype: torch.dtype) -> None:
    flat = torch.randn(64 * 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums = row_sums_of_squares(flat)
    assert sums.dtype == torch.float64 and sums.shape == (5000,)
    for row in (0, 1, 4095, 4096, 4999):
        exact = sum(Fraction(v) ** 2 for v in flat[64 * row : 64 * (row + 1)].tolist())
        assert sums[row].item() == pytest.approx(float(exact), rel=1e-14)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    flat = torch.randn(64 * 9000, generator=torch.Generator().manual_seed(2))
    sums = row_sums_of_squares(flat)
    for start, count in ((0, 1), (5, 3), (4000, 200), (4096, 4904)):
        assert torch.equal(row_sums_of_squares(flat[64 * start : 64 * (start + count)]), sums[start : start + count])


def test_the_largest_fp32_gradient_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    flat = torch.full((640,), largest)
    assert gradient_norm([flat], SINGLE, CPU) == pytest.approx(largest * math.sqrt(640), rel=1e-12)


def test_norm_over_segments_is_that_of_the_whole() -> None:
    flat = torch.randn(64 * 100, generator=torch.Generator().manual_seed(3))
    expected = gradient_norm([flat], SINGLE, CPU)
    assert expected == pytest.approx(flat.double().norm().item(), rel=1e-14)
    assert gradient_norm([flat[6336:], flat[:64], flat[64:6336]], SINGLE, CPU) == expected
    assert gradient_norm([], SINGLE, CPU) == 0.0


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [(4.0, 1.0, 1.0 / 4.000001), (0.5, 1.0, None), (1.0, 1.0, 1.0 / 1.000001), (9.0, 0.0, None), (0.0, 1.0, None)],
)
def test_gradients_are_scaled_down_only(norm: float, limit: float, factor: float | None) -> None:
    assert clip_coefficient(norm, limit) == factor
