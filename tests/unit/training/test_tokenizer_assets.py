from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.paths import iteration_folder
from megalite.training.loop import train
from megalite.training.setup import training_run
from tests.unit.samples import small_config


def test_files_of_the_tokenizer_go_with_the_checkpoint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("<eos>", "a", "b"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    model.save(str(tmp_path / "tokenizer.json"))
    data = {
        "tokenizer_type": "HFTokenizer",
        "tokenizer_model": str(tmp_path / "tokenizer.json"),
        "tokenizer_eod": "<eos>",
    }
    config = small_config(
        {"data": data, "training": {"train_iters": 1}, "checkpoint": {"save": str(tmp_path / "run")}},
        {"model": {"vocab_size": None}},
    )
    with training_run(config) as ctx:
        train(ctx)
    kept = iteration_folder(tmp_path / "run", 1) / "tokenizer" / "tokenizer.json"
    assert kept.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert (kept.parent / "megalite.json").exists()
