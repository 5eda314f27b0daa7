"""``checkpoint.use_checkpoint_args``: what a checkpoint says of its model, and the configuration that it completes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.model_args import model_settings
from megalite.checkpoint.state import common_state
from megalite.config.loader import UnresolvedConfig, config_from_dict, config_to_dict, load_config
from megalite.config.schema import Config
from megalite.dist_checkpointing.serialization import load_common_state_dict
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.errors import CheckpointError, ConfigError
from tests.helpers.fixtures import checkpoint_of, megatron_fixture
from tests.unit.samples import small_config, train_state

SHAPE = {
    "num_layers": (4,),
    "hidden_size": (64,),
    "num_attention_heads": (4,),
    "kv_channels": (16,),
    "seq_length": (64,),
    "max_position_embeddings": (64,),
    "vocab_size": (256, 257, 256),
    "make_vocab_size_divisible_by": (1,),
    "norm_epsilon": (1e-5,),
    "rotary_base": (10000,),
    "rotary_percent": (1.0,),
    "add_qkv_bias": (False,),
}
FACES = {
    "gpt2_tp2pp2": {
        "ffn_hidden_size": (128,),
        "group_query_attention": (False,),
        "position_embedding_type": ("learned_absolute",),
        "normalization": ("LayerNorm",),
        "swiglu": (False,),
        "add_bias_linear": (True,),
        "untie_embeddings_and_output_weights": (False,),
    },
    "llama_tp2pp2": {
        "ffn_hidden_size": (96,),
        "group_query_attention": (True,),
        "num_query_groups": (2,),
        "position_embedding_type": ("rope",),
        "normalization": ("RMSNorm",),
        "swiglu": (True,),
        "add_bias_linear": (False,),
        "untie_embeddings_and_output_weights": (True,),
    },
}


@pytest.mark.parametrize("fixture", FACES)
def test_settings_of_a_checkpoint_of_megatron(fixture: str) -> None:
    common = load_common_state_dict(checkpoint_of(megatron_fixture(fixture)))
    assert model_settings(common) == SHAPE | FACES[fixture]


def test_what_megatron_does_not_say_is_left_out() -> None:
    args = argparse.Namespace(num_layers=4, layernorm_epsilon=1e-6, ffn_hidden_size=None, num_query_groups=1)
    assert model_settings({"args": args}) == {"num_layers": (4,), "norm_epsilon": (1e-6,)}
    args = argparse.Namespace(padded_vocab_size=512)
    assert model_settings({"args": args}) == {"vocab_size": (512,)}


GROUPED = {"model": {"group_query_attention": True, "num_query_groups": 1, "hidden_dropout": 0.3}}


@pytest.mark.parametrize("change", [{}, GROUPED], ids=["gpt2", "grouped"])
def test_own_settings_are_taken_as_they_were_written(change: dict[str, Any]) -> None:
    config = small_config(change)
    settings = model_settings(common_state(train_state(config)))
    written = config_to_dict(config)["model"]
    assert {key: values[0] for key, values in settings.items()} == {
        key: value for key, value in written.items() if key in settings
    }
    # Nothing else is needed to build the same model.
    assert set(written) - set(settings) <= {"num_query_groups"}
    # The number that follows says the same as what was left out.
    assert settings["kv_channels"] == (None, 8) and settings["vocab_size"] == (20, 20)


def _unresolved(*changes: dict[str, dict[str, Any]], model: dict[str, Any] | None = None, load: str = "x") -> Any:
    values = config_to_dict(small_config({"checkpoint": {"load": load, "use_checkpoint_args": False}}, *changes))
    values["checkpoint"]["use_checkpoint_args"] = True
    return config_from_dict(values | {"model": model or {}}, "test")


KNOWN = {"num_layers": (2,), "hidden_size": (16,), "num_attention_heads": (2,), "seq_length": (8,)}
KNOWN |= {
    "ffn_hidden_size": (24,),
    "kv_channels": (None, 8),
    "vocab_size": (20,),
    "swiglu": (True,),
    "rotary_base": (10000,),
}


def test_what_is_left_out_is_taken() -> None:
    config = _unresolved(model={"hidden_dropout": 0.0, "kv_channels": None}).resolve(KNOWN, "the checkpoint x")
    assert isinstance(config, Config)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.swiglu, model.kv_channels) == (2, 16, True, None)
    # What the checkpoint does not say keeps its default, and what the user says is kept.
    assert (model.normalization, model.hidden_dropout) == ("LayerNorm", 0.0)
    assert isinstance(model.rotary_base, float)
    # The dump has the resolved values, and reads back to the same.
    assert config_to_dict(config)["model"]["num_layers"] == 2
    again = config_from_dict(config_to_dict(config), "dump")
    assert isinstance(again, UnresolvedConfig) and again.resolve(KNOWN, "x") == config


@pytest.mark.parametrize("value", [8, None])
def test_a_given_value_may_be_the_checkpoints(value: int | None) -> None:
    config = _unresolved(model={"num_layers": 2, "kv_channels": value, "swiglu": True}).resolve(KNOWN, "x")
    assert config.model.kv_channels == value


def test_given_values_that_contradict_are_refused_with_both(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model:\n  num_layers: 3\n  seq_length: 8\ntraining: {micro_batch_size: 1, train_iters: 5}\n"
        "optimizer: {lr: 1e-3}\ndata: {mock_data: true}\ncheckpoint: {load: x, use_checkpoint_args: true}\n"
    )
    config = load_config(path, ["--model.swiglu=false"])
    with pytest.raises(ConfigError) as caught:
        config.resolve(KNOWN, "the checkpoint x")
    assert str(caught.value).startswith(
        f"{path}:2: model.num_layers is 3, in the checkpoint x it is 2; command line: model.swiglu is False, in the "
        "checkpoint x it is True. With checkpoint.use_checkpoint_args the model is the checkpoint's: leave these out"
    )


def test_what_neither_says_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"model.seq_length is not given and without a default"):
        _unresolved().resolve({key: value for key, value in KNOWN.items() if key != "seq_length"}, "x")


def test_a_model_that_is_not_built_here_is_refused_by_name() -> None:
    known = KNOWN | {"position_embedding_type": ("yarn",)}
    with pytest.raises(ConfigError, match="the checkpoint x: model.position_embedding_type is 'yarn', but must be one"):
        _unresolved().resolve(known, "the checkpoint x")


def test_other_sections_are_checked_before_there_is_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        config_from_dict(
            config_to_dict(small_config())
            | {"checkpoint": {"load": "x", "use_checkpoint_args": True}}
            | {"training": {"micro_batch_size": 0, "train_iters": 1}, "model": {}}
        )
    with pytest.raises(ConfigError, match="model.num_layers is 'four'"):
        _unresolved(model={"num_layers": "four"})


# Runs


def _saved(folder: Path, *changes: dict[str, dict[str, Any]]) -> Path:
    config = small_config({"training": {"train_iters": 2}, "checkpoint": {"save": str(folder)}}, *changes)
    with training_run(config) as ctx:
        train(ctx)
    return folder


def test_a_run_takes_its_model_from_the_checkpoint_and_saves_what_it_took(
    tmp_path: Path, megalite_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.training.setup.setup_logging", lambda *args: None)
    first = _saved(tmp_path / "first", GROUPED, {"model": {"norm_epsilon": 1e-3}})
    save = {"checkpoint": {"save": str(tmp_path / "second")}, "training": {"train_iters": 4}}
    config = _unresolved(save, load=str(first))
    megalite_log.clear()
    with training_run(config) as ctx:
        assert (ctx.config.model.num_query_groups, ctx.config.model.norm_epsilon) == (1, 1e-3)
        assert ctx.progress.iteration == 2
        train(ctx)
    assert "other settings" not in megalite_log.text
    dumped = (tmp_path / "second" / "iter_0000004" / "config.yaml").read_text()
    assert "num_query_groups: 1" in dumped and "norm_epsilon: 0.001" in dumped
    # The same command again takes it from its own folder.
    with training_run(config) as ctx:
        assert (ctx.progress.iteration, ctx.config.model.num_query_groups) == (4, 1)


def test_a_run_takes_its_model_from_a_checkpoint_of_megatron() -> None:
    folder = checkpoint_of(megatron_fixture("llama_tp2pp2")).parent
    config = _unresolved({"checkpoint": {"finetune": True}}, load=str(folder))
    with training_run(config) as ctx:
        model = ctx.config.model
        assert (model.num_layers, model.ffn_hidden_size, model.num_query_groups) == (4, 96, 2)
        assert (model.normalization, model.swiglu, model.vocab_size) == ("RMSNorm", True, 256)
        assert ctx.state.optimizer.pieces[0].values.any()


def test_a_contradiction_is_found_at_the_start(tmp_path: Path) -> None:
    first = _saved(tmp_path / "first")
    with (
        pytest.raises(ConfigError, match="model.hidden_size is 32, in the checkpoint .*iter_0000002 it is 16"),
        training_run(_unresolved(model={"hidden_size": 32}, load=str(first))),
    ):
        pass


def test_without_a_checkpoint_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"), training_run(_unresolved(load=str(tmp_path))):
        pass
