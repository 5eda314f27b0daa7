"""From a configuration to a run that can start: ranks, model, data, and what a checkpoint restores."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.resolve import LoadDecision
from megalite.checkpoint.state import TrainProgress, TrainState, readable_copies
from megalite.config.derive import Derived, derive
from megalite.config.loader import UnresolvedConfig, dump_config
from megalite.config.schema import Config
from megalite.data.build import Datasets, build_datasets
from megalite.data.samplers import BatchLoader
from megalite.data.tokenizers import Tokenizer, resolve_tokenizer
from megalite.metrics.flops import training_flops_per_sequence
from megalite.metrics.sinks import JsonlSink, Sink, TensorBoardSink
from megalite.metrics.timers import Timers
from megalite.model.gpt import GPTModel
from megalite.model.module import ModelChunk, Placement, TransformerConfig
from megalite.optimizer.distrib_optimizer import DistributedOptimizer
from megalite.optimizer.grad_scaler import build_grad_scaler
from megalite.optimizer.optimizer import MixedPrecisionOptimizer
from megalite.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleConfig
from megalite.parallel.ddp import DistributedDataParallel
from megalite.parallel.p2p import StageLink
from megalite.parallel.random import Dropout, seed_everything
from megalite.parallel.state import ParallelState
from megalite.resilience.signals import ExitSignal
from megalite.training.context import TrainContext
from megalite.training.exit import log_state_hash
from megalite.training.profiling import Profiler
from megalite.training.report import Reporter
from megalite.training.start import load_start, resolve_config
from megalite.utils.dist import failing_together, initialize_world
from megalite.utils.errors import DataError
from megalite.utils.files import FaultHook, no_fault
from megalite.utils.logging import setup_logging

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def training_run(config: Config | UnresolvedConfig, hook: FaultHook = no_fault) -> Iterator[TrainContext]:
    """Build the run that ``config`` describes, restored from its checkpoint, and take it down at the end.

    Collective over all ranks that torchrun started. ``hook`` is called before each file operation of a save.
    """
    started = time.monotonic()
    training = config.training
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    setup_logging(int(os.environ.get("RANK", "0")), config.logging.log_level)
    if isinstance(config, Config):
        # What can be refused by each rank for itself is, before any waits for the others.
        derive(config, world_size)
    joins_world = not dist.is_initialized()
    device = _device()
    world = initialize_world(world_size, config.parallel.distributed_timeout_minutes)
    # Not before: a signal ends a rank that waits for the others to join at once, as there is nothing to save yet. A
    # handler would have to wait as well, for ranks that may have been ended by the same signal while they started.
    exit_signal = ExitSignal(training.exit_signal, training.exit_signal_handler)
    with contextlib.ExitStack() as teardown:
        if joins_world:
            teardown.callback(_leave_world)
        teardown.callback(exit_signal.restore)
        checkpoints = CheckpointManager(config.checkpoint, world, hook)
        teardown.callback(checkpoints.close)
        decision = checkpoints.resolve_start()
        config = resolve_config(config, checkpoints, decision)
        ctx = _build(config, derive(config, world_size), device, exit_signal, checkpoints, decision)
        teardown.callback(ctx.reporter.close)
        teardown.callback(ctx.profiler.close)
        ctx.started = started
        ctx.reporter.restart_clock()
        yield ctx


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        # One thread per rank unless the user says otherwise: ranks share the cores, and threads of several ranks on
        # one core make all of them slower.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _build(
    config: Config,
    derived: Derived,
    device: torch.device,
    exit_signal: ExitSignal,
    checkpoints: CheckpointManager,
    decision: LoadDecision | None,
) -> TrainContext:
    sizes = config.parallel
    parallel = ParallelState.create(
        sizes.tensor_model_parallel_size,
        sizes.pipeline_model_parallel_size,
        sizes.context_parallel_size,
        sizes.expert_model_parallel_size,
        sizes.distributed_timeout_minutes,
    )
    with failing_together(parallel.world, "opening the tokenizer"):
        tokenizer, vocab_size = resolve_tokenizer(config.data, config.model.vocab_size)
    state = build_state(config, derived, parallel, device, vocab_size)
    _announce(state, device)
    # Before the data: which step it is, and so where in the data it stands, is known when one could be loaded.
    start = load_start(state, checkpoints, decision)
    datasets = _datasets(state, tokenizer, start.index_sizes)
    state.index_sizes, state.data_definitions = datasets.index_sizes, datasets.definitions
    timers = Timers(config.logging.timing_log_level, device)
    flops_per_sequence = _flops_per_sequence(config, derived, vocab_size)
    start.name_changes(state)
    train_iters = last_iteration(derived, config, state.progress)
    reporter = _reporter(config, parallel, timers, train_iters, flops_per_sequence)
    ctx = TrainContext(
        state=state,
        device=device,
        link=StageLink(
            parallel.pp,
            parallel.channels,
            state.chunks[0].module.activation_shape(derived.micro_batch_size),
            _dtype(config),
            device,
        ),
        train_batches=None,
        valid_batches={},
        checkpoints=checkpoints,
        readable_copies=_readable_copies(state, tokenizer),
        exit_signal=exit_signal,
        reporter=reporter,
        profiler=Profiler(config.profiling, parallel.world.rank),
        timers=timers,
        flops_per_sequence=flops_per_sequence,
    )
    if start.decision is not None:
        log_state_hash(ctx, "loaded")
    reporter.started(state.progress, state.run_id)
    _attach_data(ctx, datasets)
    return ctx


def build_state(
    config: Config, derived: Derived, parallel: ParallelState, device: torch.device, vocab_size: int
) -> TrainState:
    """Build model, buffers, optimizer and schedule with their start values. Collective over all ranks."""
    training, sizes = config.training, config.parallel
    tracker = seed_everything(training.seed, parallel, device, config.rng.data_parallel_random_init)
    shape = transformer_config(config, derived, vocab_size)
    placement = Placement(parallel, Dropout(tracker), device)
    chunks = []
    for chunk in _model_chunks(derived, parallel):
        model = GPTModel(shape, placement, chunk)
        # Equal on all data-parallel ranks, also with data_parallel_random_init, which Megatron ends with a broadcast.
        model.initialize(training.seed)
        chunks.append(
            DistributedDataParallel(
                model,
                parallel,
                grad_dtype=torch.float32 if derived.accumulate_allreduce_grads_in_fp32 else None,
                bucket_size=derived.ddp_bucket_size,
                gather_gradients=not sizes.use_distributed_optimizer,
                overlap_grad_reduce=sizes.overlap_grad_reduce,
                overlap_param_gather=sizes.overlap_param_gather,
            )
        )
    optimizer_class = DistributedOptimizer if sizes.use_distributed_optimizer else MixedPrecisionOptimizer
    optimizer = optimizer_class(chunks, config.optimizer, build_grad_scaler(config.precision))
    return TrainState(
        config=config,
        derived=derived,
        parallel=parallel,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=OptimizerParamScheduler(optimizer.param_groups, schedule_config(config, derived)),
        tracker=tracker,
        progress=TrainProgress(),
        vocab_size=vocab_size,
        run_id=parallel.world.broadcast_object(uuid.uuid4().hex[:12]),
    )


def _model_chunks(derived: Derived, parallel: ParallelState) -> list[ModelChunk]:
    """Return this stage's chunks of the model."""
    layout = derived.layer_layout[parallel.pp.rank]
    return [
        ModelChunk(
            first_layer=first,
            num_layers=count,
            is_first=parallel.pp.is_first and index == 0,
            is_last=parallel.pp.is_last and index == len(layout) - 1,
        )
        for index, (first, count) in enumerate(layout)
    ]


_SAME_IN_MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "norm_epsilon",
)
_SAME_IN_DERIVED = (
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "sequence_parallel",
)


def transformer_config(config: Config, derived: Derived, vocab_size: int) -> TransformerConfig:
    """Return the resolved numbers of the model."""
    training = config.training
    return TransformerConfig(
        **{name: getattr(config.model, name) for name in _SAME_IN_MODEL},
        **{name: getattr(derived, name) for name in _SAME_IN_DERIVED},
        vocab_size=vocab_size,
        padded_vocab_size=derived.padded_vocab_size(vocab_size),
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers or 1,
        dtype=_dtype(config),
    )


def _dtype(config: Config) -> torch.dtype:
    if config.precision.float64:
        return torch.float64
    if config.precision.fp16:
        return torch.float16
    return torch.bfloat16 if config.precision.bf16 else torch.float32


def schedule_config(config: Config, derived: Derived) -> ScheduleConfig:
    """Return the schedule of the run, in samples."""
    optimizer, samples = config.optimizer, derived.schedule
    return ScheduleConfig(
        **asdict(samples),
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_init=optimizer.lr_warmup_init,
        lr_decay_style=optimizer.lr_decay_style,
        lr_wsd_decay_style=optimizer.lr_wsd_decay_style,
        wd_incr_style=optimizer.weight_decay_incr_style,
    )


# Data


def last_iteration(derived: Derived, config: Config, progress: TrainProgress) -> int:
    """Return the iteration that the run ends with, from where it stands: batches may have had another size before."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    left = derived.batches.iterations_until(derived.train_samples, progress.consumed_train_samples)
    return progress.iteration + left


def samples_per_split(config: Config, derived: Derived, progress: TrainProgress) -> dict[str, int]:
    """Return how many samples each split is asked for over the whole run, from where it stands."""
    training = config.training
    train, valid = derived.train_samples, 0
    if training.train_iters is not None:
        # From the samples consumed so far: batches may have had another size before a resume.
        left = max(0, training.train_iters - progress.iteration)
        train = derived.batches.samples_after(left, progress.consumed_train_samples)
    if training.eval_interval is not None and training.eval_iters > 0:
        interval = training.eval_interval
        validations = last_iteration(derived, config, progress) // interval + 1 - progress.iteration // interval
        consumed = max(progress.consumed_valid_samples.values(), default=0)
        valid = consumed + max(1, validations) * training.eval_iters * derived.eval_global_batch_size
    return {"train": train, "valid": valid}


def _datasets(state: TrainState, tokenizer: Tokenizer, index_sizes: Mapping[str, list[int]]) -> Datasets:
    """Open the data of the rest of the run. Collective over all ranks."""
    config = state.config
    num_samples = samples_per_split(config, state.derived, state.progress)
    with failing_together(state.parallel.world, "opening the data"):
        try:
            return build_datasets(
                config.data,
                num_samples=num_samples,
                seq_length=config.model.seq_length,
                seed=config.training.seed,
                tokenizer=tokenizer,
                vocab_size=state.vocab_size,
                index_sizes=index_sizes,
            )
        except MemoryError as error:
            raise DataError(
                f"the sample indices for {num_samples} samples do not fit into memory: {error}. Shorten the run "
                "(training.train_iters or train_samples)"
            ) from error


def _attach_data(ctx: TrainContext, datasets: Datasets) -> None:
    """Give the stages that see tokens or labels their loaders; each rank reads for itself."""
    pp, progress = ctx.parallel.pp, ctx.progress
    # Which document a position belongs to matters to the attention of every stage.
    reads_data = pp.is_first or pp.is_last or ctx.config.data.reset_attention_mask

    def loader(name: str, consumed: int, micro_batch_size: int) -> BatchLoader | None:
        if not reads_data:
            return None
        return BatchLoader(
            datasets.by_name[name],
            micro_batch_size=micro_batch_size,
            dp_rank=ctx.parallel.dp.rank,
            dp_size=ctx.parallel.dp.size,
            consumed_samples=consumed,
            num_workers=ctx.config.data.num_workers,
            pin_memory=ctx.device.type == "cuda",
            name=name,
        )

    ctx.train_batches = loader("train", progress.consumed_train_samples, ctx.derived.micro_batch_size)
    ctx.valid_batches = {
        name: loader(name, progress.consumed_valid_samples.get(name, 0), ctx.derived.eval_micro_batch_size)
        for name in datasets.valid
    }


# Reports


def _reporter(
    config: Config, parallel: ParallelState, timers: Timers, train_iters: int, flops_per_sequence: float
) -> Reporter:
    sinks: list[Sink] = []
    save = config.checkpoint.save
    with failing_together(parallel.world, "opening the metric files"):
        if parallel.world.is_first:
            if config.logging.metrics_jsonl and save is not None:
                sinks.append(JsonlSink(save / "metrics.jsonl"))
            if config.logging.tensorboard_dir is not None:
                sinks.append(TensorBoardSink(config.logging.tensorboard_dir))
    return Reporter(
        parallel,
        sinks,
        config.logging,
        train_iters=train_iters,
        seq_length=config.model.seq_length,
        flops_per_sequence=flops_per_sequence,
        timers=timers,
    )


def _readable_copies(state: TrainState, tokenizer: Tokenizer) -> Callable[[], dict[Path, bytes]]:
    config_text = dump_config(state.config)
    # Read once and by the rank that writes them: the tokenizer's own files go with every checkpoint.
    assets = tokenizer.asset_files() if state.parallel.world.is_first else []
    files = {Path("tokenizer") / path.name: path.read_bytes() for path in assets}
    return lambda: readable_copies(state, config_text, tokenizer.describe()) | files


def _flops_per_sequence(config: Config, derived: Derived, vocab_size: int) -> float:
    return training_flops_per_sequence(
        num_layers=config.model.num_layers,
        hidden_size=config.model.hidden_size,
        ffn_hidden_size=derived.ffn_hidden_size,
        attention_width=config.model.num_attention_heads * derived.kv_channels,
        key_value_width=derived.num_query_groups * derived.kv_channels,
        is_gated=config.model.swiglu,
        seq_length=config.model.seq_length,
        vocab_rows=derived.padded_vocab_size(vocab_size),
    )


def _announce(state: TrainState, device: torch.device) -> None:
    derived = state.derived
    logger.info(
        "%s on %d rank(s), %s; %d parameters on this stage of rank 0; global batch %d = %d micro-batches of %d x DP %d",
        state.parallel,
        state.parallel.world.size,
        device.type,
        sum(p.numel() for chunk in state.chunks for _, p in chunk.parameters()),
        derived.global_batch_size,
        derived.num_microbatches,
        derived.micro_batch_size,
        state.parallel.dp.size,
    )
    if state.config.checkpoint.save is None:
        logger.warning("checkpoint.save is not set: nothing is saved, also not at the end or when a signal comes")
