"""What the model says about its tensors: the keys, shapes and blocks that Megatron writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megalite.checkpoint.state import random_states_request
from megalite.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megalite.parallel.state import ParallelState
from tests.helpers.fixtures import megatron_fixture
from tests.unit.samples import LLAMA, build_model, model_chunk, place, transformer_config

GOLDEN = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "padded_vocab_size": 256,
    "dtype": torch.float32,
}


def _grid(tp: int, pp: int) -> list[ParallelState]:
    return [place(tp=(tp, t), pp=(pp, p)) for p, t in itertools.product(range(pp), range(tp))]


FACES = {"gpt2_tp2pp2": {}, "llama_tp2pp2": LLAMA | {"ffn_hidden_size": 96}}
GPT2, LLAMA_2 = FACES.values()


def _leaves(
    parallel: ParallelState, count: int = 1, **changes: Any
) -> dict[str, ShardedTensor | ShardedObject | ShardedTensorFactory]:
    """What a rank holds, in ``count`` chunks."""
    config = transformer_config(**GOLDEN | changes)
    chunks = [model_chunk(config.num_layers, parallel, index, count) for index in range(count)]
    models = [build_model(config, parallel, chunk=chunk) for chunk in chunks]
    return {name: leaf for model in models for name, leaf in model.sharded_state_dict().items()}


def _stored(leaves: dict[str, Any]) -> Iterator[ShardedTensor | ShardedObject]:
    """Yield what is on disk: a factory stands for several tensors."""
    for leaf in leaves.values():
        yield from leaf.build() if isinstance(leaf, ShardedTensorFactory) else [leaf]


@pytest.fixture(params=FACES)
def fixture(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a model, and the tensors and objects that Megatron wrote for it."""
    return FACES[request.param], json.loads((megatron_fixture(request.param) / "keys.json").read_text())


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_and_blocks_are_those_of_megatron(fixture: tuple[dict[str, Any], ...], count: int) -> None:
    face, golden = fixture
    written: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for parallel in _grid(2, 2):
        for leaf in _stored(_leaves(parallel, count, **face)):
            if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
                stored = golden["tensors"][leaf.key]
                assert list(leaf.global_shape) == stored["global_shape"]
                assert str(leaf.dtype) == f"torch.{stored['dtype']}"
                size = (1,) * leaf.prepend_axis_num + leaf.local_shape
                written.setdefault(leaf.key, []).append((leaf.global_offset, size))
    expected = {
        key: sorted((tuple(chunk["offset"]), tuple(chunk["size"])) for chunk in stored["chunks"])
        for key, stored in golden["tensors"].items()
    }
    assert {key: sorted(blocks) for key, blocks in written.items()} == expected


@pytest.mark.parametrize("count", [1, 2])
def test_objects_are_those_of_megatron(fixture: tuple[dict[str, Any], ...], count: int) -> None:
    face, golden = fixture
    written = []
    for parallel in _grid(2, 2):
        leaves = [*_leaves(parallel, count, **face).values(), random_states_request(parallel)]
        written += [x.unique_key for x in leaves if isinstance(x, ShardedObject) and is_main_replica(x.replica_id)]
    assert sorted(written) == sorted(golden["objects"])


@pytest.mark.parametrize("face", [GPT2, LLAMA_2], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("tp", "pp", "count"), [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2)])
def test_keys_and_global_shapes_do_not_depend_on_the_topology(
    tp: int, pp: int, count: int, face: dict[str, Any]
) -> None:
    def described(grid: list[ParallelState], count: int = 1) -> set[tuple[str, tuple[int, ...]]]:
        leaves = (leaf for parallel in grid for leaf in _stored(_leaves(parallel, count, **face)))
        return {(leaf.key, leaf.global_shape) for leaf in leaves}

    assert described(_grid(tp, pp), count) == described(_grid(1, 1))


@pytest.mark.parametrize("face", [GPT2, LLAMA_2], ids=["gpt2", "llama"])
def test_every_parameter_has_its_place_and_shares_memory(face: dict[str, Any]) -> None:
    for parallel in _grid(2, 2):
        model = build_model(transformer_config(**GOLDEN | face), parallel)
        state = model.sharded_state_dict()
        for name, parameter in model.named_parameters():
            assert state[name].data.data_ptr() == parameter.data_ptr(), name
        tensors = [name for name, leaf in state.items() if not isinstance(leaf, ShardedObject)]
        assert sorted(tensors) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("face", [GPT2, LLAMA_2], ids=["gpt2", "llama"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_of_the_ranks_that_hold_a_block_writes_it(count: int, face: dict[str, Any]) -> None:
    places = [place(tp=(2, t), pp=(2, p), dp=(2, d)) for t, p, d in itertools.product(range(2), repeat=3)]
    copies: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    for parallel in places:
        for leaf in _stored(_leaves(parallel, count, **face)):
            copies.setdefault((leaf.key, leaf.global_offset), []).append(leaf.replica_id)
    for block, replicas in copies.items():
        assert sum(is_main_replica(r) for r in replicas) == 1, block
        assert len(set(replicas)) == len(replicas), f"{block}: two copies have one id"
    word = "embedding.word_embeddings.weight"
    # Both stages hold the tied table on two data-parallel ranks; the last stage's copy never is the main one.
    tied = [] if face.get("untie_embeddings_and_output_weights") else [(1, 0, 0), (1, 0, 1)]
    assert sorted(copies[word, (0, 0)]) == [(0, 0, 0), (0, 0, 1), *tied]


@pytest.mark.parametrize("face", [GPT2, LLAMA_2], ids=["gpt2", "llama"])
def test_only_the_padded_table_may_differ_in_length(face: dict[str, Any]) -> None:
    free = {key for parallel in _grid(1, 2) for key, leaf in _leaves(parallel, **face).items() if _may_differ(leaf)}
    assert free == {"embedding.word_embeddings.weight", "output_layer.weight"}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_are_cut_each_by_itself(tp: int) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    whole = torch.zeros(2 * 96, 64)
    for rank in range(tp):
        leaf = _leaves(place(tp=(tp, rank)), **LLAMA_2)[name]
        gate, up = leaf.build()
        assert (gate.key, up.key) == ("decoder.layers.mlp.linear_fc1.weight",) * 2
        assert gate.global_shape == up.global_shape == (4, 2 * 96, 64)
        # Layer 1; gate rows from the top, up rows from the middle.
        assert gate.global_offset == (1, rank * 96 // tp, 0) and up.global_offset == (1, 96 + rank * 96 // tp, 0)
        for part in (gate, up):
            start = part.global_offset[1]
            whole[start : start + part.local_shape[0]] = part.data
        assert torch.equal(leaf.merge_fn([gate.data, up.data]), leaf.data)
    reference = build_model(transformer_config(**GOLDEN | LLAMA_2))
    assert torch.equal(whole, dict(reference.named_parameters())[name])


def _may_differ(leaf: ShardedTensor | ShardedObject) -> bool:
    return isinstance(leaf, ShardedTensor) and leaf.allow_shape_mismatch
