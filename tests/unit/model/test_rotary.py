from __future__ import annotations

import pytest
import torch

from megalite.model.rotary import RotaryEmbedding

S, B, N = 7, 2, 3


def _by_complex_numbers(x: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Components i and i + width / 2 of position s are one number of the plane, turned by s * base^(-2 i / width)."""
    half = width // 2
    plane = torch.complex(x[..., :half].double(), x[..., half:width].double())
    angles = [[s * base ** (-2.0 * i / width) for i in range(half)] for s in range(x.shape[0])]
    turned = plane * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))[:, None, None, :]
    return torch.cat([turned.real, turned.imag, x[..., width:].double()], dim=-1)


def _drawn(size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(S, B, N, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(("size", "percent", "width"), [(8, 1.0, 8), (6, 1.0, 6), (16, 0.5, 8), (16, 0.25, 4)])
def test_pairs_are_turned_by_their_position(size: int, percent: float, width: int, base: float) -> None:
    x = _drawn(size)
    turned = RotaryEmbedding(size, percent, base)(x)
    torch.testing.assert_close(turned, _by_complex_numbers(x, width, base), rtol=1e-12, atol=1e-12)
    assert torch.equal(turned[0], x[0]), "position 0 is not turned"
    assert torch.equal(turned[..., width:], x[..., width:])


def test_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(8, 1.0, 10000.0)
    q, k = (_drawn(8)[:1].expand(S, B, N, 8) + shift for shift in (0.0, 1.0))
    scores = torch.einsum("sbnd,tbnd->stbn", rotary(q), rotary(k))
    for distance in range(-S + 1, S):
        equal = scores.diagonal(distance)
        torch.testing.assert_close(equal, equal[..., :1].expand_as(equal), rtol=1e-12, atol=1e-12)
    assert (scores[0, 0] - scores[1, 0]).abs().min() > 1e-3


def test_bfloat16_has_angles_of_fp32() -> None:
    x = torch.ones(600, 1, 1, 4, dtype=torch.bfloat16)
    turned = RotaryEmbedding(4, 1.0, 10000.0)(x)
    assert turned.dtype == torch.bfloat16
    # Position 511 does not exist in bfloat16, whose step is 2 there: its angle would be that of 512.
    expected = _by_complex_numbers(x, 4, 10000.0)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=2e-2)


def test_angles_are_kept_for_each_length_and_dtype() -> None:
    rotary = RotaryEmbedding(8, 1.0, 10000.0)
    x = _drawn(8)
    long, short = rotary(x), rotary(x[:4])
    assert torch.equal(long[:4], short)
    assert rotary(x.float()).dtype == torch.float32
    assert torch.equal(rotary(x), long)


def test_the_gradient_is_turned_back() -> None:
    x = _drawn(8).requires_grad_()
    y = _drawn(8).flip(0)
    rotary = RotaryEmbedding(8, 1.0, 10000.0)
    (rotary(x) * rotary(y.detach())).sum().backward()
    # Turning both leaves the product as it is, so the gradient is y itself.
    torch.testing.assert_close(x.grad, y, rtol=1e-12, atol=1e-12)
