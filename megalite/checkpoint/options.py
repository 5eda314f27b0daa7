"""The settings of section ``checkpoint`` as the library takes them."""

from __future__ import annotations

from megalite.config.schema import CheckpointConfig
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


def load_options(config: CheckpointConfig, parallel: ParallelState) -> LoadOptions:
    """Return how a step is read."""
    return LoadOptions(
        parallel_group=_sharing_group(parallel) if config.ckpt_fully_parallel_load else None,
        exchange=config.ckpt_fully_parallel_load_exchange_algo,
        validate_access_integrity=config.ckpt_load_validate_sharding_integrity,
        verify_integrity=config.verify_integrity,
        require_integrity=config.ckpt_load_require_integrity,
    )


def _sharing_group(parallel: ParallelState) -> Group:
    # Without expert parallelism the groups "dp" and "ep_dp" have the same ranks.
    return parallel.dp_cp
