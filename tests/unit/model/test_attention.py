"""Heads and groups over tensor-parallel ranks, and documents that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.model import attention
from megalite.model.attention import SelfAttention
from megalite.model.mlp import MLP
from megalite.model.module import Placement, TransformerConfig
from megalite.parallel.random import CudaRNGStatesTracker, Dropout, DropoutContext
from megalite.parallel.state import ParallelState
from megalite.utils.dist import Group
from tests.unit.samples import CPU, LLAMA, build_model, on_threads, place, transformer_config

CONTEXT = DropoutContext((0, 1))
B, S = 2, 8
LAYER = "decoder.layers.0."


def _config(**changes: Any) -> TransformerConfig:
    return transformer_config(**LLAMA | {"num_layers": 1, "num_attention_heads": 8} | changes)


def _x() -> torch.Tensor:
    return torch.randn(S, B, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _part(config: TransformerConfig, parallel: ParallelState, name: str, kind: type) -> Any:
    """Build one module on a rank with the start values of the whole model."""
    part = kind(config, Placement(parallel, Dropout(CudaRNGStatesTracker()), CPU))
    values = dict(build_model(config, place(tp=(parallel.tp.size, parallel.tp.rank))).named_parameters())
    for own, parameter in part.named_parameters():
        parameter.data.copy_(100.0 * values[f"{LAYER}{name}.{own}"])
    return part


def _on_ranks(tp: int, config: TransformerConfig, name: str, kind: type, arguments: Sequence[Any]) -> list[Any]:
    def body(group: Group) -> torch.Tensor:
        return _part(config, ParallelState(tp=group), name, kind)(_x(), *arguments).detach()

    return on_threads(tp, body)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("is_gated", [False, True], ids=["gelu", "swiglu"])
def test_an_mlp_over_ranks_is_the_whole_one(tp: int, is_gated: bool) -> None:
    config = _config(swiglu=is_gated)
    expected = _part(config, ParallelState(), "mlp", MLP)(_x()).detach()
    assert expected.abs().max() > 0.1
    for output in _on_ranks(tp, config, "mlp", MLP, ()):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tp", "groups"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 8)])
def test_attention_over_ranks_is_the_whole_one(tp: int, groups: int) -> None:
    config = _config(num_query_groups=groups, qk_layernorm=True)
    expected = _part(config, ParallelState(), "self_attention", SelfAttention)(_x(), CONTEXT).detach()
    assert expected.abs().max() > 0.1
    for output in _on_ranks(tp, config, "self_attention", SelfAttention, (CONTEXT,)):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tp", "groups"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_more_ranks_than_groups_share_the_keys_and_values(
    tp: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(num_query_groups=groups)
    whole_q, whole_k, whole_v = _part(config, ParallelState(), "self_attention", SelfAttention)._project(_x())
    ranks = [_part(config, place(tp=(tp, rank)), "self_attention", SelfAttention) for rank in range(tp)]
    rows = torch.cat([rank.linear_qkv(_x()) for rank in ranks], dim=-1)
    monkeypatch.setattr(attention, "gather_partial_from_tensor_region", lambda own, tp: rows)
    heads = 8 // tp
    for rank, part in enumerate(ranks):
        q, k, v = part._project(_x())
        assert q.shape[2] == heads and k.shape[2] == v.shape[2] == 1
        torch.testing.assert_close(q, whole_q[:, :, rank * heads : (rank + 1) * heads])
        # The group of the rank's first head is that of all its heads.
        group = rank * heads * groups // 8
        torch.testing.assert_close(k[:, :, 0], whole_k[:, :, group])
        torch.testing.assert_close(v[:, :, 0], whole_v[:, :, group])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_share_its_key_and_value(groups: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(B, 4, S, 6, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(B, groups, S, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    grouped = Dropout(CudaRNGStatesTracker()).attention(q, k, v, 0.0, CONTEXT)
    later = torch.ones(S, S).triu(1).bool()
    for head in range(4):
        group = head // (4 // groups)
        scores = (q[:, head] @ k[:, group].transpose(1, 2) / 6**0.5).masked_fill(later, float("-inf"))
        torch.testing.assert_close(grouped[:, head], scores.softmax(-1) @ v[:, group], rtol=1e-12, atol=1e-12)


# Documents

CUTS = [[0, 3, 7, 8], [0, 5, 8]]
"""Where documents begin and end in each of the two samples."""


def _documents() -> tuple[torch.Tensor, torch.Tensor]:
    ids, positions = torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long)
    for row, cuts in enumerate(CUTS):
        for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            ids[row, start:end] = number
            positions[row, start:end] = torch.arange(end - start)
    return ids, positions


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_a_document_is_seen_as_if_it_were_alone(positions: str) -> None:
    config = transformer_config(**LLAMA | {"position_embedding_type": positions})
    model = build_model(config)
    for parameter in model.parameters():
        parameter.data *= 20.0 if parameter.dim() == 2 else 1.0
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    document_ids, position_ids = _documents()
    packed = model(CONTEXT, tokens=tokens, position_ids=position_ids, document_ids=document_ids)
    plain = model(CONTEXT, tokens=tokens, position_ids=position_ids)
    for row, cuts in enumerate(CUTS):
        for start, end in zip(cuts, cuts[1:], strict=False):
            alone = model(
                CONTEXT,
                tokens=tokens[row : row + 1, start:end],
                position_ids=position_ids[row : row + 1, start:end],
            )
            # The rotary embedding counts on from the sample's start, but only distances matter.
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=1e-9, atol=1e-9)
            assert start == 0 or not torch.allclose(plain[row, start:end], alone[0], rtol=1e-3), "nothing to mask"


def test_documents_are_kept_apart_on_every_stage() -> None:
    config = transformer_config(num_layers=4)
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    document_ids, position_ids = _documents()
    whole = build_model(config)(CONTEXT, tokens=tokens, position_ids=position_ids, document_ids=document_ids)
    x = None
    for rank in range(2):
        inputs = {"tokens": tokens, "position_ids": position_ids} if rank == 0 else {}
        stage = build_model(config, place(pp=(2, rank)))
        x = stage(CONTEXT, stage_input=x, document_ids=document_ids, **inputs)
    assert torch.equal(x, whole)


def test_one_document_is_causal_attention() -> None:
    q, k, v = (torch.randn(B, 4, S, 6, dtype=torch.float64) for _ in range(3))
    dropout = Dropout(CudaRNGStatesTracker())
    one = dropout.attention(q, k, v, 0.0, CONTEXT, torch.zeros(B, S, dtype=torch.int32))
    torch.testing.assert_close(one, dropout.attention(q, k, v, 0.0, CONTEXT), rtol=1e-12, atol=1e-12)
