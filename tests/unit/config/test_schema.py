from __future__ import annotations

import dataclasses

import pytest

from megalite.config.checks import SettingError
from megalite.config.convert import convert
from megalite.config.names import field_types, section_classes
from megalite.config.schema import CheckpointConfig, DataConfig, LoggingConfig, TrainingConfig
from megalite.config.yaml_reader import PlainText, Setting
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import MINIMAL, config_with

ACCEPTED = [
    ["parallel.sequence_parallel=on"],
    [
        "checkpoint.dist_ckpt_optim_fully_reshardable=off",
        "checkpoint.ckpt_fully_parallel_save=off",
        "checkpoint.ckpt_fully_parallel_save_process_group=ep_dp",
        "checkpoint.ckpt_fully_parallel_load=on",
        "checkpoint.ckpt_fully_parallel_load_process_group=ep_dp",
        "checkpoint.ckpt_fully_parallel_load_exchange_algo=gather_rounds",
        "checkpoint.ckpt_load_validate_sharding_integrity=off",
        "checkpoint.ckpt_assume_constant_structure=on",
        "checkpoint.dist_ckpt_workers=2",
        "checkpoint.dist_ckpt_strictness=log_all",
        "checkpoint.verify_integrity=sha256",
        "checkpoint.async_save=true",
        "checkpoint.async_save_on_busy=skip",
        "checkpoint.async_save_on_failure=continue",
        "checkpoint.ckpt_load_require_integrity=off",
    ],
    ["parallel.num_virtual_stages_per_pipeline_rank=2"],
    ["parallel.num_virtual_stages_per_pipeline_rank=2", "parallel.pipeline_model_parallel_size=2"],
    ["parallel.num_layers_per_virtual_pipeline_stage=1", "parallel.pipeline_model_parallel_size=2"],
    [
        "parallel.pipeline_model_parallel_size=2",
        "parallel.decoder_first_pipeline_num_layers=1",
        "parallel.decoder_last_pipeline_num_layers=3",
    ],
    [
        "model.num_layers=6",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.account_for_embedding_in_pipeline_split=on",
        "parallel.account_for_loss_in_pipeline_split=on",
    ],
    ["model.group_query_attention=on", "model.num_query_groups=2"],
    ["model.position_embedding_type=rope", "model.rotary_base=5e5", "model.rotary_percent=0.5"],
    ["model.position_embedding_type=none", "model.normalization=RMSNorm", "model.swiglu=on"],
    ["model.add_bias_linear=off", "model.add_qkv_bias=on", "model.qk_layernorm=on"],
    ["model.untie_embeddings_and_output_weights=on"],
    ["precision.fp16=on", "precision.loss_scale=1024"],
    [
        "precision.fp16=on",
        "precision.initial_loss_scale=65536",
        "precision.min_loss_scale=0.5",
        "precision.loss_scale_window=50",
        "precision.hysteresis=1",
    ],
    ["precision.bf16=on", "precision.grad_reduce_in_bf16=on"],
    ["training.recompute_granularity=selective"],
    *(
        [
            "training.recompute_granularity=full",
            f"training.recompute_method={method}",
            "training.recompute_num_layers=2",
        ]
        for method in ("uniform", "block")
    ),
    ["training.global_batch_size=8", "training.rampup_batch_size=2,2,100"],
    ["training.step_batch_size_schedule=0:4 6K:8", "training.iterations_to_skip=3,5"],
    ["training.eval_micro_batch_size=1", "training.eval_global_batch_size=16"],
    ["parallel.overlap_param_gather=on", "parallel.overlap_grad_reduce=on"],
    ["precision.bf16=on", "precision.accumulate_allreduce_grads_in_fp32=off"],
    ["model.num_attention_heads=5", "model.kv_channels=8", "model.ffn_hidden_size=100"],
    ["model.max_position_embeddings=64"],
    ["model.init_method_std=0.01", "model.norm_epsilon=1e-6"],
    ["model.vocab_size=300", "data.tokenizer_type=NullTokenizer"],
    ["training.eval_interval=10", "training.eval_iters=0"],
    ["training.exit_interval=7", "training.exit_signal_handler=off", "training.exit_signal=SIGUSR2"],
    ["optimizer.optimizer=adam", "optimizer.clip_grad=0", "optimizer.lr=0"],
    ["optimizer.start_weight_decay=0.1", "optimizer.end_weight_decay=0.1"],
    ["data.mock_data=no", "data.data_path=a", "data.mmap_bin_files=no", "data.num_workers=3", "data.split=1"],
    ["data.eod_mask_loss=on", "data.data_cache_path=cache"],
    ["data.reset_position_ids=on", "data.reset_attention_mask=on"],
    ["data.mock_data=no", "data.data_path=a,b", "data.mid_level_dataset_surplus=0"],
    ["data.mock_data=no", "data.data_path=0.3,a,0.7,b"],
    ["data.mock_data=no", "data.data_args_path=list.txt", "data.split=1,1"],
    [
        "data.mock_data=no",
        "data.train_data_path=1,a,2,b",
        "data.valid_data_path=c,d",
        "data.test_data_path=e",
        "data.multiple_validation_sets=on",
    ],
    ["data.mock_data=no", "data.per_split_data_args_path=sets.json", "data.multiple_validation_sets=on"],
    ["data.tokenizer_type=HFTokenizer", "data.tokenizer_model=tokenizer.json", "data.tokenizer_eod=</s>"],
    ["data.tokenizer_type=SentencePieceTokenizer", "data.tokenizer_model=a.model"],
    ["checkpoint.save=a", "checkpoint.save_interval=5", "checkpoint.ckpt_format=torch_dist"],
    ["checkpoint.load=a", "checkpoint.pretrained_checkpoint=b", "checkpoint.finetune=on", "checkpoint.ckpt_step=2"],
    ["checkpoint.no_save_optim=on", "checkpoint.no_save_rng=on", "checkpoint.log_state_hash=on"],
    ["checkpoint.load=a", "checkpoint.no_load_optim=on", "checkpoint.no_load_rng=on"],
    ["checkpoint.load=a", "checkpoint.no_load_optim=on", "checkpoint.load_main_params_from_ckpt=on"],
    ["checkpoint.load=a", "checkpoint.ckpt_step=0", "checkpoint.use_checkpoint_args=on"],
    ["checkpoint.pretrained_checkpoint=a", "checkpoint.use_checkpoint_args=on"],
    ["checkpoint.save=a", "checkpoint.fallback=newest_complete"],
    ["checkpoint.save=a", "checkpoint.load=a"],
    ["checkpoint.exit_on_missing_checkpoint=off", "rng.data_parallel_random_init=on"],
    ["logging.log_level=DEBUG", "logging.metrics_jsonl=off", "logging.tensorboard_dir=tb"],
    ["resilience.check_for_nan_in_loss_and_grad=off"],
    ["profiling.profile=on", "profiling.profile_dir=p", "profiling.profile_ranks=0,900"],
    ["model.hidden_dropout=0", "model.attention_dropout=0.2", "model.make_vocab_size_divisible_by=1"],
    [
        "parallel.context_parallel_size=1",
        "parallel.expert_model_parallel_size=1",
        "parallel.use_distributed_optimizer=off",
    ],
    ["parallel.tensor_model_parallel_size=2", "parallel.ddp_bucket_size=9", "parallel.distributed_timeout_minutes=0.5"],
    ["precision.float64=on"],
    ["training.global_batch_size=4", "training.seed=1", "training.exit_duration_in_mins=0.5"],
    [
        "training.train_iters=null",
        "training.train_samples=100",
        "optimizer.lr_decay_samples=9",
        "optimizer.lr_warmup_samples=8",
    ],
    [
        "optimizer.min_lr=1e-3",
        "optimizer.lr_warmup_init=1e-3",
        "optimizer.lr_warmup_iters=9",
        "optimizer.lr_decay_iters=10",
    ],
    ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=9", "optimizer.lr_wsd_decay_style=cosine"],
    [
        "training.train_samples=9",
        "training.train_iters=null",
        "optimizer.lr_decay_style=WSD",
        "optimizer.lr_wsd_decay_samples=9",
    ],
    ["optimizer.lr_warmup_fraction=0", "optimizer.lr_decay_style=inverse-square-root", "optimizer.weight_decay=0"],
    ["optimizer.start_weight_decay=0", "optimizer.end_weight_decay=1", "optimizer.weight_decay_incr_style=linear"],
    ["optimizer.adam_beta1=0", "optimizer.adam_beta2=0.95", "optimizer.adam_eps=1e-5"],
    ["optimizer.override_opt_param_scheduler=on", "optimizer.use_checkpoint_opt_param_scheduler=off"],
    ["optimizer.use_checkpoint_opt_param_scheduler=on"],
    ["training.calculate_per_token_loss=on"],
    ["logging.log_throughput=on", "logging.timing_log_level=2"],
    ["logging.log_interval=1", "profiling.profile_step_start=0", "profiling.profile_step_end=1"],
]


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"model.{key}=0"] for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")),
        *([f"model.{key}=0"] for key in ("ffn_hidden_size", "kv_channels", "vocab_size", "max_position_embeddings")),
        ["model.make_vocab_size_divisible_by=0"],
        ["model.hidden_dropout=1"],
        ["model.attention_dropout=-0.1"],
        ["model.init_method_std=0"],
        ["model.norm_epsilon=0"],
        ["model.num_attention_heads=5"],
        ["model.max_position_embeddings=31"],
        *([f"parallel.{size}_model_parallel_size=0"] for size in ("tensor", "pipeline", "expert")),
        ["parallel.num_layers_per_virtual_pipeline_stage=0"],
        ["parallel.num_virtual_stages_per_pipeline_rank=0"],
        ["parallel.num_virtual_stages_per_pipeline_rank=2", "parallel.num_layers_per_virtual_pipeline_stage=1"],
        *([f"parallel.decoder_{end}_pipeline_num_layers=0"] for end in ("first", "last")),
        *(
            [f"parallel.decoder_{end}_pipeline_num_layers=1", f"parallel.account_for_{what}_in_pipeline_split=on"]
            for end in ("first", "last")
            for what in ("embedding", "loss")
        ),
        ["parallel.decoder_first_pipeline_num_layers=2", "parallel.num_layers_per_virtual_pipeline_stage=1"],
        ["parallel.num_layers_per_virtual_pipeline_stage=1", "parallel.decoder_last_pipeline_num_layers=2"],
        ["model.group_query_attention=on"],
        ["model.num_query_groups=2"],
        ["model.group_query_attention=on", "model.num_query_groups=0"],
        ["model.group_query_attention=on", "model.num_query_groups=3"],
        ["model.rotary_base=0"],
        *([f"model.rotary_percent={part}"] for part in ("0", "1.1")),
        # Of 16 components 1 and 7, which are no pairs, and 0.
        *(["model.position_embedding_type=rope", f"model.rotary_percent={part}"] for part in ("0.1", "0.45", "0.01")),
        ["model.position_embedding_type=rope", "model.kv_channels=5"],
        ["parallel.context_parallel_size=2"],
        ["parallel.expert_model_parallel_size=2"],
        ["parallel.overlap_param_gather=on"],
        [
            "parallel.overlap_param_gather=on",
            "parallel.overlap_grad_reduce=on",
            "parallel.use_distributed_optimizer=off",
        ],
        ["parallel.ddp_bucket_size=0"],
        ["parallel.distributed_timeout_minutes=0"],
        ["precision.bf16=on", "precision.float64=on"],
        ["precision.float64=on", "precision.accumulate_allreduce_grads_in_fp32=on"],
        ["precision.fp16=on", "precision.bf16=on"],
        ["precision.fp16=on", "precision.float64=on"],
        ["precision.loss_scale=8"],
        ["precision.fp16=on", "precision.loss_scale=0"],
        *([f"precision.{key}=0"] for key in ("min_loss_scale", "loss_scale_window", "hysteresis")),
        ["precision.min_loss_scale=4", "precision.initial_loss_scale=2"],
        ["precision.grad_reduce_in_bf16=on"],
        ["precision.fp16=on", "precision.grad_reduce_in_bf16=on"],
        [
            "precision.bf16=on",
            "precision.accumulate_allreduce_grads_in_fp32=on",
            "precision.grad_reduce_in_bf16=on",
        ],
        ["training.recompute_granularity=selective", "training.recompute_num_layers=1"],
        ["training.recompute_granularity=selective", "training.recompute_method=block"],
        ["training.recompute_num_layers=1", "training.recompute_granularity=full"],
        ["training.recompute_method=uniform", "training.recompute_granularity=full"],
        ["training.recompute_granularity=full", "training.recompute_method=block", "training.recompute_num_layers=0"],
        ["training.rampup_batch_size=2,2,100"],
        *(["training.global_batch_size=8", f"training.rampup_batch_size={ramp}"] for ramp in ("2,2", "0,2,9")),
        ["training.global_batch_size=8", "training.step_batch_size_schedule=0:4"],
        ["training.iterations_to_skip=0"],
        *([f"training.eval_{kind}_batch_size=0"] for kind in ("micro", "global")),
        ["training.micro_batch_size=0"],
        ["training.global_batch_size=0"],
        ["training.train_iters=0"],
        ["training.train_iters=null"],
        ["training.train_samples=100"],
        ["training.train_iters=null", "training.train_samples=0"],
        ["training.seed=0"],
        ["training.eval_interval=0"],
        ["training.eval_iters=-1"],
        ["training.exit_interval=0"],
        ["training.exit_duration_in_mins=0"],
        *([f"training.exit_signal={name}"] for name in ("SIGKILL", "SIGSTOP", "SIGSEGV", "TERM", "15", "sigterm")),
        ["optimizer.lr=-1"],
        ["optimizer.min_lr=1"],
        ["optimizer.lr_warmup_init=1"],
        *([f"optimizer.{key}=-1"] for key in ("lr_warmup_iters", "lr_warmup_samples", "weight_decay", "clip_grad")),
        *([f"optimizer.lr_decay_{unit}=0"] for unit in ("iters", "samples")),
        ["optimizer.lr_decay_iters=9", "optimizer.lr_decay_samples=9"],
        ["optimizer.lr_warmup_fraction=1"],
        ["optimizer.lr_warmup_fraction=0.1", "optimizer.lr_warmup_iters=9"],
        ["optimizer.lr_wsd_decay_iters=9"],
        ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=9", "optimizer.lr_wsd_decay_samples=9"],
        ["optimizer.start_weight_decay=0.1"],
        ["optimizer.start_weight_decay=0.1", "optimizer.end_weight_decay=0.2"],
        ["optimizer.weight_decay_incr_style=linear"],
        ["optimizer.override_opt_param_scheduler=on", "optimizer.use_checkpoint_opt_param_scheduler=on"],
        *([f"optimizer.adam_{key}"] for key in ("beta1=1", "beta2=-0.1", "eps=0")),
        ["data.mock_data=no"],
        ["data.data_path=a"],
        ["data.mock_data=no", "data.data_path=[]"],
        ["data.mock_data=no", "data.data_path=1,a,b,c"],
        ["data.mock_data=no", "data.data_path=1,a,0,c"],
        *([f"data.{name}_data_path=a"] for name in ("train", "valid", "test")),
        *(["data.mock_data=no", f"data.{name}_data_path=a"] for name in ("valid", "test")),
        *(["data.mock_data=no", "data.data_path=a", f"data.{name}_args_path=f"] for name in ("data", "per_split_data")),
        ["data.mock_data=no", "data.per_split_data_args_path=f", "data.train_data_path=a"],
        ["data.mock_data=no", "data.train_data_path=a", "data.split=1"],
        ["data.mock_data=no", "data.per_split_data_args_path=f", "data.split=1"],
        ["data.multiple_validation_sets=on"],
        ["data.mock_data=no", "data.data_path=a", "data.multiple_validation_sets=on"],
        ["data.mid_level_dataset_surplus=-0.1"],
        *([f"data.tokenizer_type={name}"] for name in ("HFTokenizer", "SentencePieceTokenizer")),
        *([f"data.{name}=x"] for name in ("tokenizer_model", "tokenizer_eod")),
        ["data.num_workers=-1"],
        *([f"data.split={text}"] for text in ("0,0,0", "1,2,3,4", "-1,2", "a", "1;2", "0,1", "1,,2", "1e3,1,1")),
        ["checkpoint.save_interval=5"],
        ["checkpoint.save=a", "checkpoint.save_interval=0"],
        ["checkpoint.ckpt_step=5"],
        ["checkpoint.load=a", "checkpoint.ckpt_step=-1"],
        *([f"checkpoint.{key}=on"] for key in ("finetune", "no_load_optim", "no_load_rng", "use_checkpoint_args")),
        ["checkpoint.load=a", "checkpoint.load_main_params_from_ckpt=on"],
        ["checkpoint.load=a", "checkpoint.exit_on_missing_checkpoint=off", "checkpoint.use_checkpoint_args=on"],
        ["checkpoint.fallback=newest_complete"],
        *(
            ["checkpoint.save=a", "checkpoint.load=b/../a", f"checkpoint.{setting}"]
            for setting in ("ckpt_step=0", "finetune=on", "no_load_optim=on", "no_load_rng=on")
        ),
        ["checkpoint.save=a", "checkpoint.pretrained_checkpoint=./a"],
        ["logging.log_interval=0"],
        *([f"logging.timing_log_level={level}"] for level in (-1, 3)),
        ["profiling.profile=on"],
        ["profiling.profile_step_start=-1"],
        ["profiling.profile_step_end=10"],
        ["profiling.profile_ranks=-1"],
        ["profiling.profile_ranks=[]"],
    ],
    ids=" ".join,
)
def test_value_out_of_range_or_in_contradiction_is_refused(overrides):
    with pytest.raises(ConfigError) as caught:
        config_with(*overrides)
    # The last override of a case is the one at fault. What to do follows after a semicolon.
    assert overrides[-1].partition("=")[0].partition(".")[2] in str(caught.value)
    assert ";" in str(caught.value)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_setting_is_accepted_and_kept(overrides):
    config = config_with(*overrides)
    for override in overrides:
        name, _, text = override.partition("=")
        section, _, key = name.partition(".")
        expected = convert(Setting(PlainText(text), "here"), field_types(section)[key], name)
        assert getattr(getattr(config, section), key) == expected


def test_every_option_is_set_by_a_test():
    names = {override.partition("=")[0] for overrides in ACCEPTED for override in overrides}
    assert names | set(MINIMAL) == {f"{section}.{key}" for section in section_classes() for key in field_types(section)}


def test_sections_are_frozen_and_take_keywords_only():
    for cls in section_classes().values():
        assert cls.__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(cls))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_with().training.seed = 3


def test_no_key_is_in_two_sections():
    keys = [key for section in section_classes() for key in field_types(section)]
    assert len(keys) == len(set(keys))


def test_section_made_in_python_checks_itself_and_names_its_keys():
    with pytest.raises(SettingError) as caught:
        CheckpointConfig(save_interval=5)
    assert caught.value.keys == ("checkpoint.save_interval", "checkpoint.save")
    with pytest.raises(ConfigError, match="logging.log_interval is 0, but must be at least 1"):
        LoggingConfig(log_interval=0)


def test_missing_length_of_the_run_is_explained():
    with pytest.raises(ConfigError, match="both left out, but the run needs a length; set one of"):
        TrainingConfig(micro_batch_size=1)


@pytest.mark.parametrize(
    ("split", "weights"),
    [
        (None, (969, 30, 1)),
        ("969,30,1", (969, 30, 1)),
        ("969, 30, 1", (969, 30, 1)),
        ("1", (1, 0, 0)),
        (".9,.1", (0.9, 0.1, 0)),
    ],
)
def test_split_is_filled_up_with_zeros(split, weights):
    assert DataConfig(mock_data=True, split=split).split_weights() == weights
