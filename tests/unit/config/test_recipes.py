from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.derive import derive
from megalite.config.loader import load_config

FOLDER = Path(__file__).parents[3] / "configs"

# World sizes on which a recipe is meant to start, and the forward passes of a rank in one iteration there.
WORLD_SIZES = {
    "gpt2_tiny.yaml": {1: 4, 2: 2, 4: 1},
    "gpt2_quickstart.yaml": {1: 4, 2: 2, 4: 1},
    "gpt2_124m.yaml": {1: 40, 4: 10, 8: 5},
    "gpt_7b_tp2_pp2.yaml": {4: 256, 8: 128, 16: 64, 64: 16},
}


def test_every_recipe_is_listed_here():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(WORLD_SIZES)


@pytest.mark.parametrize(("name", "world_sizes"), WORLD_SIZES.items(), ids=str)
def test_recipe_can_be_read_and_started(name, world_sizes):
    config = load_config(FOLDER / name, [])
    assert {size: derive(config, size).num_microbatches for size in world_sizes} == world_sizes
    assert config.checkpoint.save.parts[0] == "runs", "what a recipe writes is kept out of the repository"
