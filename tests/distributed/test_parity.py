"""Parallel runs against one rank: in float64 to 1e-9, and bit for bit where no sum is reordered."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.helpers.runs import LLAMA, RunResult, Topology, make_config, max_difference, run, unequal

FLOAT64 = {"precision": {"float64": True}}
STEPS = 5


FACES: dict[str, tuple[dict, ...]] = {
    "gpt2": (),
    "llama": (LLAMA,),
    "qk norm": (LLAMA, {"model": {"qk_layernorm": True, "add_qkv_bias": True, "rotary_percent": 0.5}}),
    "few groups": (LLAMA, {"model": {"num_query_groups": 1, "qk_layernorm": True}}),
}


@lru_cache
def _reference(face: str = "gpt2") -> RunResult:
    return run((1, 1, 1), make_config(FLOAT64, *FACES[face]), STEPS)


SP = {"sequence_parallel": True}
VPP = {"num_virtual_stages_per_pipeline_rank": 2}
SELECTIVE = {"recompute_granularity": "selective"}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}

PARALLEL_RUNS = [
    ("gpt2", (2, 1, 1), {}, {}),
    ("gpt2", (2, 1, 1), SP, {}),
    ("gpt2", (1, 2, 1), {}, {}),
    ("gpt2", (1, 4, 1), {}, {}),
    ("gpt2", (1, 1, 2), {}, {}),
    ("gpt2", (2, 2, 1), SP, {}),
    ("gpt2", (2, 1, 2), {}, {}),
    ("gpt2", (1, 2, 2), {}, {}),
    ("gpt2", (1, 2, 1), VPP, UNIFORM),
    ("gpt2", (2, 2, 1), VPP, {}),
    ("llama", (2, 1, 1), {}, SELECTIVE),
    ("llama", (2, 1, 1), SP, UNIFORM),
    ("llama", (1, 2, 1), {"num_layers_per_virtual_pipeline_stage": 1}, BLOCK),
    ("llama", (1, 2, 2), VPP, {}),
    ("llama", (1, 4, 1), {}, {}),
    ("llama", (1, 2, 1), {"decoder_first_pipeline_num_layers": 1}, {}),
    ("llama", (2, 2, 1), SP, SELECTIVE),
    ("qk norm", (2, 1, 1), {}, {}),
    ("qk norm", (2, 1, 2), SP, BLOCK),
    ("few groups", (2, 1, 1), {}, {}),
    ("few groups", (4, 1, 1), SP, {}),
]


@pytest.mark.parametrize(("face", "topology", "parallel", "recompute"), PARALLEL_RUNS, ids=str)
def test_float64_equals_one_rank(face: str, topology: Topology, parallel: dict, recompute: dict) -> None:
    changes = (FLOAT64, *FACES[face], {"parallel": parallel, "training": recompute})
    _assert_equal(run(topology, make_config(*changes, topology=topology), STEPS), _reference(face))


@pytest.mark.parametrize(
    ("num_layers", "parallel"),
    [
        # Two layers on each of three stages and one on the last.
        (7, {"decoder_last_pipeline_num_layers": 1}),
        (8, VPP),
    ],
    ids=str,
)
def test_float64_equals_one_rank_at_other_depths(num_layers: int, parallel: dict) -> None:
    changes = (FLOAT64, LLAMA, {"model": {"num_layers": num_layers}})
    expected = run((1, 1, 1), make_config(*changes), STEPS)
    _assert_equal(run((1, 4, 1), make_config(*changes, {"parallel": parallel}, topology=(1, 4, 1)), STEPS), expected)


def _assert_equal(actual: RunResult, expected: RunResult) -> None:
    assert min(expected.grad_norms) > 0.5, "clipping must be active"
    assert actual.losses == pytest.approx(expected.losses, abs=1e-9)
    assert actual.grad_norms == pytest.approx(expected.grad_norms, abs=1e-9)
    assert max_difference(actual.state, expected.state) < 1e-9


VARIANTS = {
    "distributed optimizer": {"use_distributed_optimizer": True},
    "plain optimizer": {"use_distributed_optimizer": False},
    "plain, overlapped gradients": {"use_distributed_optimizer": False, "overlap_grad_reduce": True},
    "overlapped gradients": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "all overlapped": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_sharding_and_overlap_do_not_change_a_bit(dp: int, bf16: bool) -> None:
    results = {}
    for name, parallel in VARIANTS.items():
        # Buckets of 20000 elements: several of them, so that overlap has something to overlap.
        changes = {"parallel": {**parallel, "ddp_bucket_size": 20_000}, "precision": {"bf16": bf16}}
        results[name] = run((1, 1, dp), make_config(changes), 4)
    first = results.pop("distributed optimizer")
    assert min(first.grad_norms) > 0.5, "clipping must be active"
    for name, other in results.items():
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms), name
        assert unequal(other.state, first.state) == [], name


def test_overlap_does_not_change_a_bit_across_tp_and_pp() -> None:
    base = {"ddp_bucket_size": 20_000, "sequence_parallel": True}
    plain = run((2, 2, 1), make_config({"parallel": base}, topology=(2, 2, 1)), 3)
    overlapped = {**base, "overlap_grad_reduce": True, "overlap_param_gather": True}
    other = run((2, 2, 1), make_config({"parallel": overlapped}, topology=(2, 2, 1)), 3)
    assert (other.losses, other.grad_norms) == (plain.losses, plain.grad_norms)
    assert unequal(other.state, plain.state) == []


def test_padding_of_the_vocabulary_does_not_change_the_loss() -> None:
    wide = make_config(FLOAT64, {"model": {"make_vocab_size_divisible_by": 512}})
    actual, expected = run((1, 1, 1), wide, 3), _reference()
    assert actual.losses == pytest.approx(expected.losses[:3], abs=1e-12)
