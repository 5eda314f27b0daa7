"""Checkpoint files as Megatron's trainer has megatron-core write and read them; for ranks within ``megatron_core``."""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.megatron import MegatronRun

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Megatron's trainer gives to the sharded state dicts, with --dist-ckpt-optim-fully-reshardable."""


def _sharded_state(run: MegatronRun, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    # Replicas are numbered within this group.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**metadata, "dp_cp_group": group}
    model = run.gpt.sharded_state_dict(metadata=metadata)
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def load(run: MegatronRun, folder: Path) -> dict[str, Any]:
    """Restore ``run`` from ``folder`` as Megatron's trainer does, strictly; return the loaded state dict. Collective.

    Random states, whose grid is that of the run that saved, are spread over the ranks, so that every key is asked for.
    """
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(folder))
    request = _sharded_state(run, metadata, is_loading=True)
    request["rng_state"] = _all_random_states(folder)
    loaded = dist_checkpointing.load(request, str(folder), validate_access_integrity=True, strict="raise_all")
    run.gpt.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    # With PyTorch's Adam it gives one step tensor to all parameters, and each of them would count it up.
    for state in run.distributed_optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()
    return loaded


def _all_random_states(folder: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    stored = {data.unique_key for data in load_sharded_metadata(str(folder)).values() if hasattr(data, "unique_key")}
    cells = sorted(key for key in stored if key.startswith("rng_state/"))
    return {key: ShardedObject.empty_from_unique_key(key) for key in cells[dist.get_rank() :: dist.get_world_size()]}


BUCKET_METADATA = {
    "distrib_optim_sharding_type": "dp_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""The same without that flag."""


def save(
    run: MegatronRun,
    root: Path,
    iteration: int,
    *,
    is_transformer_engine: bool = False,
    metadata: dict[str, Any] = METADATA,
) -> None:
    """Write ``run`` into a folder below ``root`` as Megatron's trainer does, fully parallel. Collective.

    With ``is_transformer_engine`` the objects are there that Megatron adds with Transformer Engine, and rerun states.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder = root / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = _common_state(run, iteration) | _sharded_state(run, metadata, is_loading=False)
    state["rng_state"] = random_states(run.config.training.seed)
    if is_transformer_engine:
        _add_objects_of_transformer_engine(state)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=dict(metadata))
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def random_states(seed: int) -> Any:
    """Return this rank's cell of the grid of random states, as megatron-core's tracker has them after seeding."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        [own],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _add_objects_of_transformer_engine(state: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    for leaf in state["model"].values():
        if isinstance(leaf, ShardedObject) and leaf.key.endswith("._extra_state"):
            leaf.data = io.BytesIO(b"scales")
    rank, size = dist.get_rank(), dist.get_world_size()
    final = ShardedObject("decoder.final_layernorm._extra_state", torch.zeros(4), (1,), (0,), replica_id=rank)
    state["model"][final.key] = final
    rerun = {"mode": "disabled", "sharded": {}}
    state["rerun_state_machine_state"] = ShardedObject("rerun_state_machine_state", rerun, (size,), (rank,))


def _common_state(run: MegatronRun, iteration: int) -> dict[str, Any]:
    """Return the plain values that Megatron's trainer adds, as far as a reader uses them."""
    model, derived, parallel = run.config.model, run.derived, run.config.parallel
    samples = iteration * derived.global_batch_size
    optimizer = run.config.optimizer
    args = argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.group_query_attention,
        num_query_groups=derived.num_query_groups,
        ffn_hidden_size=derived.ffn_hidden_size,
        kv_channels=derived.kv_channels,
        seq_length=model.seq_length,
        max_position_embeddings=derived.max_position_embeddings,
        padded_vocab_size=derived.padded_vocab_size(run.vocab_size),
        position_embedding_type=model.position_embedding_type,
        add_position_embedding=model.position_embedding_type == "learned_absolute",
        rotary_percent=model.rotary_percent,
        rotary_base=int(model.rotary_base),
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        swiglu=model.swiglu,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        data_parallel_size=derived.data_parallel_size,
        world_size=dist.get_world_size(),
        params_dtype=torch.bfloat16 if run.config.precision.bf16 else torch.float32,
        global_batch_size=derived.global_batch_size,
        consumed_train_samples=samples,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        iteration=iteration,
        no_save_optim=None,
        no_save_rng=None,
        data_parallel_random_init=False,
    )
    scheduler = {
        "max_lr": optimizer.lr,
        "lr_warmup_steps": 0,
        "num_steps": samples,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_steps": run.config.training.train_iters * derived.global_batch_size,
        "min_lr": optimizer.min_lr,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": run.config.training.train_iters * derived.global_batch_size,
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": scheduler,
        "num_floating_point_operations_so_far": 0,
    }
