"""Every way in which a file may hold the optimizer, against the true state and against the losses of Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.optimizer_layouts import Buckets as OptimizerParts
from megalite.checkpoint.paths import iteration_folder
from megalite.dist_checkpointing.serialization import load_common_state_dict, load_plain_objects, read_index
from megalite.training.context import TrainContext
from megalite.training.setup import training_run
from megalite.utils.errors import CheckpointError, MegaliteError, TopologyMismatchError
from tests.helpers.fixtures import checkpoint_of, fixture_config, megatron_fixture
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import LLAMA, VPP, RunResult, Topology, make_config, run, unequal

Changes = dict[str, dict[str, Any]]

ONE, TP2, PP2, TP2PP2, DP2, DP4 = (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4)
BATCH: Changes = {"training": {"micro_batch_size": 1, "global_batch_size": 12}}
BUCKETS: Changes = {"checkpoint": {"dist_ckpt_optim_fully_reshardable": False}}
BF16: Changes = {"precision": {"bf16": True}}


# Files of Megatron


class _RecipeTokens:
    """The token recipe of the fixtures for the rank ``dp`` of (rank, size)."""

    def __init__(self, dp: tuple[int, int], vocab: int, seq: int) -> None:
        self.dp, self.vocab, self.seq = dp, vocab, seq
        self.position = 0

    def set_position(self, consumed: int) -> None:
        self.position = consumed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        step, offset = divmod(self.position, 8)
        self.position += 2 * self.dp[1]
        random = np.random.RandomState((1000003 * step + offset // 2 + self.dp[0]) & 0x7FFFFFFF)
        first = random.randint(0, self.vocab, (2, 1))
        increments = random.randint(1, 4, (2, self.seq)).cumsum(axis=1)
        text = torch.from_numpy((first + np.concatenate([np.zeros((2, 1), int), increments], axis=1)) % self.vocab)
        positions = torch.arange(self.seq).expand(2, self.seq)
        return {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": torch.ones(2, self.seq),
            "position_ids": positions,
        }


def _fixture_settings(description: dict[str, Any]) -> list[Changes]:
    model = description["model"]
    shape = {
        "num_layers": model["num_layers"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "ffn_hidden_size": model["ffn"],
        "seq_length": model["seq"],
        "vocab_size": model["vocab"],
        "make_vocab_size_divisible_by": 1,
    }
    if model["style"] != "gpt2":
        shape["num_query_groups"] = model["kv_groups"]
    optimizer = {"lr": 1e-3, "min_lr": 1e-3, "clip_grad": 1.0, "weight_decay": 0.1, "adam_beta2": 0.95}
    return [
        *((LLAMA,) if model["style"] != "gpt2" else ()),
        {
            "model": shape,
            "data": {"tokenizer_type": "NullTokenizer"},
            "training": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 20},
            "optimizer": {**optimizer, "override_opt_param_scheduler": True},
            "precision": {"bf16": bool(description["bf16"])},
        },
    ]


def _go_on_as_megatron(ctx: TrainContext, stored_decay: float) -> None:
    """Put the recipe's tokens and the stored weight decay in force: no scheduler ran where the file was made."""
    vocab, seq = ctx.state.vocab_size, ctx.config.model.seq_length
    ctx.train_batches = _RecipeTokens((ctx.parallel.dp.rank, ctx.parallel.dp.size), vocab, seq)
    ctx.train_batches.set_position(ctx.progress.consumed_train_samples)
    for group in ctx.state.optimizer.param_groups:
        group["wd_mult"] = 1.0
        group["weight_decay"] = stored_decay
        assert ctx.state.optimizer.num_steps == 3


FULLY = ("optim_fully_reshardable_bf16_tp2dp2", "optim_fully_reshardable_fp32_tp2pp2")
BUCKET_FIXTURE = "optim_dp_reshardable_bf16_tp1dp2"


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *((name, topology) for name in FULLY for topology in (ONE, TP2, PP2, TP2PP2, DP2)),
        *((BUCKET_FIXTURE, topology) for topology in (ONE, DP2, DP4)),
    ],
    ids=str,
)
def test_megatrons_losses_go_on_at_any_topology(name: str, topology: Topology) -> None:
    """P6: a bucket file follows DP, the others every change; with the stored weight decay in force."""
    fixture = megatron_fixture(name)
    description = fixture_config(fixture)
    config = make_config(
        *_fixture_settings(description), {"checkpoint": {"load": str(fixture / "ckpt")}}, topology=topology
    )
    result = run(topology, config, 3, _go_on_as_megatron, (0.1,))
    expected = description["steps"][3:]
    tolerance = 2e-3 if description["bf16"] else 1e-5
    assert result.losses == pytest.approx([step["loss"] for step in expected], abs=tolerance)
    assert result.grad_norms == pytest.approx([step["grad_norm"] for step in expected], abs=tolerance)


def _start_error(config: Any) -> tuple[type, str] | None:
    try:
        with training_run(config):
            return None
    except MegaliteError as error:
        return type(error), str(error)


@pytest.mark.parametrize("topology", [TP2, PP2, TP2PP2], ids=str)
def test_p6_bucket_file_of_megatron_at_another_tp_or_pp_is_one_error(topology: Topology) -> None:
    fixture = megatron_fixture(BUCKET_FIXTURE)
    settings = _fixture_settings(fixture_config(fixture))
    config = make_config(*settings, {"checkpoint": {"load": str(fixture / "ckpt")}}, topology=topology)
    (outcome,) = set(run_on_ranks(prod(topology), _start_error, config))
    assert outcome is not None and outcome[0] is TopologyMismatchError
    assert f"saved at TP=1 PP=1 with its optimizer as dp_reshardable, this run has TP={topology[0]}" in outcome[1]
    assert "checkpoint.dist_ckpt_optim_fully_reshardable on" in outcome[1] and "fully-parallel-save" not in outcome[1]
    config = make_config(
        *settings, {"checkpoint": {"load": str(fixture / "ckpt"), "no_load_optim": True}}, topology=topology
    )
    assert set(run_on_ranks(prod(topology), _start_error, config)) == {None}


# Files of ours


def _train(topology: Topology, folder: Path, *changes: Changes) -> RunResult:
    save = {"checkpoint": {"save": str(folder), "save_interval": 2}}
    return run(topology, make_config(BATCH, *changes, _merged(changes, save), topology=topology), 2)


def _merged(changes: tuple[Changes, ...], last: Changes) -> Changes:
    """Return ``last`` with the checkpoint settings of ``changes``, which it would replace."""
    settings: dict[str, Any] = {}
    for change in (*changes, last):
        settings |= change.get("checkpoint", {})
    return {"checkpoint": settings}


def _load(topology: Topology, folder: Path, *changes: Changes, steps: int = 0) -> RunResult:
    load = _merged(changes, {"checkpoint": {"load": str(folder)}})
    return run(topology, make_config(BATCH, *changes, load, topology=topology), steps)


SMALL_BUCKETS: Changes = {"parallel": {"ddp_bucket_size": 9_000}}


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "saving", "loading"),
    [
        pytest.param((1, 1, 2), (1, 1, 3), (BF16, SMALL_BUCKETS), (BF16,), id="other DP and buckets"),
        pytest.param((2, 1, 2), (2, 1, 1), (LLAMA,), (LLAMA, SMALL_BUCKETS), id="llama, one rank of DP"),
        pytest.param((1, 2, 2), (1, 2, 2), (BF16, VPP, SMALL_BUCKETS), (BF16, VPP), id="tied embedding and VPP"),
        pytest.param(
            (1, 2, 1),
            (1, 2, 2),
            (BF16,),
            (BF16, {"parallel": {"use_distributed_optimizer": False}}),
            id="plain optimizer",
        ),
    ],
)
def test_bucket_files_move_over_dp_and_bucket_sizes(
    tmp_path: Path, saved_at: Topology, loaded_at: Topology, saving: tuple[Changes, ...], loading: tuple[Changes, ...]
) -> None:
    """R4.4.7, the row of dp_reshardable: what Megatron needs equal buckets for works with any."""
    saved = _train(saved_at, tmp_path / "run", *saving, BUCKETS)
    step = iteration_folder(tmp_path / "run", 2)
    common = load_common_state_dict(step)
    assert common["optimizer"] == {"param_state_sharding_type": "dp_reshardable"}
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "dp_reshardable"
    assert unequal(_load(loaded_at, tmp_path / "run", *loading).state, saved.state) == []
    expected = run(saved_at, make_config(BATCH, *saving, topology=saved_at), 4).losses[2:]
    tolerance = 2e-3 if BF16 in saving else 1e-5
    assert _load(loaded_at, tmp_path / "run", *loading, steps=2).losses == pytest.approx(expected, abs=tolerance)


def test_bucket_file_has_megatrons_keys(tmp_path: Path) -> None:
    _train((1, 1, 2), tmp_path / "run", BF16, SMALL_BUCKETS, BUCKETS)
    step = iteration_folder(tmp_path / "run", 2)
    index = read_index(step)
    prefix = "optimizer.distributed.dp_group_idx_0"
    (numels,) = load_plain_objects(step, [f"{prefix}.per_bucket_numel_unpadded/shard_0_1"]).values()
    ((dtypes, lengths),) = numels[0].items()
    assert dtypes == (torch.bfloat16, torch.float32) and len(lengths) > 3
    for bucket, length in enumerate(lengths):
        for word in ("param", "exp_avg", "exp_avg_sq"):
            stored = index.tensors[
                f"{prefix}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{bucket}.{word}"
            ]
            assert stored.shape == (length,) and stored.dtype == torch.float32
    (groups,) = load_plain_objects(step, [f"{prefix}.optimizer/shard_0_1"]).values()
    assert [(group["wd_mult"], group["step"]) for group in groups["param_groups"]] == [(1.0, 2.0), (0.0, 2.0)]


def test_p6_tp_pp_and_vpp_of_a_bucket_file_of_ours_cannot_change(tmp_path: Path) -> None:
    _train((2, 1, 1), tmp_path / "run", BUCKETS)
    load = {"checkpoint": {"load": str(tmp_path / "run")}}
    for topology in (ONE, (1, 2, 1), (2, 2, 1)):
        (outcome,) = set(run_on_ranks(prod(topology), _start_error, make_config(BATCH, load, topology=topology)))
        assert outcome is not None and outcome[0] is TopologyMismatchError and "saved at TP=2 PP=1" in outcome[1]
    _train((1, 2, 1), tmp_path / "stages", BUCKETS)
    load = {"checkpoint": {"load": str(tmp_path / "stages")}}
    (outcome,) = set(run_on_ranks(2, _start_error, make_config(BATCH, VPP, load, topology=(1, 2, 1))))
    assert outcome is not None and outcome[0] is TopologyMismatchError
    assert "saved at TP=1 PP=2 VPP=1 with" in outcome[1] and "this run has TP=1 PP=2 VPP=2" in outcome[1]


def test_the_file_and_not_the_setting_says_the_layout(tmp_path: Path) -> None:
    saved = _train((1, 1, 2), tmp_path / "run", BUCKETS)
    assert unequal(_load((1, 1, 1), tmp_path / "run").state, saved.state) == []
    saved = _train((1, 1, 2), tmp_path / "other")
    assert unequal(_load((2, 1, 1), tmp_path / "other", BUCKETS).state, saved.state) == []


@pytest.mark.parametrize("topology", [ONE, (1, 1, 2), (2, 1, 1)], ids=str)
def test_precision_may_change_and_the_masters_win(tmp_path: Path, topology: Topology) -> None:
    """A run in fp32 has no masters beside its weights: of a bf16 file it takes the masters, on every rank."""
    saved = _train((1, 1, 2), tmp_path / "low", BF16)
    loaded = _load(topology, tmp_path / "low")
    masters = {name.removeprefix("param."): value for name, value in saved.state.items() if name.startswith("param.")}
    assert [name for name, value in masters.items() if not torch.equal(loaded.state[name], value)] == []
    saved = _train((1, 1, 2), tmp_path / "high")
    loaded = _load(topology, tmp_path / "high", BF16)
    for name in masters:
        assert torch.equal(loaded.state[f"param.{name}"], saved.state[name])
        assert torch.equal(loaded.state[name], saved.state[name].bfloat16())


FP16: Changes = {"precision": {"fp16": True}}


@pytest.mark.parametrize("layout", [BUCKETS, {}], ids=["buckets", "blocks"])
@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        (FP16, BF16),
        (BF16, FP16),
        pytest.param(FP16, {}, marks=pytest.mark.slow),
        pytest.param({}, FP16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp16_may_change_to_and_fro(tmp_path: Path, layout: Changes, saved_in: Changes, loaded_in: Changes) -> None:
    """The loss scale is there or not; weights are the masters rounded once, not by way of the other type."""
    saved = _train((1, 1, 2), tmp_path / "run", saved_in, layout)
    loaded = _load((1, 1, 2), tmp_path / "run", loaded_in)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(next(iter(loaded_in.get("precision", {})), ""))
    for name in [name for name in saved.state if f"param.{name}" in saved.state]:
        master = saved.state[f"param.{name}"]
        assert torch.equal(loaded.state[f"param.{name}"], master), name
        assert torch.equal(loaded.state[name], master if dtype is None else master.to(dtype)), name


def _reorder_for_transformer_engine(config: Any, source: Path, target: Path, transformer_impl: str) -> None:
    """Save a bucket file again as a model of Transformer Engine would have written it: with its own order."""
    from megalite.dist_checkpointing import ShardedObject, ShardedTensor, load_plain_tensors, save, write_marker
    from megalite.dist_checkpointing.mapping import parse_unique_key
    from megalite.optimizer.bucket_space import order_with_fused_norms, places_in_buckets
    from megalite.utils.dist import SINGLE

    step, folder = iteration_folder(source, 2), iteration_folder(target, 2)
    tensors, common = load_plain_tensors(step), load_common_state_dict(step)
    objects = load_plain_objects(step, list(read_index(step).objects))
    ((layout,),) = (value for key, value in objects.items() if "per_bucket_numel_unpadded" in key)
    (lengths,) = layout.values()
    with training_run(config) as ctx:
        buffer = ctx.state.optimizer.chunks[0].buffers[0]
        names, numels = buffer.names, [parameter.numel() for parameter in buffer.parameters]
    order = order_with_fused_norms(names)
    assert [names[index] for index in order] != names
    new_places = places_in_buckets([numels[index] for index in order], lengths)
    to = dict(zip(order, new_places, strict=True))
    for key in [key for key in tensors if ".bucket_idx_0." in key]:
        values = tensors[key]
        tensors[key] = torch.zeros_like(values)
        for index, (bucket, start) in enumerate(places_in_buckets(numels, lengths)):
            assert bucket == 0
            tensors[key][to[index][1] :][: numels[index]] = values[start:][: numels[index]]
    common.pop("megalite")
    common["args"].transformer_impl = transformer_impl
    folder.mkdir(parents=True)
    leaves: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    for key, value in objects.items():
        name, offset, shape = parse_unique_key(key)
        leaves[key] = ShardedObject(name, value, shape, offset)
    save({**common, "leaves": leaves}, folder, group=SINGLE)
    write_marker(folder)
    (target / "latest_checkpointed_iteration.txt").write_text("2")


@pytest.mark.parametrize("kind", [(), (LLAMA,)], ids=["gpt2", "llama"])
def test_bucket_file_of_transformer_engine_is_read_in_its_order(tmp_path: Path, kind: tuple[Changes, ...]) -> None:
    """It registers the norm before the attention with linear_qkv, behind linear_proj: buckets have another order."""
    saved = _train(ONE, tmp_path / "run", BF16, *kind, BUCKETS)
    config = make_config(BATCH, BF16, *kind)
    for name, impl in (("te", "transformer_engine"), ("odd", "local")):
        arguments = (config, tmp_path / "run", tmp_path / name, impl)
        run_on_ranks(1, _reorder_for_transformer_engine, *arguments)
    assert unequal(_load((1, 1, 2), tmp_path / "te", BF16, *kind).state, saved.state) == []
    load = {"checkpoint": {"load": str(tmp_path / "odd")}}
    (outcome,) = set(run_on_ranks(1, _start_error, make_config(BATCH, BF16, *kind, load)))
    assert outcome is not None and "transformer_impl local" in outcome[1] and "no_load_optim" in outcome[1]


def test_rows_of_padding_are_not_compared(tmp_path: Path) -> None:
    """They mean nothing, and no program promises that masters and weights agree about them."""
    _train(ONE, tmp_path / "run", BF16)

    def soil(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
        _as_foreign(common)
        table = tensors["optimizer.state.param.embedding.word_embeddings.weight"]
        assert len(table) == 288
        table[257:] = 7.0

    foreign = _rewritten(tmp_path / "run", tmp_path / "foreign", soil)
    load = {"checkpoint": {"load": str(foreign)}}
    for topology in (ONE, (2, 1, 1), (1, 1, 2)):
        config = make_config(BATCH, BF16, load, topology=topology)
        assert set(run_on_ranks(prod(topology), _start_error, config)) == {None}


# Faults and layouts that cannot be read


def _rewritten(source: Path, target: Path, edit: Any) -> Path:
    """Save the whole content of a step again, after ``edit(tensors, common)``, as a program of another origin would."""
    from megalite.dist_checkpointing import ShardedTensor, load_plain_tensors, save, write_marker
    from megalite.utils.dist import SINGLE

    step = iteration_folder(source, 2)
    tensors, common = load_plain_tensors(step), load_common_state_dict(step)
    edit(tensors, common)
    folder = iteration_folder(target, 2)
    folder.mkdir(parents=True)
    leaves = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    save({**common, "tensors": leaves}, folder, group=SINGLE)
    write_marker(folder)
    (target / "latest_checkpointed_iteration.txt").write_text("2")
    return target


def _as_foreign(common: dict[str, Any], **content: Any) -> None:
    common.pop("megalite")
    common["args"].no_save_rng = True
    common["content_metadata"] |= content


@pytest.mark.parametrize("precision", [BF16, {}], ids=["bf16", "fp32"])
def test_masters_that_megatron_shifted_are_an_error_naming_the_keys(tmp_path: Path, precision: Changes) -> None:
    """R4.2.10: the fault leaves whole parameters shifted; a file of ours is not suspected, a sound one passes."""
    _train((1, 1, 2), tmp_path / "run", precision)
    word = "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight"

    def shift(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
        _as_foreign(common)
        tensors[word][1].copy_(tensors[word][1].reshape(-1).roll(64).view_as(tensors[word][1]))

    faulty = _rewritten(tmp_path / "run", tmp_path / "faulty", shift)
    load = {"checkpoint": {"load": str(faulty)}}
    for topology in (ONE, (2, 1, 1), (1, 1, 2)):
        config = make_config(BATCH, precision, load, topology=topology)
        (outcome,) = set(run_on_ranks(prod(topology), _start_error, config))
        assert outcome is not None and outcome[0] is CheckpointError
        assert "decoder.layers.1.mlp.linear_fc1.weight" in outcome[1] and "no_load_optim" in outcome[1]
        assert "layers.0" not in outcome[1]
    sound = _rewritten(tmp_path / "run", tmp_path / "sound", lambda tensors, common: _as_foreign(common))
    load = {"checkpoint": {"load": str(sound)}}
    assert run_on_ranks(1, _start_error, make_config(BATCH, precision, load)) == [None]


def _plain_optimizer_file(tensors: dict[str, torch.Tensor], common: dict[str, Any], has_masters: bool) -> None:
    _as_foreign(common)
    common["content_metadata"].pop("distrib_optim_sharding_type")
    for key in [key for key in tensors if key.startswith("optimizer.state.param.")]:
        values = tensors.pop(key)
        if has_masters:
            tensors[key.replace(".param.", ".fp32_param.")] = values
    groups = [
        {k: v for k, v in group.items() if k != "step"} for group in common["optimizer"]["optimizer"]["param_groups"]
    ]
    renamed = [{f"pre_{k}" if k.endswith("_mult") else k: v for k, v in group.items()} for group in reversed(groups)]
    inner = {"state": {"common_step": torch.tensor(2.0)}, "param_groups": renamed}
    common["optimizer"] = {"optimizer": inner} if has_masters else inner


@pytest.mark.parametrize("has_masters", [True, False])
def test_optimizers_that_are_not_distributed_are_read(tmp_path: Path, has_masters: bool) -> None:
    """Masters under another word or none, the step beside the groups, groups in another order and with old names."""
    precision = BF16 if has_masters else {}
    saved = _train((1, 1, 2), tmp_path / "run", precision)
    foreign = _rewritten(
        tmp_path / "run",
        tmp_path / "plain",
        lambda tensors, common: _plain_optimizer_file(tensors, common, has_masters),
    )
    assert unequal(_load((2, 1, 1), foreign, precision).state, saved.state) == []
    expected = run((1, 1, 2), make_config(BATCH, precision), 4).losses[2:]
    assert _load((1, 1, 1), foreign, precision, steps=2).losses == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda common: _as_foreign(common, distrib_optim_sharding_type="fsdp_dtensor"), "as fsdp_dtensor"),
        (lambda common: _as_foreign(common, distrib_optim_sharding_type="dp_zero_gather_scatter"), "as dp_zero"),
        (lambda common: common.update(optimizer={0: {}, 1: {}}), "several optimizers"),
        (lambda common: common.pop("content_metadata"), "as fully_sharded_model_space"),
    ],
)
def test_layouts_that_cannot_be_read_are_refused_by_name(tmp_path: Path, edit: Any, message: str) -> None:
    _train((1, 1, 1), tmp_path / "run")
    foreign = _rewritten(tmp_path / "run", tmp_path / "foreign", lambda tensors, common: edit(common))
    load = {"checkpoint": {"load": str(foreign), "no_load_rng": True}}
    (outcome,) = set(run_on_ranks(2, _start_error, make_config(BATCH, load)))
    assert outcome is not None and outcome[0] is CheckpointError
    assert message in outcome[1] and "checkpoint.finetune" in outcome[1]


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": 3},
        {"optimizer": {"optimizer": []}},
        {"megalite": []},
        {"megalite": {"config": []}},
        {"megalite": {"config": {"checkpoint": 7}, "run_id": "x"}},
        {"content_metadata": "fully_reshardable"},
        {"opt_param_scheduler": 1},
    ],
    ids=str,
)
def test_plain_values_of_another_form_are_damage_on_all_ranks(tmp_path: Path, values: dict[str, Any]) -> None:
    _train((1, 1, 1), tmp_path / "run")
    foreign = _rewritten(tmp_path / "run", tmp_path / "foreign", lambda tensors, common: common.update(values))
    load = {"checkpoint": {"load": str(foreign), "no_load_rng": True}}
    (outcome,) = set(run_on_ranks(2, _start_error, make_config(BATCH, load)))
    assert outcome is not None and issubclass(outcome[0], CheckpointError), outcome


def test_description_of_the_fixtures_is_what_the_settings_assume() -> None:
    for name in (*FULLY, BUCKET_FIXTURE):
        common = load_common_state_dict(checkpoint_of(megatron_fixture(name)))
        assert common["iteration"] == 3 and json.dumps(common["opt_param_scheduler"])


def _with_other_objects(config: Any, name: str, value: Any) -> tuple[type, str] | None:
    """Let rank 1's cell hold ``value`` under ``name``, as a damaged file would."""
    real = OptimizerParts.apply

    def apply(self: Any, run: Any, common: Any, loaded: Any) -> None:
        if run.parallel.world.rank == 1:
            loaded["optimizer_objects"][name] = value
        real(self, run, common, loaded)

    OptimizerParts.apply = apply
    try:
        return _start_error(config)
    finally:
        OptimizerParts.apply = real


@pytest.mark.parametrize("value", [None, {}, {"param_groups": [{"wd_mult": 1.0}]}, {"param_groups": 7}], ids=str)
def test_objects_of_one_cell_that_are_no_optimizers_are_an_error_on_all_ranks(tmp_path: Path, value: Any) -> None:
    _train((2, 1, 1), tmp_path / "run", BUCKETS)
    config = make_config(BATCH, {"checkpoint": {"load": str(tmp_path / "run")}}, topology=(2, 1, 1))
    (outcome,) = set(run_on_ranks(2, _with_other_objects, config, "optimizer", value))
    assert outcome is not None and issubclass(outcome[0], CheckpointError)


def test_cells_of_other_steps_are_refused(tmp_path: Path) -> None:
    _train((2, 1, 1), tmp_path / "run", BUCKETS)
    config = make_config(BATCH, {"checkpoint": {"load": str(tmp_path / "run")}}, topology=(2, 1, 1))
    identity = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 5.0}
    groups = {"param_groups": [{"wd_mult": wd_mult, **identity} for wd_mult in (1.0, 0.0)]}
    (outcome,) = set(run_on_ranks(2, _with_other_objects, config, "optimizer", groups))
    assert outcome is not None and "states of the steps 2, 5" in outcome[1]


def _without_step(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    _as_foreign(common)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        del group["step"]


def test_a_step_that_is_missing_is_not_taken_for_the_first(tmp_path: Path) -> None:
    _train((1, 1, 1), tmp_path / "run")
    foreign = _rewritten(tmp_path / "run", tmp_path / "foreign", _without_step)
    (outcome,) = run_on_ranks(1, _start_error, make_config(BATCH, {"checkpoint": {"load": str(foreign)}}))
    assert outcome is not None and "step" in outcome[1]
