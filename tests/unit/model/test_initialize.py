"""Start values are a function of (seed, parameter), whatever the topology and the padding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megalite.model.gpt import WORD_EMBEDDING, GPTModel
from megalite.parallel.layers import traits
from tests.unit.samples import build_model, place, transformer_config

# Several blocks of rows in the embedding, and a vocabulary that ends within a rank's rows.
SHAPE = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 256, "kv_channels": 8, "vocab_size": 290}
SHAPE |= {"max_position_embeddings": 300, "dtype": torch.float32}


def _models(tp: int, pp: int, padded: int) -> list[GPTModel]:
    config = transformer_config(**SHAPE, padded_vocab_size=padded)
    return [build_model(config, place(tp=(tp, t), pp=(pp, p))) for p, t in itertools.product(range(pp), range(tp))]


def _whole(models: list[GPTModel], tp: int) -> dict[str, torch.Tensor]:
    """Join the parameters of all ranks; a copy must equal its original."""
    result: dict[str, torch.Tensor] = {}
    for first in range(0, len(models), tp):
        ranks = models[first : first + tp]
        for name, parameter in ranks[0].named_parameters():
            parts = [dict(rank.named_parameters())[name].detach() for rank in ranks]
            axis = traits(parameter).tp_axis
            if axis is None:
                assert all(torch.equal(part, parts[0]) for part in parts), name
            value = parts[0] if axis is None else torch.cat(parts, dim=axis)
            known = result.setdefault(WORD_EMBEDDING if traits(parameter).is_copy else name, value)
            assert torch.equal(known, value), name
    return result


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return _whole(_models(1, 1, 290), 1)


@pytest.mark.parametrize(
    ("tp", "pp", "padded"), [(1, 1, 384), (2, 1, 300), (4, 1, 384), (1, 2, 290), (1, 4, 300), (2, 2, 512), (4, 2, 640)]
)
def test_equal_for_any_topology_and_padding(tp: int, pp: int, padded: int, reference: dict[str, torch.Tensor]) -> None:
    values = _whole(_models(tp, pp, padded), tp)
    assert values.keys() == reference.keys()
    table = "embedding.word_embeddings.weight"
    assert not values[table][290:].any(), "padding rows are zero"
    values[table] = values[table][:290]
    assert [name for name in values if not torch.equal(values[name], reference[name])] == []


@pytest.mark.parametrize("tp", [4, 8])
def test_a_rank_may_hold_padding_only(tp: int) -> None:
    # 2 blocks of 128 rows and 1 more: the last ranks begin within the third block, behind the vocabulary's end.
    config = transformer_config(**SHAPE | {"vocab_size": 257, "num_attention_heads": 8}, padded_vocab_size=384)
    table = build_model(config, place(tp=(tp, tp - 1))).embedding.word_embeddings.weight
    assert table.shape[0] == 384 // tp and not table.any()


def test_spread_is_that_of_the_configuration(reference: dict[str, torch.Tensor]) -> None:
    into_residual = 0.02 / math.sqrt(2 * SHAPE["num_layers"])
    for name, value in reference.items():
        if value.dim() == 1:
            is_norm_weight = name.endswith("layernorm.weight")
            assert bool((value == float(is_norm_weight)).all()), name
            continue
        std = into_residual if name.split(".")[-2] in ("linear_proj", "linear_fc2") else 0.02
        assert value.std().item() == pytest.approx(std, rel=0.06), name
        assert abs(value.mean().item()) < 4.0 * std / math.sqrt(value.numel()), name


def test_no_two_parameters_or_blocks_are_alike(reference: dict[str, torch.Tensor]) -> None:
    layers = [reference[f"decoder.layers.{i}.mlp.linear_fc1.weight"] for i in range(4)]
    rows = torch.cat([*layers, reference["embedding.word_embeddings.weight"]])
    assert len(rows.unique(dim=0)) == len(rows)


def test_the_seed_matters() -> None:
    config = transformer_config()
    first, second = build_model(config), build_model(config)
    second.initialize(8)
    own, other = (m.embedding.word_embeddings.weight.detach().clone() for m in (first, second))
    assert not torch.equal(own, other)
    second.initialize(7)
    assert torch.equal(own, second.embedding.word_embeddings.weight)


def test_default_generators_do_not_move() -> None:
    model = build_model(transformer_config())
    before = torch.get_rng_state()
    model.initialize(9)
    assert torch.equal(torch.get_rng_state(), before)
