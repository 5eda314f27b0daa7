"""Floating-point operations of a training step, counted as Megatron counts them, without recomputation."""

from __future__ import annotations


def training_flops_per_sequence(
    *, num_layers: int, hidden_size: int, ffn_hidden_size: int, attention_width: int, seq_length: int, vocab_rows: int
) -> float:
    """Return forward and backward operations of one sequence of a dense GPT.

    Per token and layer 6 * (h * 3Q + Q * h + 2 * h * f), for the logits 6 * h * V, and 6 * Q * s for causal attention,
    with Q = heads * head size. The constant 3 per token that Megatron's formula adds by mistake is left out.
    """
    h, q, s = hidden_size, attention_width, seq_length
    per_token = num_layers * 6 * (h * 3 * q + q * h + 2 * h * ffn_hidden_size) + 6 * h * vocab_rows
    return float(s * per_token + num_layers * 6 * q * s * s)
