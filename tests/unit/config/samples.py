"""The smallest configuration, as the tests of this folder vary it."""

from __future__ import annotations

from pathlib import Path

from megalite.config.loader import load_config
from megalite.config.schema import Config

MINIMAL = {
    "model.num_layers": "4",
    "model.hidden_size": "64",
    "model.num_attention_heads": "4",
    "model.seq_length": "32",
    "training.micro_batch_size": "2",
    "training.train_iters": "100",
    "optimizer.lr": "1e-3",
    "data.mock_data": "true",
}

MINIMAL_YAML = """\
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 32
training:
  micro_batch_size: 2
  train_iters: 100
optimizer:
  lr: 1e-3
data:
  mock_data: true
"""


def config_with(*overrides: str) -> Config:
    """MINIMAL, changed by ``section.key=value`` texts."""
    return load_config(None, [*(f"{key}={value}" for key, value in MINIMAL.items()), *overrides])


def written(folder: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
