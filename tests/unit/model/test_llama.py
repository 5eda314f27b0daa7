"""The Llama face against plain tensor operations: rotary embedding, grouped heads, RMSNorm, SwiGLU, untied output."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.model.gpt import GPTModel
from megalite.model.module import TransformerConfig
from megalite.parallel.random import DropoutContext
from tests.unit.samples import LLAMA, build_model, transformer_config

CONTEXT = DropoutContext((0, 1))
B, S = 2, 8

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one group": {"num_query_groups": 1},
    "a group for each head": {"num_query_groups": 4},
    "partly rotated": {"kv_channels": 8, "rotary_percent": 0.5, "rotary_base": 500.0},
    "query and key norms": {"qk_layernorm": True},
    "biases of queries only": {"add_qkv_bias": True},
    "all biases": {"add_bias_linear": True, "qk_layernorm": True},
    "layer norms": {"normalization": "LayerNorm", "qk_layernorm": True},
    "no positions": {"position_embedding_type": "none"},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "tied": {"untie_embeddings_and_output_weights": False},
    "gelu": {"swiglu": False},
}


def _config(variant: str) -> TransformerConfig:
    return transformer_config(**LLAMA | {"norm_epsilon": 1e-3, "num_layers": 2} | VARIANTS[variant])


def _shaken(model: GPTModel) -> GPTModel:
    """Move every parameter off its start value, so that biases and norms count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
    return model


def _inputs(config: TransformerConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=generator)
    return {"tokens": tokens, "position_ids": torch.arange(S).expand(B, S)}


Weights = dict[str, torch.Tensor]


def _norm(config: TransformerConfig, x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    if config.normalization == "RMSNorm":
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_epsilon) * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + config.norm_epsilon)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _turned(config: TransformerConfig, x_BSD: torch.Tensor) -> torch.Tensor:
    if config.position_embedding_type != "rope":
        return x_BSD
    width = int(config.kv_channels * config.rotary_percent)
    result = x_BSD.clone()
    for s in range(S):
        for i in range(width // 2):
            angle = s * config.rotary_base ** (-2 * i / width)
            low, high = x_BSD[:, s, i], x_BSD[:, s, i + width // 2]
            result[:, s, i] = low * math.cos(angle) - high * math.sin(angle)
            result[:, s, i + width // 2] = high * math.cos(angle) + low * math.sin(angle)
    return result


def _attention(config: TransformerConfig, x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Rows of the fused matrix are [queries of the group | key | value] for one group after the other."""
    size, groups = config.kv_channels, config.num_query_groups
    per_group = config.num_attention_heads // groups
    rows = _linear(x, w, "self_attention.linear_qkv").split(size, dim=-1)
    later = torch.ones(S, S).triu(1).bool()
    outputs = []
    for group in range(groups):
        *queries, key, value = rows[group * (per_group + 2) : (group + 1) * (per_group + 2)]
        if config.qk_layernorm:
            key = _norm(config, key, w, "self_attention.k_layernorm")
            queries = [_norm(config, q, w, "self_attention.q_layernorm") for q in queries]
        for query in queries:
            scores = _turned(config, query) @ _turned(config, key).transpose(1, 2) / math.sqrt(size)
            outputs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ value)
    return _linear(torch.cat(outputs, dim=-1), w, "self_attention.linear_proj")


def _mlp(config: TransformerConfig, x: torch.Tensor, w: Weights) -> torch.Tensor:
    inner = _linear(x, w, "mlp.linear_fc1")
    if config.swiglu:
        gate, up = inner[..., : config.ffn_hidden_size], inner[..., config.ffn_hidden_size :]
        inner = gate / (1.0 + torch.exp(-gate)) * up
    else:
        inner = 0.5 * inner * (1.0 + torch.erf(inner / math.sqrt(2.0)))
    return _linear(inner, w, "mlp.linear_fc2")


def _plain_logits(
    config: TransformerConfig, p: Weights, tokens: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    table = p["embedding.word_embeddings.weight"]
    x = table[tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + p["embedding.position_embeddings.weight"][position_ids]
    for i in range(config.num_layers):
        prefix = f"decoder.layers.{i}."
        w = {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}
        x = x + _attention(config, _norm(config, x, w, "input_layernorm"), w)
        x = x + _mlp(config, _norm(config, x, w, "pre_mlp_layernorm"), w)
    x = _norm(config, x, p, "decoder.final_layernorm")
    output = p["output_layer.weight"] if config.untie_embeddings_and_output_weights else table
    return (x @ output.T)[..., : config.vocab_size]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_plain_operations(variant: str) -> None:
    config = _config(variant)
    model = _shaken(build_model(config))
    expected = _plain_logits(config, dict(model.named_parameters()), **_inputs(config))
    torch.testing.assert_close(model(CONTEXT, **_inputs(config)), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_plain_operations(variant: str) -> None:
    config = _config(variant)
    model = _shaken(build_model(config))
    labels = torch.arange(B * S).view(B, S) % config.vocab_size
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = _plain_logits(config, leaves, **_inputs(config))
    (-logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))).sum().backward()
    model(CONTEXT, labels=labels, **_inputs(config)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, rtol=1e-9, atol=1e-10, msg=name)


def test_parameters_are_those_that_the_settings_ask_for() -> None:
    config = _config("llama")
    names = {name.removeprefix("decoder.layers.0.") for name, _ in build_model(config).named_parameters()}
    assert {name for name in names if not name.startswith("decoder.layers.1.")} == {
        "embedding.word_embeddings.weight",
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    shapes = {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}
    # 4 query heads and 2 groups of key and value, 6 wide; gate and up, 24 wide each.
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == ((4 + 2 * 2) * 6, 16)
    assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == (2 * 24, 16)


def test_an_untied_output_is_a_parameter_of_its_own() -> None:
    parameters = dict(build_model(_config("llama")).named_parameters())
    table, output = parameters["embedding.word_embeddings.weight"], parameters["output_layer.weight"]
    assert table.shape == output.shape and not torch.equal(table, output)
    assert "output_layer.weight" not in dict(build_model(_config("tied")).named_parameters())
