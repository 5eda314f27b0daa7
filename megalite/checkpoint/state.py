"""Everything that a checkpoint restores, and its forms: the sharded tensors, the common part, the random states."""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite import __version__
from megalite.config.derive import Derived
from megalite.config.loader import config_to_dict
from megalite.config.schema import CheckpointConfig, Config
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.model.gpt import VOCABULARY_TABLES
from megalite.optimizer.bucket_space import DP_RESHARDABLE
from megalite.optimizer.optimizer import SHARDING_TYPE, STATE_KINDS, MixedPrecisionOptimizer
from megalite.optimizer.param_scheduler import OptimizerParamScheduler
from megalite.parallel.ddp import DistributedDataParallel
from megalite.parallel.random import CudaRNGStatesTracker, seed_everything
from megalite.parallel.state import ParallelState

CHECKPOINT_VERSION = 3.0
OPTIMIZER_PREFIX = "optimizer.state."
RNG_KEY = "rng_state"


@dataclass
class TrainProgress:
    """How far the run is. The only mutable numbers that decide what comes next."""

    iteration: int = 0
    """Iterations done, including skipped updates."""
    consumed_train_samples: int = 0
    consumed_valid_samples: dict[str, int] = field(default_factory=dict)
    """Position in each validation set, by its name; 0 for one that is not there."""
    skipped_train_samples: int = 0
    skipped_iterations: int = 0
    """Iterations whose update was left out because the gradient was not finite."""
    num_floating_point_operations_so_far: float = 0.0


@dataclass
class TrainState:
    """The live objects that a checkpoint is made of and restored into."""

    config: Config
    derived: Derived
    parallel: ParallelState
    chunks: list[DistributedDataParallel]
    """The model chunks of this stage with their gradient buffers, in the order in which a micro-batch passes them."""
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    tracker: CudaRNGStatesTracker
    progress: TrainProgress
    vocab_size: int
    index_sizes: dict[str, list[int]] = field(default_factory=dict)
    """For each split the numbers of samples for which its order was defined."""
    data_definitions: dict[str, Any] = field(default_factory=dict)
    """For each set what its order follows from, besides the sizes."""
    run_id: str = ""

    def finish_param_sync(self) -> None:
        """Wait until all parameters are up to date, as everything but a forward must before it reads them."""
        for chunk in self.chunks:
            chunk.finish_param_sync()


def model_state(state: TrainState) -> dict[str, Any]:
    """Return parameter name -> sharded tensor, and the extra states Megatron expects."""
    # Layers are named by their global number, so that chunks do not share a name.
    return {name: leaf for chunk in state.chunks for name, leaf in chunk.module.sharded_state_dict().items()}


def live_tensors(state: TrainState) -> dict[str, Any]:
    """Return weights, masters and moments as blocks of global tensors that share memory with the run."""
    state.finish_param_sync()
    weights = model_state(state)
    return {"model": weights, "optimizer": state.optimizer.sharded_state_dict(weights)}


def main_params_request(state: TrainState, weights: dict[str, Any]) -> dict[str, list[ShardedTensor]]:
    """Return the fp32 masters as blocks of the model's own tensors, to be filled from what a file has of those.

    Masters that are the weights themselves are left out. They are read, never written: no block is a main replica.
    """
    request: dict[str, list[ShardedTensor]] = {}
    for piece in state.optimizer.pieces:
        if piece.master.data_ptr() == piece.values.data_ptr():
            continue
        place, end = weights[piece.name], piece.parameter_start + piece.master.numel()
        reader = (place.replica_id[0] + 1, *place.replica_id[1:])
        request.setdefault(piece.name, []).extend(
            sharded_tensors_of_range(
                place.key, piece.master.detach(), place, piece.parameter_start, end, replica_id=reader
            )
        )
    return request


def true_rows(state: TrainState) -> dict[str, int]:
    """Return the number of rows that are no padding, for each global tensor that has some."""
    prefixes = ("", *(f"{OPTIMIZER_PREFIX}{word}." for word in STATE_KINDS))
    return {prefix + table: state.vocab_size for prefix in prefixes for table in VOCABULARY_TABLES}


def is_used_by_megatron_alone(key: str) -> bool:
    """Return whether a stored object has no counterpart here: scales of fp8 layers, the state of a rerun."""
    return "._extra_state/" in key or key.startswith("rerun_state_machine_state/")


def content_metadata(layout: str | None) -> dict[str, Any]:
    """Return Megatron's description of how the optimizer is stored, which it reads instead of its own flags."""
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if layout is not None:
        content["distrib_optim_sharding_type"] = layout
    if layout == SHARDING_TYPE:
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return content


def save_layout(config: CheckpointConfig) -> str | None:
    """Return the layout in which a run saves its optimizer; None if it does not."""
    if config.no_save_optim:
        return None
    return SHARDING_TYPE if config.dist_ckpt_optim_fully_reshardable else DP_RESHARDABLE


def common_state(state: TrainState) -> dict[str, Any]:
    """Return what is equal on all ranks, as plain values: Megatron's keys, and our own under ``megalite``."""
    common: dict[str, Any] = {
        "args": argparse.Namespace(**_megatron_arguments(state)),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.progress.iteration,
        "num_floating_point_operations_so_far": state.progress.num_floating_point_operations_so_far,
        "megalite": {
            "version": __version__,
            "config": config_to_dict(state.config),
            "progress": asdict(state.progress),
            "run_id": state.run_id,
            "topology": list(state.parallel.topology),
            "vocab_size": state.vocab_size,
            "index_sizes": state.index_sizes,
            "data_definitions": state.data_definitions,
        },
        # The scheduler does not depend on the optimizer's state and is kept without it.
        "opt_param_scheduler": state.scheduler.state_dict(),
    }
    layout = save_layout(state.config.checkpoint)
    if layout == SHARDING_TYPE:
        common["optimizer"] = state.optimizer.common_state_dict()
    elif layout is not None:
        # Megatron keeps the rest as objects of each (tp, pp) cell.
        common["optimizer"] = {"param_state_sharding_type": layout}
    return common


def _megatron_arguments(state: TrainState) -> dict[str, Any]:
    """Return the arguments that Megatron compares or reads on load, and all of ours under their flag names."""
    arguments: dict[str, Any] = {}
    for section in config_to_dict(state.config).values():
        arguments.update(section)
    derived, parallel, progress = state.derived, state.parallel, state.progress
    return arguments | {
        "add_position_embedding": state.config.model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": state.config.model.position_embedding_type == "rope",
        "vocab_file": None,
        # The order of parameters in gradient buckets is Megatron's without Transformer Engine.
        "transformer_impl": "local",
        "ffn_hidden_size": derived.ffn_hidden_size,
        "kv_channels": derived.kv_channels,
        "max_position_embeddings": derived.max_position_embeddings,
        "padded_vocab_size": derived.padded_vocab_size(state.vocab_size),
        "global_batch_size": derived.global_batch_size,
        "num_query_groups": derived.num_query_groups,
        "phase_transition_iterations": None,
        "tensor_model_parallel_size": parallel.tp.size,
        "pipeline_model_parallel_size": parallel.pp.size,
        "virtual_pipeline_model_parallel_size": derived.num_model_chunks if derived.num_model_chunks > 1 else None,
        "data_parallel_size": parallel.dp.size,
        "world_size": parallel.world.size,
        "consumed_train_samples": progress.consumed_train_samples,
        # Megatron has one position.
        "consumed_valid_samples": max(progress.consumed_valid_samples.values(), default=0),
        "skipped_train_samples": progress.skipped_train_samples,
        "iteration": progress.iteration,
        "params_dtype": str(state.chunks[0].buffers[0].values.dtype).removeprefix("torch."),
        "async_strategy": "mcore",
    }


# Random states


def _own_random_states(tracker: CudaRNGStatesTracker) -> dict[str, Any]:
    is_cuda = tracker.device.type == "cuda"
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        # Without CUDA its default generator is the CPU's, which is what the tracker forks.
        "cuda_rng_state": torch.cuda.get_rng_state(tracker.device) if is_cuda else torch.get_rng_state(),
        "rng_tracker_states": {name: state_tensor(state) for name, state in tracker.get_states().items()},
    }


def random_states(state: TrainState) -> ShardedObject:
    """Return the five-tuple of this (pp, tp) cell as a list: of one, or one per DP rank if their streams differ.

    Collective over dp with ``data_parallel_random_init``.
    """
    own = _own_random_states(state.tracker)
    differs = state.config.rng.data_parallel_random_init and state.parallel.dp.size > 1
    states = state.parallel.dp.all_gather_object(own) if differs else [own]
    return random_states_request(state.parallel, states)


def random_states_request(parallel: ParallelState, states: Sequence[Any] | None = None) -> ShardedObject:
    """Return the cell of this rank in the grid of random states, for saving ``states`` or for loading."""
    return ShardedObject(
        RNG_KEY,
        None if states is None else list(states),
        (parallel.pp.size, parallel.tp.size),
        (parallel.pp.rank, parallel.tp.rank),
        replica_id=parallel.dp_cp.rank,
    )


_STATES = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")


def misfit_of_random_states(states: dict[str, Any], tracker: CudaRNGStatesTracker) -> tuple[list[str], str | None]:
    """Return the names of what is missing in loaded ``states``, and why the rest cannot be set here, or None."""
    missing = [name for name in _STATES if name not in states]
    streams = states.get("rng_tracker_states", {})
    missing += [f"rng_tracker_states[{name!r}]" for name in tracker.states if name not in streams]
    # The generator of each kind of device has a state of its own size.
    sizes = {len(state_tensor(state)) for state in (*tracker.states.values(), *streams.values())}
    return missing, "saved on another kind of device" if len(sizes) > 1 else None


def state_tensor(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a generator's state as the bytes that a checkpoint holds, also where a generator itself is kept."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def restore_random_states(tracker: CudaRNGStatesTracker, states: dict[str, Any]) -> None:
    """Put all five states back."""
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    if tracker.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda_rng_state"], tracker.device)
    tracker.set_states({name: state_tensor(state) for name, state in states["rng_tracker_states"].items()})


def derive_random_states(
    config: Config, parallel: ParallelState, iteration: int, tracker: CudaRNGStatesTracker
) -> None:
    """Seed all generators from (seed, iteration, this rank's coordinates), where saved states do not fit.

    Never the start-of-run seeds: those would repeat the masks of the first iterations.
    """
    seed = 1 + zlib.crc32(f"{config.training.seed}:{iteration}".encode()) % (2**30)
    fresh = seed_everything(seed, parallel, tracker.device, config.rng.data_parallel_random_init)
    tracker.set_states(fresh.get_states())


def readable_copies(state: TrainState, config_text: str, tokenizer: dict[str, Any]) -> dict[Path, bytes]:
    """Return the files beside the tensors that are there for people, by their path within the step's folder."""
    progress = asdict(state.progress) | {
        "topology": dict(zip(("tp", "pp", "dp"), state.parallel.topology, strict=True))
    }
    return {
        Path("config.yaml"): config_text.encode(),
        Path("progress.json"): (json.dumps(progress, indent=2) + "\n").encode(),
        Path("tokenizer/megalite.json"): (json.dumps(tokenizer, indent=2) + "\n").encode(),
    }
