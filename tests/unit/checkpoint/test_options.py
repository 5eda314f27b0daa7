from __future__ import annotations

from typing import Any

import pytest

from megalite.checkpoint.options import load_options, save_options
from megalite.dist_checkpointing.serialization import LoadOptions, SaveOptions
from megalite.parallel.state import ParallelState
from tests.unit.samples import axis, small_config

SHARING = axis(4, 1)


def _options(saved: str | None = "off", **settings: Any) -> tuple[SaveOptions, LoadOptions]:
    """Return the options of a save, and of the load of a step that was saved with these hashes."""
    config = small_config({"checkpoint": {"save": "x", **settings}}).checkpoint
    parallel = ParallelState(dp_cp=SHARING)
    common = {} if saved is None else {"megalite": {"config": {"checkpoint": {"verify_integrity": saved}}}}
    return save_options(config, parallel), load_options(config, parallel, common)


def test_saves_are_shared_and_loads_are_not_by_default() -> None:
    saving, loading = _options()
    assert saving == SaveOptions(parallel_group=SHARING, verify_integrity="xxh3")
    assert loading == LoadOptions(verify_integrity="xxh3", require_integrity=False)


@pytest.mark.parametrize(
    ("saved", "asked", "required", "expected"),
    [
        ("xxh3", "xxh3", None, ("xxh3", True)),
        ("sha256", "xxh3", None, ("sha256", True)),
        ("off", "xxh3", None, ("xxh3", False)),
        (None, "xxh3", None, ("xxh3", False)),
        (None, "sha256", None, ("sha256", False)),
        (None, "sha256", True, ("sha256", True)),
        ("xxh3", "xxh3", False, ("xxh3", False)),
        ("xxh3", "off", None, ("off", False)),
        ("rot13", "xxh3", None, ("xxh3", False)),
    ],
)
def test_a_step_says_with_which_hashes_it_was_saved(
    saved: str | None, asked: str, required: bool | None, expected: tuple[str, bool]
) -> None:
    _, loading = _options(saved, verify_integrity=asked, ckpt_load_require_integrity=required)
    assert (loading.verify_integrity, loading.require_integrity) == expected


@pytest.mark.parametrize("group", ["dp", "ep_dp"])
def test_every_setting_reaches_the_library(group: str) -> None:
    saving, loading = _options(
        ckpt_fully_parallel_save=False,
        ckpt_fully_parallel_save_process_group=group,
        ckpt_fully_parallel_load=True,
        ckpt_fully_parallel_load_process_group=group,
        ckpt_fully_parallel_load_exchange_algo="gather_rounds",
        ckpt_load_validate_sharding_integrity=False,
        ckpt_assume_constant_structure=True,
        dist_ckpt_workers=3,
        verify_integrity="sha256",
        ckpt_load_require_integrity=False,
    )
    assert saving == SaveOptions(
        parallel_group=None, num_files=3, verify_integrity="sha256", assume_constant_structure=True
    )
    assert loading == LoadOptions(
        parallel_group=SHARING,
        exchange="gather_rounds",
        validate_access_integrity=False,
        verify_integrity="sha256",
        require_integrity=False,
    )
