"""Every recipe can be printed, and what is printed is the same configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megalite.config.loader import load_config
from tests.helpers.rank_main import REPOSITORY
from tests.helpers.torchrun import run_job

RECIPES = sorted((REPOSITORY / "configs").iterdir())


def test_there_are_recipes() -> None:
    assert len(RECIPES) > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_printed_recipe_is_the_same_configuration(
    run_main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path, path: Path
) -> None:
    assert run_main([str(path), "--print-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(text)
    assert load_config(tmp_path / "printed.yaml", []) == load_config(path, [])
    assert run_main([str(tmp_path / "printed.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_override_is_printed_by_the_program(tmp_path: Path) -> None:
    result = run_job(tmp_path / "job", [str(RECIPES[0]), "--print-config", "--training.seed=77"])
    assert result.status == 0
    (tmp_path / "printed.yaml").write_text(result.output)
    assert load_config(tmp_path / "printed.yaml", []) == load_config(RECIPES[0], ["--training.seed=77"])
