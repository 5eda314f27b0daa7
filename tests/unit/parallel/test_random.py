from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megalite.parallel.random import CudaRNGStatesTracker, Dropout, DropoutContext, seed_everything
from megalite.parallel.state import ParallelState
from tests.unit.samples import CPU, axis, place

PLACE = place(tp=(2, 1), pp=(4, 3), dp=(2, 1))


def _drawn(seed: int) -> torch.Tensor:
    return torch.rand(4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("parallel", "per_rank", "base", "model", "expert"),
    [
        (ParallelState(), False, 1234, 1234 + 2718, 1234 + 1024),
        (PLACE, False, 1234 + 300, 1234 + 300 + 2718 + 1, 1234 + 300 + 1024 + 1),
        (PLACE, True, 1234 + 310, 1234 + 310 + 2718 + 1, 1234 + 310 + 1024 + 1),
        (ParallelState(ep=axis(2, 1)), False, 1234, 1234 + 2718, 1234 + 1024 + 100),
    ],
    ids=["one rank", "a stage", "data-parallel seeds", "expert"],
)
def test_seeds_are_megatrons(parallel: ParallelState, per_rank: bool, base: int, model: int, expert: int) -> None:
    tracker = seed_everything(1234, parallel, CPU, per_rank)
    assert random.random() == random.Random(base).random()
    assert np.random.random() == np.random.RandomState(base).random_sample()
    assert torch.equal(torch.rand(4), _drawn(base))
    expected = {"data-parallel-rng": base, "model-parallel-rng": model, "expert-parallel-rng": expert}
    assert set(tracker.get_states()) == set(expected)
    for name, seed in expected.items():
        with tracker.fork(name):
            assert torch.equal(torch.rand(4), _drawn(seed)), name


def test_fork_goes_on_with_its_stream_and_restores_the_default() -> None:
    torch.manual_seed(5)
    expected = torch.rand(6)
    stream = torch.rand(6, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(5)
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 9)
    first = torch.rand(3)
    with tracker.fork("a"):
        inside = torch.rand(3)
    with tracker.fork("a"):
        inside = torch.cat([inside, torch.rand(3)])
    assert torch.equal(torch.cat([first, torch.rand(3)]), expected)
    assert torch.equal(inside, stream)


def test_fork_restores_the_default_after_an_error() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"), tracker.fork():
        torch.rand(1)
        raise RuntimeError("inside")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "seed"), [("a", 2), ("b", 1)], ids=["name", "seed"])
def test_a_repeated_name_or_seed_is_refused(name: str, seed: int) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="already in use"):
        tracker.add(name, seed)
    assert list(tracker.get_states()) == ["a"]


def test_adding_a_stream_leaves_the_default_alone() -> None:
    before = torch.get_rng_state()
    CudaRNGStatesTracker().add("a", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_states_are_copied_in_and_out() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    taken = tracker.get_states()
    kept = {name: state.clone() for name, state in taken.items()}
    with tracker.fork("a"):
        torch.rand(1)
    assert torch.equal(taken["a"], kept["a"]), "what was taken does not move on"
    tracker.set_states(taken)
    taken["a"].zero_()
    assert torch.equal(tracker.get_states()["a"], kept["a"])
    tracker.get_states()["a"].zero_()
    assert torch.equal(tracker.get_states()["a"], kept["a"])


CONTEXT = DropoutContext((3, 4))


def test_a_context_says_where_it_is() -> None:
    site = CONTEXT.in_layer(5).at("mlp", position_offset=8)
    assert site == DropoutContext((3, 4), layer=5, site="mlp", position_offset=8, head_offset=0)
    # Offsets belong to a site, not to the layer.
    assert site.at("attention", head_offset=2) == DropoutContext((3, 4), 5, "attention", 0, 2)
    assert CONTEXT == DropoutContext((3, 4), 0, "embedding", 0, 0)


def test_whole_activations_use_the_default_stream_and_local_ones_the_tracker() -> None:
    tracker = seed_everything(1, ParallelState(), CPU)
    dropout, x = Dropout(tracker), torch.ones(50, 2, 3)
    default, own = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]
    whole = dropout.hidden(x, 0.5, CONTEXT, is_local=False)
    assert not torch.equal(torch.get_rng_state(), default)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], own)
    moved = torch.get_rng_state()
    local = dropout.hidden(x, 0.5, CONTEXT, is_local=True)
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(tracker.get_states()["model-parallel-rng"], own)
    for y in (whole, local):
        assert set(y.unique().tolist()) == {0.0, 2.0}


def test_a_rate_of_zero_draws_nothing() -> None:
    tracker = seed_everything(1, ParallelState(), CPU)
    dropout, x = Dropout(tracker), torch.ones(4, 2, 3)
    states = (torch.get_rng_state(), tracker.get_states()["model-parallel-rng"])
    assert dropout.hidden(x, 0.0, CONTEXT, is_local=True) is x
    q = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    dropout.attention(q, q, q, 0.0, CONTEXT)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(tracker.get_states()["model-parallel-rng"], states[1])


def test_attention_is_causal_and_drops_in_the_tracker() -> None:
    tracker = seed_everything(1, ParallelState(), CPU)
    dropout = Dropout(tracker)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64).unbind(0)
    scores = q @ k.transpose(-1, -2) / 2.0
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(dropout.attention(q, k, v, 0.0, CONTEXT), scores.softmax(-1) @ v)
    default, own = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]
    dropped = dropout.attention(q, k, v, 0.5, CONTEXT)
    assert not torch.allclose(dropped, scores.softmax(-1) @ v)
    assert torch.equal(torch.get_rng_state(), default)
    assert not torch.equal(tracker.get_states()["model-parallel-rng"], own)
