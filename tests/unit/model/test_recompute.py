"""Recomputation changes what is kept and not a single bit of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalite.model.gpt import GPTModel
from megalite.parallel.random import CudaRNGStatesTracker, Dropout, DropoutContext
from tests.unit.samples import LLAMA, build_model, transformer_config

NUM_LAYERS = 4
B, S = 2, 8
CONTEXT = DropoutContext((0, 1))


def _full(method: str, count: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}


SELECTIVE = {"recompute_granularity": "selective"}
SETTINGS = [SELECTIVE, *(_full("uniform", n) for n in (1, 2, 3, 4, 9)), *(_full("block", n) for n in (1, 3, 4, 9))]


class _Counting(Dropout):
    """Notes the layer of every attention."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        super().__init__(tracker)
        self.layers: list[int] = []

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, context: DropoutContext, *rest: Any
    ) -> torch.Tensor:
        self.layers.append(context.layer)
        return super().attention(q, k, v, p, context, *rest)


def _model(face: dict[str, Any], recompute: dict[str, Any]) -> tuple[GPTModel, _Counting]:
    torch.manual_seed(3)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 17)
    rates = {"hidden_dropout": 0.3, "attention_dropout": 0.4}
    config = transformer_config(**{"num_layers": NUM_LAYERS} | rates | face | recompute)
    dropout = _Counting(tracker)
    return build_model(config, dropout=dropout), dropout


def _inputs(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 11, (B, S), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "position_ids": torch.arange(S).expand(B, S), "labels": tokens.roll(-1, 1)}


Result = tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]


def _step(face: dict[str, Any], recompute: dict[str, Any]) -> Result:
    """Two micro-batches in the order of a first stage, FFBB: losses, gradients and both streams afterwards."""
    model, dropout = _model(face, recompute)
    losses = [model(CONTEXT, **_inputs(seed)) for seed in (1, 2)]
    for loss in losses:
        loss.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return losses, gradients, torch.get_rng_state(), dropout.tracker.get_states()["model-parallel-rng"]


@pytest.mark.parametrize("face", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("recompute", SETTINGS, ids=str)
def test_losses_gradients_and_streams_are_the_same_bits(face: dict[str, Any], recompute: dict[str, Any]) -> None:
    expected, actual = _step(face, {}), _step(face, recompute)
    assert not torch.equal(expected[0][0], expected[0][1])
    assert all(torch.equal(a, b) for a, b in zip(expected[0], actual[0], strict=True))
    assert [name for name in expected[1] if not torch.equal(expected[1][name], actual[1][name])] == []
    assert torch.equal(expected[2], actual[2]) and torch.equal(expected[3], actual[3])


def _with_backward(model: GPTModel) -> None:
    model(CONTEXT, **_inputs(1)).sum().backward()


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ({}, []),
        (SELECTIVE, [4, 3, 2, 1]),
        (_full("uniform", 1), [4, 3, 2, 1]),
        (_full("uniform", 2), [3, 4, 1, 2]),
        # The last run is shorter.
        (_full("uniform", 3), [4, 1, 2, 3]),
        (_full("uniform", 9), [1, 2, 3, 4]),
        (_full("block", 1), [1]),
        (_full("block", 3), [3, 2, 1]),
        (_full("block", 9), [4, 3, 2, 1]),
    ],
    ids=str,
)
def test_what_is_computed_again(recompute: dict[str, Any], again: list[int]) -> None:
    model, dropout = _model({}, recompute)
    _with_backward(model)
    assert dropout.layers == [1, 2, 3, 4, *again]


@pytest.mark.parametrize("recompute", SETTINGS[:3], ids=str)
def test_an_evaluation_computes_nothing_again(recompute: dict[str, Any]) -> None:
    model, dropout = _model({}, recompute)
    _with_backward(model.eval())
    assert dropout.layers == [1, 2, 3, 4]


def _kept(run: Callable[[], torch.Tensor]) -> int:
    """Return how many elements a forward keeps for the backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


def test_less_is_kept() -> None:
    kept = []
    for recompute in ({}, SELECTIVE, _full("block", 2), _full("uniform", 1)):
        model, _ = _model({}, recompute)
        kept.append(_kept(lambda model=model: model(CONTEXT, **_inputs(1))))
    assert kept[0] > kept[1] > kept[2] > kept[3]


def test_documents_reach_a_recomputed_block() -> None:
    results = []
    for recompute in ({}, SELECTIVE, _full("uniform", 2)):
        model, _ = _model({}, recompute)
        ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
        loss = model(CONTEXT, document_ids=ids, **_inputs(1))
        loss.sum().backward()
        results.append((loss, model.embedding.word_embeddings.weight.grad))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0]) and torch.equal(other[1], results[0][1])
