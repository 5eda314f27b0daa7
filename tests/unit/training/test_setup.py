from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.optimizer.distrib_optimizer import DistributedOptimizer
from megalite.optimizer.optimizer import MixedPrecisionOptimizer
from megalite.training.setup import schedule_config, training_run
from megalite.utils.errors import CheckpointError, ConfigError
from tests.unit.samples import only_model, small_config, train_state


def test_the_model_is_that_of_the_configuration() -> None:
    shape = {"model": {"kv_channels": 12, "ffn_hidden_size": 40, "init_method_std": 0.3, "norm_epsilon": 1e-3}}
    config = only_model(train_state(small_config(shape))).config
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.kv_channels) == (2, 16, 40, 12)
    assert (config.vocab_size, config.padded_vocab_size) == (20, 24)
    assert (config.init_method_std, config.norm_epsilon, config.max_position_embeddings) == (0.3, 1e-3, 8)


@pytest.mark.parametrize(
    ("precision", "values", "gradients"),
    [
        ({}, torch.float32, torch.float32),
        ({"bf16": True}, torch.bfloat16, torch.float32),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, torch.bfloat16, torch.bfloat16),
        ({"float64": True}, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_number_formats(precision: dict[str, bool], values: torch.dtype, gradients: torch.dtype) -> None:
    (chunk,) = train_state(small_config({"precision": precision})).chunks
    (buffer,) = chunk.buffers
    assert (buffer.values.dtype, buffer.gradients.dtype) == (values, gradients)


@pytest.mark.parametrize(("is_distributed", "kind"), [(True, DistributedOptimizer), (False, MixedPrecisionOptimizer)])
def test_kind_of_optimizer(is_distributed: bool, kind: type) -> None:
    state = train_state(small_config({"parallel": {"use_distributed_optimizer": is_distributed}}))
    assert type(state.optimizer) is kind
    assert [chunk.gather_gradients for chunk in state.chunks] == [not is_distributed]


def test_the_schedule_is_counted_in_samples() -> None:
    optimizer = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-4, "lr_warmup_init": 1e-5}
    config = small_config({"optimizer": optimizer, "training": {"global_batch_size": 8, "train_iters": 10}})
    schedule = schedule_config(config, derive(config, 1))
    assert (schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wd_incr_steps) == (16, 80, 80)
    assert (schedule.max_lr, schedule.min_lr, schedule.lr_warmup_init) == (2e-3, 1e-4, 1e-5)
    assert (schedule.lr_decay_style, schedule.start_wd, schedule.end_wd) == ("cosine", 0.1, 0.1)


def test_weight_decay_is_on_for_matrices_only_from_the_first_step() -> None:
    groups = train_state(small_config()).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_run_takes_down_what_it_set_up() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    config = small_config({"training": {"exit_signal": "SIGUSR2"}})
    with pytest.raises(RuntimeError, match="inside"), training_run(config):
        assert signal.getsignal(signal.SIGUSR2) != before
        raise RuntimeError("inside")
    assert signal.getsignal(signal.SIGUSR2) == before


def test_the_vocabulary_must_hold_the_tokenizers_ids() -> None:
    config = small_config({"data": {"tokenizer_type": "ByteTokenizer"}, "model": {"vocab_size": 20}})
    with pytest.raises(ConfigError, match="model.vocab_size is 20, fewer than the 257 ids"), training_run(config):
        pass


def test_a_run_that_cannot_start_says_so_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr("megalite.training.setup.build_state", fail)
    config = small_config({"checkpoint": {"load": str(tmp_path / "missing")}})
    with pytest.raises(CheckpointError, match="no checkpoint in"), training_run(config):
        pass


def test_metrics_are_appended_beside_the_checkpoints(tmp_path: Path) -> None:
    with training_run(small_config({"checkpoint": {"save": str(tmp_path / "run")}})) as ctx:
        assert len(ctx.reporter.sinks) == 1
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    off = {"checkpoint": {"save": str(tmp_path / "off")}, "logging": {"metrics_jsonl": False}}
    with training_run(small_config(off)) as ctx:
        assert ctx.reporter.sinks == []


def test_a_run_that_saves_nothing_warns(
    megalite_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.training.setup.setup_logging", lambda *args: None)
    with training_run(small_config()):
        pass
    assert "checkpoint.save is not set: nothing is saved" in megalite_log.text
