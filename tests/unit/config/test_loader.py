from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.loader import config_from_dict, config_to_dict, dump_config, load_config
from megalite.config.schema import Config
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import MINIMAL_YAML, config_with, written


def message_of(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The error for a file with this text, without the folder in front."""
    path = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_file_gives_values_and_defaults(tmp_path):
    config = load_config(written(tmp_path, MINIMAL_YAML), [])
    assert config.model.num_layers == 4
    assert config.optimizer.lr == 1e-3
    assert config.training.seed == 1234
    assert config.checkpoint.save is None


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path):
    path = written(tmp_path, MINIMAL_YAML)
    config = load_config(path, ["--model.num_layers=8", "training.seed=1", "--training.seed=7"])
    assert (config.model.num_layers, config.training.seed) == (8, 7)


def test_override_can_take_a_setting_of_the_file_away(tmp_path):
    path = written(tmp_path, MINIMAL_YAML + "checkpoint: {save: runs/a, save_interval: 5}\n")
    config = load_config(path, ["--checkpoint.save=null", "--checkpoint.save_interval="])
    assert config.checkpoint.save is None
    assert config.checkpoint.save_interval is None


def test_override_value_may_contain_equals_signs_and_dots():
    assert config_with("checkpoint.save=runs/lr=0.1.x").checkpoint.save == Path("runs/lr=0.1.x")


@pytest.mark.parametrize("text", ["rng:\n", "rng: ~\n", "rng: {}\n"])
def test_section_without_settings_has_its_defaults(tmp_path, text):
    assert load_config(written(tmp_path, MINIMAL_YAML + text), []).rng == config_with().rng


def test_byte_order_mark_is_ignored(tmp_path):
    assert load_config(written(tmp_path, b"\xef\xbb\xbf" + MINIMAL_YAML.encode()), []) == config_with()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modle: {}\n", "run.yaml:1: unknown section 'modle' (did you mean 'model'?)"),
        ("x1: {}\n", "run.yaml:1: unknown section 'x1' (the sections are model, parallel,"),
        ("# c\nseed: 3\n", "run.yaml:2: unknown section 'seed' ('seed' belongs in section 'training')"),
        ("model.num_layers: 3\n", "(write 'num_layers' inside section 'model')"),
        (
            "checkpoint:\n  save_intervall: 5\n",
            "run.yaml:2: unknown key 'checkpoint.save_intervall' (did you mean 'save_interval'?)",
        ),
        ("model:\n  num-layers: 5\n", "unknown key 'model.num-layers' (did you mean 'num_layers'?)"),
        ("optimizer:\n  seed: 5\n", "unknown key 'optimizer.seed' ('seed' belongs in section 'training')"),
        ("rng:\n  micro_batch_siz: 5\n", "(did you mean 'training.micro_batch_size'?)"),
        ("rng:\n  zzz: 5\n", "unknown key 'rng.zzz' (--help rng lists the keys of this section)"),
        ("rng:\n  a:\n    b: 1\n", "run.yaml:2: unknown key 'rng.a'"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_right_one(tmp_path, text, expected):
    """CFG-12."""
    assert expected in message_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: the file has no settings"),
        ("# only a comment\n", "run.yaml: the file has no settings"),
        ("just text\n", "run.yaml:1: the file is the value 'just text', but must be a mapping"),
        ("- model\n", "run.yaml:1: the file is a list, but must be a mapping"),
        ("model: 3\n", "run.yaml:1: section 'model' is the value '3', but must be a mapping"),
        ("model: [3]\n", "run.yaml:1: section 'model' is a list, but must be a mapping"),
        ("model:\n\tnum_layers: 1\n", "run.yaml:2: not valid YAML"),
        ("model: {num_layers: 1\n", "not valid YAML"),
        ("model:\n  num_layers: 'x\n", "not valid YAML"),
        ("model: " + "[" * 3000, "nested too deep"),
        ("model:\n  num_layers: \x07\n", "not valid YAML (character #x0007"),
        ("model:\n  num_layers: !!int 1\n", "run.yaml:2: this file uses a type tag"),
        ("model: !!python/object/apply:os.system [ls]\n", "run.yaml:1: this file uses a type tag"),
        ("model: &a {}\n", "run.yaml:1: this file uses an anchor"),
        ("model: *a\n", "run.yaml:1: this file uses an alias"),
        ("model:\n  <<: {num_layers: 1}\n", "run.yaml:2: this file uses a merge key"),
        ("model: {}\n---\nmodel: {}\n", "run.yaml:3: a second document starts here"),
        ("model: {}\n\nmodel: {}\n", "run.yaml:3: key 'model' is given again, first at run.yaml:1"),
        (
            "model:\n  num_layers: 1\n  num_layers: 1\n",
            "run.yaml:3: key 'num_layers' is given again, first at run.yaml:2",
        ),
        ("model:\n  ? [a]\n  : 1\n", "run.yaml:2: a key is a list or a mapping"),
        ("model:\n  num_layers: {a: 1}\n", "run.yaml:2: model.num_layers is a mapping, but must be a whole number"),
        (b"# ok\nmodel: {}  # caf\xe9\n", "run.yaml:2: byte 0xe9 is not UTF-8"),
    ],
)
def test_file_that_is_not_a_mapping_of_sections_is_refused(tmp_path, text, expected):
    assert expected in message_of(tmp_path, text)


def test_tabs_are_named_in_the_advice(tmp_path):
    assert "indent with spaces, not tabs" in message_of(tmp_path, "model:\n\tnum_layers: 1\n")


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        load_config(tmp_path / "none.yaml", [])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, [])


def test_all_missing_settings_are_named_at_once(tmp_path):
    message = message_of(tmp_path, "model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}\n")
    assert message.startswith("run.yaml: model.seq_length, training.micro_batch_size, optimizer.lr are not given")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--training.seed", "command line: '--training.seed' has no value; write --section.key=value"),
        ("--seed=3", "command line: unknown section 'seed' ('seed' belongs in section 'training')"),
        ("--training=3", "names a section, but no key"),
        ("--trainin.seed=3", "unknown section 'trainin' (did you mean 'training'?)"),
        ("--training.sed=3", "command line: unknown key 'training.sed' (did you mean 'seed'?)"),
        ("--micro-batch-size=3", "('micro_batch_size' belongs in section 'training')"),
        ("--training.seed=x", "command line: training.seed is 'x', but must be a whole number"),
    ],
)
def test_wrong_override_is_refused(override, expected):
    with pytest.raises(ConfigError) as caught:
        config_with(override)
    assert expected in str(caught.value)


def test_range_error_names_the_line(tmp_path):
    message = message_of(tmp_path, MINIMAL_YAML + "checkpoint:\n  ckpt_step: 0\n")
    assert message.startswith("run.yaml:14: checkpoint.ckpt_step is 0")


def test_contradiction_names_every_place_it_comes_from(tmp_path):
    text = MINIMAL_YAML + "parallel:\n  overlap_param_gather: true\n"
    message = message_of(tmp_path, text, "--parallel.use_distributed_optimizer=no")
    assert message.startswith("run.yaml:14, command line: parallel.overlap_param_gather is on")


def test_contradiction_between_sections_is_found_while_loading(tmp_path):
    message = message_of(tmp_path, MINIMAL_YAML + "parallel:\n  pipeline_model_parallel_size: 3\n")
    assert message.startswith("run.yaml:2, run.yaml:14: model.num_layers is 4")


def _unusual() -> Config:
    return config_with(
        "optimizer.lr=1.1e-05",
        "optimizer.min_lr=1e-300",
        "training.exit_signal=SIGUSR1",
        "training.exit_duration_in_mins=0.1",
        "data.mock_data=false",
        "data.data_path=[null , ]".replace("null ", "'off: # x'"),
        "data.split=969, 30, 1",
        "checkpoint.save=./2024-01-01",
        "checkpoint.load=caf\u00e9: #1",
        "checkpoint.pretrained_checkpoint=" + "long name " * 40,
        "profiling.profile_ranks=0,3",
        "checkpoint.ckpt_step=100",
    )


def test_dump_is_read_back_to_an_equal_configuration(tmp_path):
    for config in (config_with(), _unusual()):
        text = dump_config(config)
        assert load_config(written(tmp_path, text), []) == config
        assert dump_config(config) == text


def test_dump_has_every_key_on_one_line_and_no_anchors():
    text = dump_config(_unusual())
    for section, keys in config_to_dict(_unusual()).items():
        assert f"{section}:\n" in text
        for key in keys:
            assert text.count(f"\n  {key}:") == 1
    assert "&" not in text and "*" not in text


def test_text_that_looks_like_something_else_survives_a_dump(tmp_path):
    values = config_to_dict(config_with())
    values["data"] |= {"mock_data": False, "data_path": ["null"]}
    values["checkpoint"]["save"] = "off"
    config = config_from_dict(values)
    assert config.data.data_path == ["null"]
    assert load_config(written(tmp_path, dump_config(config)), []) == config


def test_dictionary_is_plain_and_read_back_to_an_equal_configuration():
    values = config_to_dict(_unusual())
    plain = (type(None), bool, int, float, str, list)
    assert all(type(value) in plain for section in values.values() for value in section.values())
    assert config_from_dict(values) == _unusual()


def test_dictionary_does_not_share_lists_with_the_configuration():
    config = config_with()
    config_to_dict(config)["profiling"]["profile_ranks"].append(9)
    assert config.profiling.profile_ranks == [0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"modle": {}}, "common.pt: unknown section 'modle'"),
        ({"model": {"layers": 1}}, "common.pt: unknown key 'model.layers'"),
        ({"model": 3}, "common.pt: section 'model' is the value 3"),
        ({"model": {"num_layers": True}}, "common.pt: model.num_layers is True"),
        ({"model": {"num_layers": {"a": 1}}}, "common.pt: model.num_layers is a mapping"),
        ({3: {}}, "common.pt: unknown section '3'"),
        ({}, "common.pt: model.num_layers, "),
    ],
)
def test_error_in_a_dictionary_names_its_source(values, expected):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, source="common.pt")
    assert str(caught.value).startswith(expected)
