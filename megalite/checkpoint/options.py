"""The settings of section ``checkpoint`` as the library takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.integrity import Integrity
from megalite.dist_checkpointing.serialization import LoadOptions, SaveOptions
from megalite.parallel.state import ParallelState
from megalite.utils.dist import Group


def save_options(config: CheckpointConfig, parallel: ParallelState) -> SaveOptions:
    """Return how a step is written."""
    return SaveOptions(
        parallel_group=_sharing_group(parallel) if config.ckpt_fully_parallel_save else None,
        num_files=config.dist_ckpt_workers,
        verify_integrity=config.verify_integrity,
        assume_constant_structure=config.ckpt_assume_constant_structure,
    )


def load_options(config: CheckpointConfig, parallel: ParallelState, common: Mapping[str, Any]) -> LoadOptions:
    """Return how the step with this common part is read."""
    kind, is_required = _integrity(config, common)
    return LoadOptions(
        parallel_group=_sharing_group(parallel) if config.ckpt_fully_parallel_load else None,
        exchange=config.ckpt_fully_parallel_load_exchange_algo,
        validate_access_integrity=config.ckpt_load_validate_sharding_integrity,
        verify_integrity=kind,
        require_integrity=is_required,
    )


def _integrity(config: CheckpointConfig, common: Mapping[str, Any]) -> tuple[Integrity, bool]:
    """Return the hashes to compare, and whether a step without them is refused.

    A step says itself with which hashes it was saved; without such a word (other programs, older versions) it may have
    none.
    """
    if config.verify_integrity == "off":
        return "off", False
    saved = common.get("megalite", {}).get("config", {}).get("checkpoint", {}).get("verify_integrity")
    has_hashes = saved in ("xxh3", "sha256")
    required = config.ckpt_load_require_integrity
    return saved if has_hashes else config.verify_integrity, has_hashes if required is None else required


def _sharing_group(parallel: ParallelState) -> Group:
    # Without expert parallelism the groups "dp" and "ep_dp" have the same ranks.
    return parallel.dp_cp
