"""What goes into a step: one sharded state dict, whose leaves say where they belong whatever the topology."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.state import TrainState, common_state, model_state, random_states, save_layout
from megalite.optimizer.bucket_space import DP_RESHARDABLE, BucketSpace


def state_to_save(state: TrainState) -> dict[str, Any]:
    """Return the state dict of the present iteration. Leaves share memory with the live tensors.

    Collective over dp with ``data_parallel_random_init``. Parameters that are still being gathered are waited for.
    """
    state.finish_param_sync()
    config = state.config.checkpoint
    weights = model_state(state)
    contents: dict[str, Any] = {**common_state(state), "model": weights}
    layout = save_layout(config)
    if layout == DP_RESHARDABLE:
        contents["optimizer_state"] = BucketSpace(state.optimizer).state()
    elif layout is not None:
        contents["optimizer_state"] = state.optimizer.sharded_state_dict(weights)
    if not config.no_save_rng:
        contents["rng_state"] = random_states(state)
    return contents
