from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megalite.config.schema import OptimizerConfig
from megalite.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megalite.optimizer.distrib_optimizer import DistributedOptimizer
from megalite.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megalite.optimizer.optimizer import MixedPrecisionOptimizer, StepOutcome, decays
from megalite.parallel.ddp import DistributedDataParallel
from megalite.parallel.layers import ParameterTraits, mark
from megalite.parallel.state import ParallelState
from megalite.utils.errors import CheckpointError
from tests.unit.samples import build_model, place, transformer_config

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6, "clip_grad": 0.0}
KINDS = [MixedPrecisionOptimizer, DistributedOptimizer]


class _Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 13, dtype=dtype)
        self.norm = nn.LayerNorm(13, dtype=dtype)
        self.table = nn.Embedding(17, 5, dtype=dtype)


Made = tuple[MixedPrecisionOptimizer, _Net]


def _make(
    kind: type = DistributedOptimizer,
    dtype: torch.dtype = torch.float64,
    parallel: ParallelState | None = None,
    prepare: Callable[[_Net], Any] = lambda net: None,
    grad_scaler: ConstantGradScaler | None = None,
    grad_dtype: torch.dtype | None = None,
    **changes: Any,
) -> Made:
    torch.manual_seed(11)
    net = _Net(dtype)
    prepare(net)
    if grad_dtype is None and dtype in (torch.bfloat16, torch.float16):
        grad_dtype = torch.float32
    ddp = DistributedDataParallel(net, parallel or ParallelState(), grad_dtype=grad_dtype, bucket_size=100)
    return kind([ddp], OptimizerConfig(**SETTINGS | changes), grad_scaler), net


def _set_gradients(net: nn.Module, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for name, parameter in net.named_parameters():
        gradient = scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.main_grad.copy_(gradient)
        gradients[name] = parameter.main_grad.detach().clone()
    return gradients


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in gradients.values()))


class _Adam:
    """AdamW written out, for one parameter: decay first, then the step with both moments corrected for their start."""

    def __init__(self, value: torch.Tensor, decay: float) -> None:
        self.value, self.decay = value.clone(), decay
        self.m, self.v, self.t = torch.zeros_like(value), torch.zeros_like(value), 0

    def step(self, g: torch.Tensor) -> None:
        lr, b1, b2, eps = (SETTINGS[k] for k in ("lr", "adam_beta1", "adam_beta2", "adam_eps"))
        self.t += 1
        self.m = b1 * self.m + (1.0 - b1) * g
        self.v = b2 * self.v + (1.0 - b2) * g * g
        m_hat, v_hat = self.m / (1.0 - b1**self.t), self.v / (1.0 - b2**self.t)
        self.value = (1.0 - lr * self.decay) * self.value - lr * m_hat / (torch.sqrt(v_hat) + eps)


def _apply_schedule(optimizer: MixedPrecisionOptimizer) -> None:
    """Do what the schedule does before a step."""
    for group in optimizer.param_groups:
        group["weight_decay"] = SETTINGS["weight_decay"] * group["wd_mult"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_adam_with_decoupled_decay(kind: type, clip: float) -> None:
    optimizer, net = _make(kind, clip_grad=clip)
    _apply_schedule(optimizer)
    decay = {"linear.weight": 0.1, "table.weight": 0.1}
    own = {name: _Adam(p.detach(), decay.get(name, 0.0)) for name, p in net.named_parameters()}
    for step in range(3):
        gradients = _set_gradients(net, step)
        norm = _norm(gradients)
        factor = clip / (norm + 1e-6) if clip else 1.0
        outcome = optimizer.step()
        assert outcome.updated and outcome.grad_norm == pytest.approx(norm, rel=1e-13)
        for name, parameter in net.named_parameters():
            own[name].step(factor * gradients[name])
            torch.testing.assert_close(parameter.detach(), own[name].value, rtol=1e-10, atol=1e-12, msg=name)
    for piece, word, tensor in optimizer.state_tensors():
        adam = own[piece.name]
        expected = {"param": adam.value, "exp_avg": adam.m, "exp_avg_sq": adam.v}[word].reshape(-1)
        part = expected[piece.parameter_start : piece.parameter_start + tensor.numel()]
        torch.testing.assert_close(tensor, part, rtol=1e-10, atol=1e-12)
    assert optimizer.num_steps == 3


def test_clipping_leaves_small_gradients_alone() -> None:
    results = []
    for clip in (0.0, 1e6):
        optimizer, net = _make(clip_grad=clip)
        _set_gradients(net, 1)
        optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_biases_and_norms_do_not_decay() -> None:
    optimizer, net = _make()
    parameters = dict(net.named_parameters())
    assert {name for name in parameters if decays(name, parameters[name])} == {"linear.weight", "table.weight"}
    assert not decays("x.bias", nn.Parameter(torch.zeros(2, 2)))
    sizes = {g["wd_mult"]: sum(p.numel() for p in g["params"]) for g in optimizer.param_groups}
    assert sizes == {1.0: 9 * 13 + 17 * 5, 0.0: 13 + 13 + 13}


@pytest.mark.parametrize("kind", KINDS)
def test_moments_exist_before_the_first_step(kind: type) -> None:
    optimizer, net = _make(kind)
    words = [word for _, word, _ in optimizer.state_tensors()]
    assert words.count("exp_avg") == words.count("exp_avg_sq") == words.count("param") == len(optimizer.pieces)
    assert sum(p.values.numel() for p in optimizer.pieces) == sum(p.numel() for p in net.parameters())
    for _, word, tensor in optimizer.state_tensors():
        assert word == "param" or not tensor.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_not_finite_leaves_everything_untouched(kind: type, bad: float) -> None:
    optimizer, net = _make(kind, clip_grad=1.0)
    _set_gradients(net, 1)
    optimizer.step()
    before = [tensor.clone() for _, _, tensor in optimizer.state_tensors()]
    values = [p.detach().clone() for p in net.parameters()]
    _set_gradients(net, 2)
    net.norm.bias.main_grad[3] = bad
    outcome = optimizer.step()
    assert not outcome.updated and not math.isfinite(outcome.grad_norm)
    assert optimizer.num_steps == 1
    assert all(torch.equal(a, t) for a, (_, _, t) in zip(before, optimizer.state_tensors(), strict=True))
    assert all(torch.equal(a, p) for a, p in zip(values, net.parameters(), strict=True))
    assert all(float(state["step"]) == 1.0 for state in optimizer.adam.state.values())


def test_bfloat16_parameters_have_fp32_masters() -> None:
    optimizer, net = _make(dtype=torch.bfloat16, lr=1e-5, weight_decay=0.0)
    start = net.linear.weight.detach().clone()
    for _ in range(3):
        net.linear.weight.main_grad.fill_(1.0)
        optimizer.step()
    masters = [p for p in optimizer.pieces if p.name == "linear.weight"]
    assert all(piece.master.dtype == torch.float32 for piece in optimizer.pieces)
    moved = torch.cat([piece.master.detach() for piece in masters])
    # Three steps of 1e-5: nothing of them would be left in bfloat16, the master has all.
    torch.testing.assert_close(moved, start.float().reshape(-1) - 3e-5, rtol=0, atol=1e-7)
    assert torch.equal(net.linear.weight.reshape(-1), moved.bfloat16())


# fp16


def _scaler(initial: float = 2.0**10) -> DynamicGradScaler:
    return DynamicGradScaler(initial, minimum=2.0**7, window=4, hysteresis=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_scaled_gradient_gives_the_update_of_the_plain_one(kind: type, clip: float) -> None:
    plain, net = _make(kind, torch.float16, clip_grad=clip)
    scaled, other = _make(kind, torch.float16, grad_scaler=_scaler(), clip_grad=clip)
    for step in range(3):
        gradients = _set_gradients(net, step)
        _set_gradients(other, step, scale=scaled.grad_scaler.scale)
        outcomes = plain.step(), scaled.step()
        # The scale is a power of two, so nothing is rounded but what would be anyway.
        assert outcomes[0] == outcomes[1] and outcomes[0].grad_norm == pytest.approx(_norm(gradients), rel=1e-6)
    for own, its in zip(plain.state_tensors(), scaled.state_tensors(), strict=True):
        torch.testing.assert_close(own[2], its[2], rtol=1e-6, atol=0)
    for parameter, its in zip(net.parameters(), other.parameters(), strict=True):
        assert parameter.dtype == torch.float16 and torch.equal(parameter, its)
    for piece in scaled.pieces:
        assert piece.master.dtype == torch.float32 and torch.equal(piece.values, piece.master.half())


def test_gradients_kept_in_fp16_do_not_vanish_when_the_scale_is_taken_out() -> None:
    # 1e-9 is nothing in fp16, whose least number is 6e-8; times 2^20 it is 1e-3.
    scaler = DynamicGradScaler(2.0**20, 1.0, window=1000, hysteresis=2)
    optimizer, net = _make(dtype=torch.float16, grad_dtype=torch.float16, grad_scaler=scaler, adam_eps=1e-12)
    for parameter in net.parameters():
        parameter.main_grad.fill_(1e-9 * 2.0**20)
    outcome = optimizer.step()
    assert outcome.updated and outcome.grad_norm == pytest.approx(1e-9 * (13 * 9 + 3 * 13 + 17 * 5) ** 0.5, rel=1e-3)
    for _, word, tensor in optimizer.state_tensors():
        if word == "exp_avg":
            torch.testing.assert_close(tensor, torch.full_like(tensor, 0.2 * 1e-9), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_overflows_are_left_out_and_halve_the_scale_after_the_hysteresis(kind: type) -> None:
    optimizer, net = _make(kind, torch.float16, grad_scaler=_scaler())
    scales, updated = [], []
    for step in range(9):
        _set_gradients(net, step, scale=optimizer.grad_scaler.scale)
        before = [tensor.clone() for _, _, tensor in optimizer.state_tensors()]
        if step in (0, 2, 3):
            net.norm.bias.main_grad[1] = (math.inf, 0.0, math.nan, -math.inf)[step]
        outcome = optimizer.step()
        scales.append(optimizer.grad_scaler.scale)
        updated.append(outcome.updated)
        is_same = all(torch.equal(a, t) for a, (_, _, t) in zip(before, optimizer.state_tensors(), strict=True))
        assert is_same != outcome.updated
    # The first overflow is forgiven, the second halves, the third halves at once; four clean steps double.
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**8, 2.0**9, 2.0**9]
    assert updated == [step not in (0, 2, 3) for step in range(9)]
    assert optimizer.num_steps == 6


def test_the_scale_is_saved_and_restored() -> None:
    optimizer, net = _make(dtype=torch.float16, grad_scaler=_scaler())
    for step in range(4):
        _set_gradients(net, step, scale=optimizer.grad_scaler.scale)
        if step != 1:
            net.linear.bias.main_grad[0] = math.inf
        optimizer.step()
    common = optimizer.common_state_dict()
    buffer = io.BytesIO()
    torch.save(common, buffer)
    buffer.seek(0)
    fresh, _ = _make(dtype=torch.float16, grad_scaler=_scaler(2.0**30))
    fresh.load_common_state_dict(torch.load(buffer, weights_only=True))
    scaler = fresh.grad_scaler
    assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (2.0**8, 0, -1)
    assert fresh.num_steps == optimizer.num_steps == 1
    # What bf16 saved has no scale: the run keeps its own.
    without, _ = _make(dtype=torch.bfloat16)
    fresh.load_common_state_dict(without.common_state_dict())
    assert fresh.grad_scaler.scale == 2.0**8


def test_a_rank_that_owns_nothing_takes_part() -> None:
    parallel = place(dp=(4, 3))
    linear = nn.Linear(4, 4, bias=False)
    ddp = DistributedDataParallel(linear, parallel, bucket_size=40_000_000)
    optimizer = DistributedOptimizer([ddp], OptimizerConfig(**SETTINGS | {"clip_grad": 0.5}), _scaler())
    assert optimizer.pieces == []
    optimizer.parallel = ParallelState()
    ddp.start_param_sync = lambda: None
    linear.weight.main_grad.fill_(2.0**10)
    assert optimizer.step().updated and optimizer.num_steps == 1


def test_masters_are_taken_from_loaded_weights() -> None:
    optimizer, net = _make(dtype=torch.bfloat16)
    for parameter in net.parameters():
        parameter.data.fill_(0.5)
    assert not any(bool((piece.master == 0.5).all()) for piece in optimizer.pieces)
    optimizer.reload_masters()
    assert all(bool((piece.master == 0.5).all()) for piece in optimizer.pieces)


def test_fp32_masters_are_the_parameters_themselves() -> None:
    optimizer, net = _make(dtype=torch.float32)
    for piece in optimizer.pieces:
        assert piece.master.data_ptr() == piece.values.data_ptr()
    optimizer.reload_masters()


@pytest.mark.parametrize("kind", KINDS)
def test_the_common_part_is_plain(kind: type) -> None:
    optimizer, net = _make(kind)
    _set_gradients(net, 1)
    optimizer.step()
    common = optimizer.common_state_dict()
    buffer = io.BytesIO()
    torch.save(common, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == common
    assert set(common) == {"optimizer", "param_state_sharding_type"}
    assert common["param_state_sharding_type"] == "fully_reshardable"
    groups = common["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["step"]) for g in groups] == [(1.0, 1.0), (0.0, 1.0)]
    assert all("params" not in g and {"lr", "betas", "eps", "max_lr", "min_lr", "lr_mult"} <= set(g) for g in groups)


def test_the_step_count_is_restored() -> None:
    optimizer, net = _make()
    for seed in range(4):
        _set_gradients(net, seed)
        optimizer.step()
    fresh, _ = _make()
    fresh.load_common_state_dict(optimizer.common_state_dict())
    assert fresh.num_steps == 4
    assert {float(state["step"]) for state in fresh.adam.state.values()} == {4.0}


def test_a_checkpoint_without_a_group_is_refused() -> None:
    optimizer, _ = _make()
    state = optimizer.common_state_dict()
    state["optimizer"]["param_groups"].pop()
    with pytest.raises(
        CheckpointError, match=r"optimizer groups with wd_mult.*\(0.0, 1.0, False, False\).*no_load_optim"
    ):
        optimizer.load_common_state_dict(state)


def test_ranks_own_disjoint_shards_that_cover_everything() -> None:
    count = {name: torch.zeros(p.numel(), dtype=torch.int) for name, p in _make()[1].named_parameters()}
    for rank in range(4):
        optimizer, _ = _make(DistributedOptimizer, parallel=place(dp=(4, rank)))
        # Both groups exist on every rank, also where one is empty.
        assert [group["wd_mult"] for group in optimizer.param_groups] == [1.0, 0.0]
        for piece in optimizer.pieces:
            count[piece.name][piece.parameter_start : piece.parameter_start + piece.values.numel()] += 1
    assert all(bool((c == 1).all()) for c in count.values())
    plain, net = _make(MixedPrecisionOptimizer, parallel=place(dp=(4, 3)))
    assert sum(p.values.numel() for p in plain.pieces) == sum(p.numel() for p in net.parameters())


def _norm_at(tp: tuple[int, int], traits_of_linear: ParameterTraits, monkeypatch: pytest.MonkeyPatch) -> StepOutcome:
    monkeypatch.setattr("megalite.utils.dist.Group.all_reduce", lambda self, tensor, op=None: tensor)
    optimizer, net = _make(
        MixedPrecisionOptimizer, parallel=place(tp=tp), prepare=lambda net: mark(net.linear.weight, traits_of_linear)
    )
    for parameter in net.parameters():
        parameter.main_grad.zero_()
    net.linear.weight.main_grad.fill_(1.0)
    net.norm.weight.main_grad.fill_(2.0)
    return optimizer.step()


def test_norm_counts_each_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, copy = ParameterTraits(tp_axis=0), ParameterTraits(tp_axis=0, is_copy=True)
    linear, norm = 9 * 13 * 1.0, 13 * 4.0
    assert _norm_at((1, 0), cut, monkeypatch).grad_norm == pytest.approx(math.sqrt(linear + norm))
    assert _norm_at((2, 0), cut, monkeypatch).grad_norm == pytest.approx(math.sqrt(linear + norm))
    # A whole tensor is counted by the first tensor-parallel rank, a cut one by all.
    assert _norm_at((2, 1), cut, monkeypatch).grad_norm == pytest.approx(math.sqrt(linear))
    assert _norm_at((2, 0), copy, monkeypatch).grad_norm == pytest.approx(math.sqrt(norm))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_saved_blocks_tile_every_parameter_once(kind: type, dp: int) -> None:
    config = transformer_config(dtype=torch.float32)
    covered: dict[str, torch.Tensor] = {}
    for rank in range(dp):
        parallel = place(dp=(dp, rank))
        model = build_model(config, parallel)
        optimizer = kind([DistributedDataParallel(model, parallel, bucket_size=700)], OptimizerConfig(lr=1e-3))
        weights = model.sharded_state_dict()
        keys = {leaf.key for leaf in weights.values() if isinstance(leaf, ShardedTensor)}
        for blocks in optimizer.sharded_state_dict(weights).values():
            for block in blocks:
                if is_main_replica(block.replica_id):
                    count = covered.setdefault(block.key, torch.zeros(block.global_shape, dtype=torch.int))
                    sizes = (1,) * block.prepend_axis_num + block.local_shape
                    count[tuple(slice(o, o + s) for o, s in zip(block.global_offset, sizes, strict=True))] += 1
    words = ("param", "exp_avg", "exp_avg_sq")
    assert set(covered) == {f"optimizer.state.{word}.{key}" for word in words for key in keys}
    assert all(bool((count == 1).all()) for count in covered.values())


def test_saved_blocks_share_memory_with_the_optimizer() -> None:
    model = build_model(transformer_config(dtype=torch.float32))
    optimizer = DistributedOptimizer(
        [DistributedDataParallel(model, ParallelState(), bucket_size=40_000_000)], OptimizerConfig(lr=1e-3)
    )
    for blocks in optimizer.sharded_state_dict(model.sharded_state_dict()).values():
        for block in blocks:
            block.data.fill_(0.25)
    assert all(bool((tensor == 0.25).all()) for _, _, tensor in optimizer.state_tensors())
    assert all(bool((p == 0.25).all()) for p in model.parameters())
