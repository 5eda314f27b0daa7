from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.save import state_to_save
from megalite.checkpoint.state import (
    TrainState,
    common_state,
    content_metadata,
    derive_random_states,
    is_used_by_megatron_alone,
    live_tensors,
    model_state,
    random_states,
    random_states_request,
    readable_copies,
    restore_random_states,
    true_rows,
)
from megalite.dist_checkpointing.safe import load_archive
from megalite.parallel.random import seed_everything
from megalite.parallel.state import ParallelState
from megalite.utils.dist import SINGLE, Group
from tests.unit.samples import CPU, fill, place, small_config, train_state


@pytest.fixture(scope="module")
def state() -> TrainState:
    made = train_state(small_config())
    fill(made, 5)
    return made


def _plain_values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            assert isinstance(key, (str, int, bool))
            yield from _plain_values(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _plain_values(inner)
    else:
        yield value


def test_the_common_part_is_plain_and_survives_a_safe_load(state: TrainState) -> None:
    common = common_state(state)
    buffer = io.BytesIO()
    torch.save(common, buffer)
    loaded = load_archive(buffer.getvalue(), "common.pt")
    assert loaded == common
    plain = {**common, "args": vars(common["args"])}
    assert {type(value) for value in _plain_values(plain)} <= {str, int, float, bool, type(None)}


def test_the_common_part_has_the_keys_megatron_reads(state: TrainState) -> None:
    common = common_state(state)
    assert common["checkpoint_version"] == 3.0 and common["iteration"] == 5
    assert {"args", "opt_param_scheduler", "num_floating_point_operations_so_far", "optimizer"} <= set(common)
    args = vars(common["args"])
    expected = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 64,
        "add_position_embedding": True,
        "padded_vocab_size": 24,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 40,
        "world_size": 1,
        "iteration": 5,
        "params_dtype": "float32",
    }
    assert {name: args[name] for name in expected} == expected


def test_own_part_of_the_common_part(state: TrainState) -> None:
    own = common_state(state)["megalite"]
    assert own["progress"]["consumed_train_samples"] == 40
    assert own["topology"] == [1, 1, 1] and own["vocab_size"] == 20 and own["run_id"] == state.run_id
    assert own["config"]["optimizer"]["lr"] == 2e-3


def test_settings_leave_parts_out() -> None:
    whole = state_to_save(train_state(small_config({"checkpoint": {"save": "x"}})))
    assert {"model", "optimizer_state", "rng_state", "optimizer", "opt_param_scheduler"} <= set(whole)
    without = small_config({"checkpoint": {"save": "x", "no_save_optim": True, "no_save_rng": True}})
    parts = state_to_save(train_state(without))
    assert not {"optimizer_state", "optimizer", "rng_state"} & set(parts)
    assert "opt_param_scheduler" in parts, "the schedule does not depend on the optimizer's state"


def test_saving_waits_for_parameters_that_are_still_gathered(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    (chunk,) = state.chunks
    monkeypatch.setattr(chunk, "finish_param_sync", lambda: events.append("finish"))
    state_to_save(state)
    live_tensors(state)
    assert events == ["finish", "finish"]


def test_content_metadata_is_megatrons() -> None:
    assert content_metadata(None) == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    for layout, flags in (("fully_reshardable", 2), ("dp_reshardable", 1)):
        content = content_metadata(layout)
        assert content["distrib_optim_sharding_type"] == layout and len(content) == 2 + flags


def test_padding_rows_are_known_for_weights_and_optimizer(state: TrainState) -> None:
    rows = true_rows(state)
    keys = {leaf.key for leaf in model_state(state).values()}
    # The second one exists where the embedding is not tied.
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    assert tables[0] in keys and set(rows.values()) == {20}
    prefixes = ("", *(f"optimizer.state.{kind}." for kind in ("param", "exp_avg", "exp_avg_sq")))
    assert set(rows) == {prefix + table for prefix in prefixes for table in tables}


def test_random_states_are_one_cell_of_the_grid() -> None:
    leaf = random_states_request(place(tp=(2, 1), pp=(4, 2), dp=(3, 2)))
    assert (leaf.unique_key, leaf.replica_id) == ("rng_state/shard_2.1_4.2", 2)


def test_random_states_go_round(state: TrainState) -> None:
    saved = random_states(state).data
    assert len(saved) == 1 and set(saved[0]) == {
        "random_rng_state",
        "np_rng_state",
        "torch_rng_state",
        "cuda_rng_state",
        "rng_tracker_states",
    }
    expected = torch.rand(3)
    with state.tracker.fork():
        forked = torch.rand(3)
    seed_everything(99, ParallelState(), CPU)
    restore_random_states(state.tracker, saved[0])
    assert torch.equal(torch.rand(3), expected)
    with state.tracker.fork():
        assert torch.equal(torch.rand(3), forked)


class _Pair(Group):
    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize(("differs", "count"), [(True, 2), (False, 1)])
def test_streams_per_rank_are_kept_for_each(differs: bool, count: int) -> None:
    made = train_state(small_config({"rng": {"data_parallel_random_init": differs}}))
    made.parallel = ParallelState(dp=_Pair((0, 1), 0, None))
    assert len(random_states(made).data) == count


def test_derived_states_follow_from_seed_iteration_and_place() -> None:
    def drawn(iteration: int, parallel: ParallelState, seed: int = 1234) -> tuple[float, ...]:
        tracker = seed_everything(7, parallel, CPU)
        derive_random_states(small_config({"training": {"seed": seed}}), parallel, iteration, tracker)
        values = torch.rand(1).tolist()
        with tracker.fork():
            return (*values, *torch.rand(1).tolist())

    first = drawn(5, ParallelState())
    assert drawn(5, ParallelState()) == first
    others = [drawn(6, ParallelState()), drawn(5, ParallelState(), seed=1), drawn(5, place(pp=(2, 1)))]
    assert all(other[0] != first[0] and other[1] != first[1] for other in others)
    # Whole activations must be dropped alike on all tensor-parallel ranks, cut ones differently.
    second_rank = drawn(5, place(tp=(2, 1)))
    assert second_rank[0] == first[0] and second_rank[1] != first[1]
    start = seed_everything(1234, ParallelState(), CPU)
    assert torch.rand(1).item() != first[0] and start is not None


def test_readable_copies_are_text(state: TrainState) -> None:
    files = readable_copies(state, "model: {}\n", {"name": "NullTokenizer"})
    assert files[Path("config.yaml")] == b"model: {}\n"
    progress = json.loads(files[Path("progress.json")])
    assert progress["iteration"] == 5 and progress["topology"] == {"tp": 1, "pp": 1, "dp": 1}
    assert json.loads(files[Path("tokenizer/megalite.json")]) == {"name": "NullTokenizer"}
    assert state.parallel.world == SINGLE


def test_objects_that_only_megatron_uses_are_known() -> None:
    foreign = ["decoder.final_layernorm._extra_state/shard_0_1", "rerun_state_machine_state/shard_3_8"]
    assert [key for key in foreign if not is_used_by_megatron_alone(key)] == []
    ours = ["rng_state/shard_0.0_1.1", "decoder.final_layernorm.weight", "optimizer.state.param.output_layer.weight"]
    assert [key for key in ours if is_used_by_megatron_alone(key)] == []
