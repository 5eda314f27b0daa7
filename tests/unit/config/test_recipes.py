from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.loader import load_config
from megalite.model.gpt import GPTModel
from megalite.model.module import ModelChunk, Placement
from megalite.parallel.random import CudaRNGStatesTracker, Dropout
from megalite.parallel.state import ParallelState
from megalite.training.loop import train
from megalite.training.setup import training_run, transformer_config

META = torch.device("meta")
FOLDER = Path(__file__).parents[3] / "configs"

# World sizes on which a recipe is meant to start, and the forward passes of a rank in one iteration there.
WORLD_SIZES = {
    "gpt2_tiny.yaml": {1: 4, 2: 2, 4: 1},
    "gpt2_quickstart.yaml": {1: 4, 2: 2, 4: 1},
    "gpt2_124m.yaml": {1: 40, 4: 10, 8: 5},
    "gpt_7b_tp2_pp2.yaml": {4: 256, 8: 128, 16: 64, 64: 16},
    "llama_tiny.yaml": {1: 4, 2: 2, 4: 1},
    "llama_7b_tp4_pp2.yaml": {8: 1024, 16: 512, 64: 128, 1024: 8},
}


def test_every_recipe_is_listed_here():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(WORLD_SIZES)


@pytest.mark.parametrize(("name", "world_sizes"), WORLD_SIZES.items(), ids=str)
def test_recipe_can_be_read_and_started(name, world_sizes):
    config = load_config(FOLDER / name, [])
    assert {size: derive(config, size).num_microbatches for size in world_sizes} == world_sizes
    assert config.checkpoint.save.parts[0] == "runs", "what a recipe writes is kept out of the repository"


ONE_RANK = ["--parallel.tensor_model_parallel_size=1", "--parallel.pipeline_model_parallel_size=1"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt_7b_tp2_pp2.yaml", 36 * (12 * 4096**2 + 13 * 4096) + (51200 + 2048 + 2) * 4096),
        # What Meta publishes for Llama-2-7B.
        ("llama_7b_tp4_pp2.yaml", 6_738_415_616),
        ("gpt2_124m.yaml", 124_439_808 + (50304 - 50257) * 768),
    ],
)
def test_recipe_has_as_many_parameters_as_its_name_says(name, parameters):
    config = load_config(FOLDER / name, ONE_RANK)
    shape = transformer_config(config, derive(config, 1), config.model.vocab_size)
    chunk = ModelChunk(first_layer=0, num_layers=config.model.num_layers, is_first=True, is_last=True)
    model = GPTModel(shape, Placement(ParallelState(), Dropout(CudaRNGStatesTracker()), META), chunk)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_chunks_of_the_llama_recipe_are_equal_in_length():
    layout = derive(load_config(FOLDER / "llama_7b_tp4_pp2.yaml", []), 8).layer_layout
    assert layout == (((0, 8), (16, 8)), ((8, 8), (24, 8)))


@pytest.mark.parametrize("name", ["gpt2_tiny.yaml", "llama_tiny.yaml"])
def test_toy_trains_in_one_process(name, tmp_path):
    overrides = ["--training.train_iters=3", "--optimizer.lr_warmup_iters=1", "--training.exit_signal_handler=off"]
    config = load_config(FOLDER / name, [*overrides, f"--checkpoint.save={tmp_path}"])
    with training_run(config) as ctx:
        train(ctx)
        assert ctx.progress.iteration == 3 and ctx.progress.skipped_iterations == 0
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
