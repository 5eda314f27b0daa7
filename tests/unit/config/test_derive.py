from __future__ import annotations

import pytest

from megalite.config.batch_schedule import BatchSchedule
from megalite.config.derive import derive, schedule_in_samples
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import config_with

SAMPLES = ["training.train_iters=null", "training.train_samples=1000"]
GROUPS = ["model.group_query_attention=on", "model.num_query_groups=3"]
TP4 = "parallel.tensor_model_parallel_size=4"


def constant(size):
    return BatchSchedule(((0, size),))


@pytest.mark.parametrize(
    ("tp", "pp", "world_size", "dp"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 4, 2), (2, 2, 8, 2), (4, 2, 8, 1), (1, 1, 7, 7)],
)
def test_data_parallel_size_is_what_remains(tp, pp, world_size, dp):
    config = config_with(f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}")
    derived = derive(config, world_size)
    assert derived.data_parallel_size == dp
    assert [sum(count for _, count in stage) for stage in derived.layer_layout] == [4 // pp] * pp
    assert derived.global_batch_size == 2 * dp
    assert derived.num_microbatches == 1


def test_world_size_that_does_not_fit_is_refused_with_ones_that_do():
    config = config_with("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    with pytest.raises(
        ConfigError, match=r"has 6 ranks, not a multiple of .*_size 2 x .*_size 2 = 4; start it on 4 or 8"
    ):
        derive(config, 6)
    with pytest.raises(ConfigError, match="start it on 4 ranks"):
        derive(config, 2)
    with pytest.raises(ConfigError, match="world size is 0"):
        derive(config, 0)


def test_given_batch_is_kept_at_any_world_size_that_divides_it():
    config = config_with("training.global_batch_size=24")
    assert [derive(config, size).num_microbatches for size in (1, 2, 3, 4)] == [12, 6, 4, 3]
    with pytest.raises(ConfigError, match=r"global_batch_size is 24, not a multiple of .* = 10; use 20 or 30"):
        derive(config, 5)


def test_settings_without_meaning_at_this_size_have_no_effect():
    chunks = ("num_virtual_stages_per_pipeline_rank=3", "num_layers_per_virtual_pipeline_stage=3")
    for setting in (*chunks, "decoder_first_pipeline_num_layers=9", "account_for_loss_in_pipeline_split=on"):
        config = config_with("parallel.sequence_parallel=on", f"parallel.{setting}")
        assert derive(config, 2).sequence_parallel is False
        assert derive(config, 2).num_model_chunks == 1
        assert derive(config, 2).layer_layout == (((0, 4),),)
    config = config_with("parallel.sequence_parallel=on", "parallel.tensor_model_parallel_size=2")
    assert derive(config, 2).sequence_parallel is True


def test_numbers_left_out_are_filled_in():
    derived = derive(config_with(), 1)
    assert (derived.ffn_hidden_size, derived.kv_channels, derived.max_position_embeddings) == (256, 16, 32)
    assert derived.num_query_groups == 4
    assert (derived.eval_micro_batch_size, derived.eval_global_batch_size) == (2, 2)
    derived = derive(
        config_with("model.ffn_hidden_size=100", "model.kv_channels=8", "model.max_position_embeddings=48"), 1
    )
    assert (derived.ffn_hidden_size, derived.kv_channels, derived.max_position_embeddings) == (100, 8, 48)


@pytest.mark.parametrize(("hidden_size", "width"), [(64, 128), (4096, 10880), (5120, 13632), (24, 64)])
def test_a_gated_mlp_is_two_thirds_as_wide(hidden_size, width):
    config = config_with(f"model.hidden_size={hidden_size}", "model.swiglu=on")
    assert width == int(4 * hidden_size * 2 / 3 / 64) * 64
    assert derive(config, 1).ffn_hidden_size == width
    assert derive(config_with("model.swiglu=on", "model.ffn_hidden_size=100"), 1).ffn_hidden_size == 100


def test_bucket_size_grows_with_the_data_parallel_size():
    assert derive(config_with(), 8).ddp_bucket_size == 40_000_000
    assert derive(config_with(), 64).ddp_bucket_size == 64_000_000
    assert derive(config_with("parallel.ddp_bucket_size=1500"), 64).ddp_bucket_size == 1500


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["precision.bf16=on"], True),
        (["precision.bf16=on", "precision.accumulate_allreduce_grads_in_fp32=on"], True),
        (["precision.bf16=on", "precision.accumulate_allreduce_grads_in_fp32=off"], False),
        (["precision.accumulate_allreduce_grads_in_fp32=off"], True),
        (["precision.float64=on"], False),
        (["precision.fp16=on"], True),
        (["precision.fp16=on", "precision.accumulate_allreduce_grads_in_fp32=off"], False),
        (["precision.bf16=on", "precision.grad_reduce_in_bf16=on"], False),
    ],
)
def test_gradient_format(overrides, expected):
    assert derive(config_with(*overrides), 1).accumulate_allreduce_grads_in_fp32 is expected


@pytest.mark.parametrize(
    ("tp", "multiple", "vocab_size", "padded"),
    [
        (1, 128, 257, 384),
        (2, 128, 257, 512),
        (1, 128, 50257, 50304),
        (2, 128, 51200, 51200),
        (4, 1, 257, 260),
        (1, 1, 7, 7),
    ],
)
def test_vocabulary_is_padded_for_the_tensor_parallel_size(tp, multiple, vocab_size, padded):
    config = config_with(f"parallel.tensor_model_parallel_size={tp}", f"model.make_vocab_size_divisible_by={multiple}")
    assert derive(config, tp).padded_vocab_size(vocab_size) == padded


def test_length_in_samples_is_cut_to_whole_batches():
    config = config_with(*SAMPLES, "training.global_batch_size=12")
    assert (derive(config, 1).train_iters, derive(config, 1).train_samples) == (83, 1000)
    derived = derive(config_with("training.global_batch_size=12"), 1)
    assert (derived.train_iters, derived.train_samples) == (100, 1200)


def test_run_shorter_than_a_batch_is_refused_when_the_batch_is_known():
    config = config_with("training.train_iters=null", "training.train_samples=7")
    assert derive(config, 3).train_iters == 1
    with pytest.raises(ConfigError, match="train_samples is 7, less than one global batch of 8"):
        derive(config, 4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["checkpoint.dist_ckpt_optim_fully_reshardable=off", "parallel.use_distributed_optimizer=off"],
            "stores the shards of a distributed optimizer",
        ),
        (["parallel.pipeline_model_parallel_size=8"], "more stages than layers"),
        (["parallel.pipeline_model_parallel_size=3"], "num_layers is 4, which parallel.pipeline_model_parallel_size 3"),
        (["parallel.tensor_model_parallel_size=8"], "num_attention_heads is 4, which parallel.tensor"),
        (
            [*GROUPS, "model.num_attention_heads=24", "model.hidden_size=96", "parallel.tensor_model_parallel_size=8"],
            "num_query_groups is 3 and parallel.tensor_model_parallel_size 8, but one has to divide",
        ),
        (
            # A group on four ranks: (4 + 2) x 3 rows.
            ["model.group_query_attention=on", "model.num_query_groups=1", "model.kv_channels=3", TP4],
            "projection has 18 rows: (model.num_attention_heads 4 + 2 x model.num_query_groups 1) x model.kv_channels",
        ),
        (["model.swiglu=on", "model.hidden_size=20"], "too small for swiglu's default inner width"),
        (["model.swiglu=on", "model.ffn_hidden_size=102", TP4], "ffn_hidden_size is 102"),
        (["parallel.tensor_model_parallel_size=4", "model.ffn_hidden_size=102"], "ffn_hidden_size is 102"),
        (
            ["parallel.tensor_model_parallel_size=4", "parallel.sequence_parallel=on", "model.seq_length=30"],
            "size 4 does not divide, with parallel.sequence_parallel on",
        ),
        (["data.tokenizer_type=NullTokenizer"], "model.vocab_size is not set"),
        (
            ["training.eval_interval=5", "data.mock_data=no", "data.data_path=a", "data.split=99,0,1"],
            "leaves nothing for validation",
        ),
        (
            ["training.eval_interval=5", "data.mock_data=no", "data.data_args_path=f", "data.split=1"],
            "leaves nothing for validation",
        ),
        (
            ["training.eval_interval=5", "data.mock_data=no", "data.train_data_path=a"],
            "without data.valid_data_path, so that there is nothing for validation",
        ),
        (["training.global_batch_size=9"], "which training.micro_batch_size 2 does not divide"),
        (["training.global_batch_size=2000", *SAMPLES], "less than one global batch"),
        *(([f"optimizer.lr_{name}_samples=9"], f"lr_{name}_samples is 9") for name in ("decay", "warmup")),
        *(([f"optimizer.lr_{name}_iters=9", *SAMPLES], f"lr_{name}_iters is 9") for name in ("decay", "warmup")),
        (["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_samples=9"], "use lr_wsd_decay_iters"),
        (["optimizer.lr_warmup_iters=100"], "lr_warmup_iters is 100, not less than training.train_iters 100"),
        (["optimizer.lr_warmup_iters=9", "optimizer.lr_decay_iters=9"], "not less than optimizer.lr_decay_iters 9"),
        (["optimizer.lr_warmup_samples=1000", *SAMPLES], "not less than training.train_samples 1000"),
        (["optimizer.lr_decay_style=WSD"], "optimizer.lr_wsd_decay_iters is not set"),
        (["optimizer.lr_decay_style=WSD", *SAMPLES], "optimizer.lr_wsd_decay_samples is not set"),
        (
            ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=91", "optimizer.lr_warmup_iters=10"],
            "lr_wsd_decay_iters is 91, more than what training.train_iters 100 leaves after a warmup of 10",
        ),
    ],
)
def test_contradiction_between_sections_is_refused(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        config_with(*overrides)
    assert expected in str(caught.value)


def test_sequence_length_need_not_be_divisible_without_sequence_parallel():
    assert derive(config_with("parallel.tensor_model_parallel_size=4", "model.seq_length=30"), 4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_may_be_fewer_than_tensor_parallel_ranks(groups):
    config = config_with("model.group_query_attention=on", f"model.num_query_groups={groups}", TP4)
    assert derive(config, 4).num_query_groups == groups


def test_virtual_stages_need_micro_batches_in_whole_groups():
    parallel = ["parallel.pipeline_model_parallel_size=2", "parallel.num_virtual_stages_per_pipeline_rank=2"]
    assert derive(config_with(*parallel, "training.global_batch_size=8"), 2).num_model_chunks == 2
    with pytest.raises(
        ConfigError, match=r"a step has 3 micro-batches \(global batch 6 .*size 2 does not divide; with"
    ):
        derive(config_with(*parallel, "training.global_batch_size=6"), 2)
    assert derive(config_with(parallel[0], "training.global_batch_size=6"), 2).num_microbatches == 3


def test_validation_has_batches_of_its_own():
    sizes = ["training.eval_micro_batch_size=4", "training.eval_global_batch_size=24", "training.global_batch_size=8"]
    derived = derive(config_with(*sizes, "training.eval_interval=5"), 2)
    assert (derived.eval_micro_batch_size, derived.eval_global_batch_size) == (4, 24)
    with pytest.raises(ConfigError, match="eval_global_batch_size is 24, not a multiple of .* 4 x .*size 4 = 16"):
        derive(config_with(*sizes, "training.eval_interval=5"), 4)
    assert derive(config_with(*sizes), 4), "without validations their batches do not matter"


def test_schedule_in_iterations_is_counted_in_samples():
    schedule = derive(
        config_with(
            "training.global_batch_size=8",
            "optimizer.lr_warmup_iters=10",
            "optimizer.lr_decay_iters=80",
            "optimizer.lr_decay_style=WSD",
            "optimizer.lr_wsd_decay_iters=20",
        ),
        2,
    ).schedule
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wsd_decay_steps) == (80, 640, 160)
    assert schedule.wd_incr_steps == 800


def test_schedule_in_samples_is_kept():
    config = config_with(
        *SAMPLES,
        "training.global_batch_size=8",
        "optimizer.lr_warmup_samples=10",
        "optimizer.lr_decay_samples=80",
        "optimizer.lr_decay_style=WSD",
        "optimizer.lr_wsd_decay_samples=20",
    )
    schedule = schedule_in_samples(config, constant(8))
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wsd_decay_steps) == (10, 80, 20)
    assert schedule.wd_incr_steps == 1000


def test_schedule_defaults_to_the_length_of_the_run():
    assert schedule_in_samples(config_with(), constant(8)).lr_decay_steps == 800
    schedule = schedule_in_samples(config_with(*SAMPLES), constant(8))
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wsd_decay_steps) == (0, 1000, None)


def test_warmup_fraction_is_part_of_the_decay_length_and_not_rounded():
    config = config_with("optimizer.lr_warmup_fraction=0.015", "optimizer.lr_decay_iters=50")
    assert schedule_in_samples(config, constant(3)).lr_warmup_steps == 0.015 * 150


def test_weight_decay_range_takes_the_place_of_the_constant():
    schedule = schedule_in_samples(config_with("optimizer.weight_decay=0.3"), constant(1))
    assert (schedule.start_wd, schedule.end_wd) == (0.3, 0.3)
    overrides = ["start_weight_decay=0", "end_weight_decay=0.2", "weight_decay_incr_style=cosine"]
    schedule = schedule_in_samples(config_with(*(f"optimizer.{text}" for text in overrides)), constant(1))
    assert (schedule.start_wd, schedule.end_wd) == (0.0, 0.2)
