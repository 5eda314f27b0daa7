"""Start values are a function of (seed, parameter), whatever the topology and the padding."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch

from megalite.model.gpt import OUTPUT_LAYER, WORD_EMBEDDING, GPTModel
from megalite.parallel.layers import traits
from tests.unit.samples import LLAMA, build_model, model_chunk, place, transformer_config

# Several blocks of rows in the embedding, and a vocabulary that ends within a rank's rows.
SHAPE = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 256, "kv_channels": 8, "vocab_size": 290}
SHAPE |= {"max_position_embeddings": 300, "dtype": torch.float32}
# With 300 rows of gate and of up, blocks of 128 rows begin and end anywhere in a rank's part.
FACES = {"gpt2": {}, "llama": LLAMA | {"ffn_hidden_size": 300, "add_qkv_bias": True, "qk_layernorm": True}}


def _models(tp: int, pp: int, padded: int, face: str = "gpt2", count: int = 1) -> list[GPTModel]:
    """All chunks of all stages, each as the ``tp`` models of its ranks."""
    config = transformer_config(**SHAPE | FACES[face], padded_vocab_size=padded)
    models = []
    for index, p, t in itertools.product(range(count), range(pp), range(tp)):
        parallel = place(tp=(tp, t), pp=(pp, p))
        chunk = model_chunk(config.num_layers, parallel, index, count)
        models.append(build_model(config, parallel, chunk=chunk))
    return models


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
            if "linear_fc1" in name and ranks[0].config.swiglu:
                # The rows of gate of all ranks, then those of up.
                halves = [part.chunk(2) for part in parts]
                value = torch.cat([half[block] for block in range(2) for half in halves])
            known = result.setdefault(WORD_EMBEDDING if traits(parameter).is_copy else name, value)
            assert torch.equal(known, value), name
    return result


@cache
def _reference(face: str) -> dict[str, torch.Tensor]:
    return _whole(_models(1, 1, 290, face), 1)


@pytest.fixture
def reference() -> dict[str, torch.Tensor]:
    return _reference("gpt2")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("tp", "pp", "count", "padded"),
    [
        (1, 1, 1, 384),
        (2, 1, 1, 300),
        (4, 1, 1, 384),
        (1, 2, 1, 290),
        (1, 4, 1, 300),
        (2, 2, 1, 512),
        (4, 2, 1, 640),
        (1, 2, 2, 290),
        (4, 2, 2, 384),
    ],
)
def test_equal_for_any_topology_and_padding(tp: int, pp: int, count: int, padded: int, face: str) -> None:
    values, reference = _whole(_models(tp, pp, padded, face, count), tp), _reference(face)
    assert values.keys() == reference.keys()
    for table in {WORD_EMBEDDING, OUTPUT_LAYER} & values.keys():
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


def test_gate_up_and_tables_are_drawn_each_for_itself() -> None:
    values = _reference("llama")
    gate, up = values["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    rows = torch.cat([gate, up, values[WORD_EMBEDDING], values[OUTPUT_LAYER]])
    assert len(rows.unique(dim=0)) == len(rows)
    assert {name for name in values if name.endswith("bias") and values[name].any()} == set()
    assert all(bool((values[name] == 1.0).all()) for name in values if name.endswith("layernorm.weight"))


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
