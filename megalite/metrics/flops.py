"""Floating-point operations of a training step, counted as Megatron counts them, without recomputation."""

from __future__ import annotations


def training_flops_per_sequence(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    attention_width: int,
    key_value_width: int,
    seq_length: int,
    vocab_rows: int,
    is_gated: bool,
) -> float:
    """Return forward and backward operations of one sequence of a dense GPT.

    Per token and layer 6 * (h * (Q + 2K) + Q * h + m * h * f), for the logits 6 * h * V, and 6 * Q * s for causal
    attention, with Q = heads * head size, K = groups * head size, and m = 3 matrices in a gated MLP, else 2. The
    constant 3 per token that Megatron's formula adds by mistake is left out.
    """
    h, q, k, s = hidden_size, attention_width, key_value_width, seq_length
    matrices = 3 if is_gated else 2
    per_layer = 6 * (h * (q + 2 * k) + q * h + matrices * h * ffn_hidden_size)
    return float(s * (num_layers * per_layer + 6 * h * vocab_rows) + num_layers * 6 * q * s * s)
