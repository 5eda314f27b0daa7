"""What the documentation has to name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megalite.config.schema import CheckpointConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_setting_of_checkpoints_is_described() -> None:
    text = (DOCS / "checkpoint.md").read_text()
    assert [field.name for field in dataclasses.fields(CheckpointConfig) if f"`{field.name}" not in text] == []
