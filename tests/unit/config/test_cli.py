from __future__ import annotations

import pytest

from megalite.config.cli import parse_command_line
from megalite.config.help import help_text
from megalite.config.loader import dump_config, load_config
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import MINIMAL, MINIMAL_YAML, written


def test_file_and_overrides_give_a_configuration(tmp_path):
    path = str(written(tmp_path, MINIMAL_YAML))
    for argv in ([path, "--training.seed=5"], ["training.seed=5", path]):
        result = parse_command_line(argv)
        assert result.text is None
        assert result.config == load_config(tmp_path / "run.yaml", ["training.seed=5"])


def test_overrides_alone_can_be_a_configuration():
    result = parse_command_line([f"--{key}={value}" for key, value in MINIMAL.items()])
    assert result.config.model.num_layers == 4


def test_path_that_looks_like_an_override_needs_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, MINIMAL_YAML, "a=b.yaml")
    assert parse_command_line(["./a=b.yaml"]).config is not None
    with pytest.raises(ConfigError, match="unknown section 'a'"):
        parse_command_line(["a=b.yaml"])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_configuration(flag):
    assert parse_command_line([flag]).text == help_text()
    assert parse_command_line([flag, "model"]).text == help_text("model")
    assert parse_command_line(["none.yaml", "--no.such=3", flag]).text == help_text()


def test_print_config_shows_what_a_run_would_use(tmp_path):
    path = str(written(tmp_path, MINIMAL_YAML))
    result = parse_command_line(["--print-config", path, "--training.seed=5"])
    assert result.config is None
    assert result.text == dump_config(load_config(tmp_path / "run.yaml", ["training.seed=5"]))
    assert "\n  seed: 5\n" in result.text


def test_print_config_refuses_what_a_run_would_refuse(tmp_path):
    with pytest.raises(ConfigError, match="training.seed is 0"):
        parse_command_line(["--print-config", str(written(tmp_path, MINIMAL_YAML)), "--training.seed=0"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "no configuration is given; name a YAML file"),
        (["--print-config"], "no configuration is given"),
        (["a.yaml", "b.yaml"], "'a.yaml' and 'b.yaml' are given, but a run has one"),
        (["a.yaml", "-x"], "unknown option '-x'"),
        (["a.yaml", "--training.seed", "5"], "'--training.seed' has no value; write"),
        (["a.yaml", "seed=5"], "unknown section 'seed'"),
        (["a.yaml"], "a.yaml: cannot be read"),
    ],
)
def test_command_line_that_cannot_be_followed_is_refused(argv, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if len(argv) > 1 and argv[0] == "a.yaml":
        written(tmp_path, MINIMAL_YAML, "a.yaml")
    with pytest.raises(ConfigError) as caught:
        parse_command_line(argv)
    assert expected in str(caught.value)
    assert caught.value.exit_status == 2
