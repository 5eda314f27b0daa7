"""The model against a GPT-2 written with plain tensor operations, and cut over stages against itself."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megalite.model.gpt import GPTModel
from megalite.parallel.random import DropoutContext
from tests.unit.samples import build_model, model_chunk, place, transformer_config

CONFIG = transformer_config(norm_epsilon=1e-3)
CONTEXT = DropoutContext((0, 1))
B, S = 2, CONFIG.seq_length


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (B, S), generator=generator)
    # Positions that start again within a sample, so that they are not just a range.
    return {"tokens": tokens, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 9, 3]])}


LABELS = torch.arange(B * S).view(B, S) % CONFIG.vocab_size


def _shaken(model: GPTModel) -> GPTModel:
    """Move every parameter off its start value, so that biases and norms count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return model


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + CONFIG.norm_epsilon) * weight + bias


def _plain_logits(p: dict[str, torch.Tensor], tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """GPT-2: pre-norm blocks, rows of the query-key-value matrix grouped per head, exact GELU, tied output."""
    heads, size = CONFIG.num_attention_heads, CONFIG.kv_channels
    table = p["embedding.word_embeddings.weight"]
    x = table[tokens] + p["embedding.position_embeddings.weight"][position_ids]
    later = torch.ones(S, S).triu(1).bool()
    for i in range(CONFIG.num_layers):
        w = {k.removeprefix(f"decoder.layers.{i}."): v for k, v in p.items() if k.startswith(f"decoder.layers.{i}.")}
        y = _norm(x, w["input_layernorm.weight"], w["input_layernorm.bias"])
        qkv = y @ w["self_attention.linear_qkv.weight"].T + w["self_attention.linear_qkv.bias"]
        outputs = []
        for head in range(heads):
            q, k, v = qkv[..., 3 * size * head : 3 * size * (head + 1)].split(size, dim=-1)
            scores = q @ k.transpose(1, 2) / math.sqrt(size)
            outputs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v)
        joined = torch.cat(outputs, dim=-1)
        x = x + joined @ w["self_attention.linear_proj.weight"].T + w["self_attention.linear_proj.bias"]
        y = _norm(x, w["pre_mlp_layernorm.weight"], w["pre_mlp_layernorm.bias"])
        y = y @ w["mlp.linear_fc1.weight"].T + w["mlp.linear_fc1.bias"]
        y = 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))
        x = x + y @ w["mlp.linear_fc2.weight"].T + w["mlp.linear_fc2.bias"]
    x = _norm(x, p["decoder.final_layernorm.weight"], p["decoder.final_layernorm.bias"])
    return (x @ table.T)[..., : CONFIG.vocab_size]


def _plain_loss(logits: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)


def test_logits_and_losses_equal_plain_operations() -> None:
    model = _shaken(build_model(CONFIG))
    expected = _plain_logits(dict(model.named_parameters()), **_inputs())
    logits = model(CONTEXT, **_inputs())
    assert logits.shape == (B, S, CONFIG.vocab_size)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    loss = model(CONTEXT, labels=LABELS, **_inputs())
    assert loss.shape == (B, S)
    torch.testing.assert_close(loss, _plain_loss(expected), rtol=1e-12, atol=1e-12)


def test_gradients_equal_plain_operations() -> None:
    model = _shaken(build_model(CONFIG))
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    weights = torch.rand(B, S, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (_plain_loss(_plain_logits(leaves, **_inputs())) * weights).sum().backward()
    (model(CONTEXT, labels=LABELS, **_inputs()) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-10, atol=1e-11, msg=name)
    # Padding rows are no candidates, so they never move.
    assert not model.embedding.word_embeddings.weight.grad[CONFIG.vocab_size :].any()


@pytest.mark.parametrize("size", [2, 3, 6])
def test_stages_one_after_the_other_are_the_whole_model(size: int) -> None:
    config = transformer_config(num_layers=6)
    whole = build_model(config)
    x = None
    for rank in range(size):
        stage = build_model(config, place(pp=(size, rank)))
        assert (stage.embedding is not None, stage.output_layer is not None) == (rank == 0, rank == size - 1)
        inputs = _inputs() if rank == 0 else {}
        x = stage(CONTEXT, stage_input=x, labels=LABELS if rank == size - 1 else None, **inputs)
        if rank < size - 1:
            assert tuple(x.shape) == stage.activation_shape(B)
    assert torch.equal(x, whole(CONTEXT, labels=LABELS, **_inputs()))


def test_chunks_one_after_the_other_are_the_whole_model() -> None:
    config = transformer_config(num_layers=4)
    x = None
    for index, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        parallel = place(pp=(2, rank))
        chunk = model_chunk(4, parallel, index, count=2)
        stage = build_model(config, parallel, chunk=chunk)
        assert (stage.embedding is not None) == ((index, rank) == (0, 0))
        inputs = _inputs() if chunk.is_first else {}
        x = stage(CONTEXT, stage_input=x, labels=LABELS if chunk.is_last else None, **inputs)
    assert torch.equal(x, build_model(config)(CONTEXT, labels=LABELS, **_inputs()))


@pytest.mark.parametrize("count", [1, 2])
def test_names_are_those_of_the_whole_model(count: int) -> None:
    config = transformer_config(num_layers=4)
    whole = [name for name, _ in build_model(config).named_parameters()]
    names: list[str] = []
    for index, rank in itertools.product(range(count), range(2)):
        parallel = place(pp=(2, rank))
        stage = build_model(config, parallel, chunk=model_chunk(4, parallel, index, count))
        names += [name for name, _ in stage.named_parameters()]
    # The second copy of the tied table has a name of its own.
    assert names == [*whole, "output_layer.weight"]


@pytest.mark.parametrize(("sequence_parallel", "rows"), [(False, 8), (True, 4)])
def test_activations_sent_are_cut_with_sequence_parallelism(sequence_parallel: bool, rows: int) -> None:
    model = build_model(transformer_config(sequence_parallel=sequence_parallel), place(tp=(2, 0)))
    assert model.activation_shape(3) == (rows, 3, 16)
