"""What the model says about its tensors: the keys, shapes and blocks that Megatron writes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from megalite.checkpoint.state import random_states_request
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megalite.parallel.state import ParallelState
from tests.helpers.fixtures import megatron_fixture
from tests.unit.samples import build_model, place, transformer_config

GOLDEN = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "padded_vocab_size": 256,
    "dtype": torch.float32,
}


def _grid(tp: int, pp: int) -> list[ParallelState]:
    return [place(tp=(tp, t), pp=(pp, p)) for p, t in itertools.product(range(pp), range(tp))]


def _leaves(parallel: ParallelState, **changes: Any) -> dict[str, ShardedTensor | ShardedObject]:
    return build_model(transformer_config(**GOLDEN | changes), parallel).sharded_state_dict()


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((megatron_fixture("gpt2_tp2pp2") / "keys.json").read_text())


def test_tensors_and_blocks_are_those_of_megatron(golden: dict[str, Any]) -> None:
    written: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for parallel in _grid(2, 2):
        for leaf in _leaves(parallel).values():
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


def test_objects_are_those_of_megatron(golden: dict[str, Any]) -> None:
    written = []
    for parallel in _grid(2, 2):
        leaves = [*_leaves(parallel).values(), random_states_request(parallel)]
        written += [x.unique_key for x in leaves if isinstance(x, ShardedObject) and is_main_replica(x.replica_id)]
    assert sorted(written) == sorted(golden["objects"])


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_keys_and_global_shapes_do_not_depend_on_the_topology(tp: int, pp: int) -> None:
    def described(grid: list[ParallelState]) -> set[tuple[str, tuple[int, ...]]]:
        leaves = (leaf for parallel in grid for leaf in _leaves(parallel).values())
        return {(leaf.key, leaf.global_shape) for leaf in leaves}

    assert described(_grid(tp, pp)) == described(_grid(1, 1))


def test_every_parameter_has_its_place_and_shares_memory() -> None:
    for parallel in _grid(2, 2):
        model = build_model(transformer_config(**GOLDEN), parallel)
        state = model.sharded_state_dict()
        for name, parameter in model.named_parameters():
            assert state[name].data.data_ptr() == parameter.data_ptr(), name
        tensors = [name for name, leaf in state.items() if isinstance(leaf, ShardedTensor)]
        assert sorted(tensors) == sorted(name for name, _ in model.named_parameters())


def test_one_of_the_ranks_that_hold_a_block_writes_it() -> None:
    places = [place(tp=(2, t), pp=(2, p), dp=(2, d)) for t, p, d in itertools.product(range(2), repeat=3)]
    copies: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    for parallel in places:
        for leaf in _leaves(parallel).values():
            copies.setdefault((leaf.key, leaf.global_offset), []).append(leaf.replica_id)
    for block, replicas in copies.items():
        assert sum(is_main_replica(r) for r in replicas) == 1, block
        assert len(set(replicas)) == len(replicas), f"{block}: two copies have one id"
    word = "embedding.word_embeddings.weight"
    # Both stages hold the tied table on two data-parallel ranks; the last stage's copy never is the main one.
    assert sorted(copies[word, (0, 0)]) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]


def test_only_the_padded_table_may_differ_in_length() -> None:
    free = {key for parallel in _grid(1, 2) for key, leaf in _leaves(parallel).items() if _may_differ(leaf)}
    assert free == {"embedding.word_embeddings.weight", "output_layer.weight"}


def _may_differ(leaf: ShardedTensor | ShardedObject) -> bool:
    return isinstance(leaf, ShardedTensor) and leaf.allow_shape_mismatch
