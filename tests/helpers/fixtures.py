"""Where checkpoints made by megatron-core lie; tests that need them skip in a clone that has none."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "fixtures"


def fixtures_folder() -> Path:
    """Return the folder of all fixtures, ``MEGALITE_FIXTURES`` if set; skips the calling test when there is none."""
    folder = Path(os.environ.get("MEGALITE_FIXTURES", _DEFAULT))
    if not folder.is_dir():
        pytest.skip(f"no fixtures in {folder}; set MEGALITE_FIXTURES")
    return folder


def megatron_fixture(name: str) -> Path:
    """Return the folder of one fixture of megatron-core 0.16.1."""
    folder = fixtures_folder() / "megatron_core_0_16_1" / name
    if not folder.is_dir():
        pytest.skip(f"no fixture {folder}")
    return folder


def checkpoint_of(fixture: Path) -> Path:
    """Return the iteration folder of a fixture."""
    return next((fixture / "ckpt").glob("iter_*"))


def fixture_config(fixture: Path) -> dict[str, Any]:
    """Return ``config.json`` of a fixture."""
    return json.loads((fixture / "config.json").read_text())


def recipe_weight(key: str, shape: tuple[int, ...], scale: float, salt: str = "") -> np.ndarray:
    """Return the value the weight recipe of the fixtures gives to an unstacked parameter."""
    value = np.random.RandomState(zlib.crc32((key + salt).encode())).standard_normal(shape) * scale
    # Rounded once, after the product: the other order differs in the last bit.
    return value.astype(np.float32) + np.float32("layernorm" in key and key.endswith("weight"))
