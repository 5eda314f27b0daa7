from __future__ import annotations

import pytest

from megalite.metrics.flops import training_flops_per_sequence

GPT2_124M = {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "seq_length": 1024, "vocab_rows": 50304}
WIDE_HEADS = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 100, "seq_length": 32, "vocab_rows": 256}


@pytest.mark.parametrize(
    ("shape", "heads", "groups", "channels", "is_gated"),
    [(GPT2_124M, 12, 12, 64, False), (WIDE_HEADS, 4, 4, 24, False), (WIDE_HEADS, 4, 2, 24, True)],
)
def test_equals_megatrons_formula(
    shape: dict[str, int], heads: int, groups: int, channels: int, is_gated: bool
) -> None:
    layers, h, f = shape["num_layers"], shape["hidden_size"], shape["ffn_hidden_size"]
    s, vocab = shape["seq_length"], shape["vocab_rows"]
    queries, keys, values = channels * heads, channels * groups, channels * groups
    # 6 = 2 for multiply and add, times 3 for one forward and two backward products. A gated MLP has a gate beside up.
    weights_per_layer = h * (queries + keys + values) + queries * h + h * f + f * h + (h * f if is_gated else 0)
    # The causal half of query x key and of probabilities x value, each s * s * Q multiply-adds.
    attention_per_layer = 2 * (s * s * queries) // 2
    expected = 6 * (s * (layers * weights_per_layer + h * vocab) + layers * attention_per_layer)
    widths = {"attention_width": heads * channels, "key_value_width": groups * channels}
    actual = training_flops_per_sequence(**widths, is_gated=is_gated, **shape)
    assert actual == expected
    assert isinstance(actual, float)


def test_known_number_of_gpt2() -> None:
    flops = training_flops_per_sequence(attention_width=768, key_value_width=768, is_gated=False, **GPT2_124M)
    # 6 x 123.5 million matrix parameters x 1024 tokens, plus attention.
    matrices = 12 * 12 * 768**2 + 768 * 50304
    assert flops == 6 * matrices * 1024 + 12 * 6 * 768 * 1024**2
