"""What follows from the configuration and the world size: checks of settings against each other, and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.batch_schedule import BatchSchedule, batch_schedule
from megalite.config.checks import require, require_at_least
from megalite.config.pipeline import StageLayout, layer_layout
from megalite.config.schema import Config


@dataclass(frozen=True)
class ScheduleSamples:
    """Numbers of the learning-rate and weight-decay schedule. Lengths are in samples, whatever unit the user chose."""

    lr_warmup_steps: float
    """A fraction of the decay length need not be a whole number."""

    lr_decay_steps: int
    wsd_decay_steps: int | None
    wd_incr_steps: int
    start_wd: float
    end_wd: float


@dataclass(frozen=True)
class Derived:
    """Numbers that the rest of the program needs and that the user may leave out, resolved for one world size."""

    world_size: int
    data_parallel_size: int
    micro_batch_size: int
    batches: BatchSchedule
    """Global batch size by consumed samples."""

    eval_micro_batch_size: int
    eval_global_batch_size: int

    train_iters: int

    train_samples: int
    """Size of the training index: the given number, which may exceed train_iters x global_batch_size."""

    sequence_parallel: bool
    """False at TP 1, where it has no meaning."""

    layer_layout: StageLayout
    """[stage][chunk] -> (first global layer from 0, number of layers)."""

    num_query_groups: int
    ffn_hidden_size: int
    kv_channels: int
    max_position_embeddings: int

    ddp_bucket_size: int
    """In parameters."""

    accumulate_allreduce_grads_in_fp32: bool
    """False only if gradients are kept in 16 bits or in double precision."""

    vocab_size_multiple: int
    schedule: ScheduleSamples

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step, at the end where it grows."""
        return self.batches.last

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one data-parallel rank in one iteration, at the end where the batch grows."""
        return self.microbatches_in(self.batches.last)

    def microbatches_in(self, batch_size: int) -> int:
        """Return the forward passes of one data-parallel rank for a global batch."""
        return batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def num_model_chunks(self) -> int:
        """Chunks of layers on each stage; 1 at PP 1, where more have no meaning."""
        return len(self.layer_layout[0])

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the embedding, a multiple of what divides them evenly over tensor-parallel ranks."""
        return -(-vocab_size // self.vocab_size_multiple) * self.vocab_size_multiple


def derive(config: Config, world_size: int) -> Derived:
    """Check ``config`` against ``world_size`` and resolve what was left out. Raises ConfigError."""
    check_config(config)
    model, parallel, training = config.model, config.parallel, config.training
    data_parallel_size = _data_parallel_size(config, world_size)
    batches = batch_schedule(config, data_parallel_size)
    train_iters, train_samples = _run_length(config, batches)
    # Gradients follow the weights' format, except that 16 bits would lose most of a long sum.
    precision = config.precision
    in_16_bits = (precision.bf16 or precision.fp16) and precision.accumulate_allreduce_grads_in_fp32 is False
    in_16_bits = in_16_bits or precision.grad_reduce_in_bf16
    derived = Derived(
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        micro_batch_size=training.micro_batch_size,
        batches=batches,
        eval_micro_batch_size=training.eval_micro_batch_size or training.micro_batch_size,
        eval_global_batch_size=_eval_global_batch_size(config, batches, data_parallel_size),
        train_iters=train_iters,
        train_samples=train_samples,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        layer_layout=layer_layout(config),
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        ffn_hidden_size=_ffn_hidden_size(config),
        kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        ddp_bucket_size=parallel.ddp_bucket_size or default_bucket_size(data_parallel_size),
        accumulate_allreduce_grads_in_fp32=not (in_16_bits or precision.float64),
        vocab_size_multiple=model.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size,
        schedule=schedule_in_samples(config, batches),
    )
    if len(batches.steps) == 1:
        check_batch_sizes(config, derived, 0)
    return derived


def schedule_in_samples(config: Config, batches: BatchSchedule) -> ScheduleSamples:
    """Return the schedule counted in samples, as Megatron's OptimizerParamScheduler takes it.

    Iterations are turned into samples by the batch sizes that they have, so that a warm-up of 10 iterations ends after
    10 iterations also where the batch grows.
    """
    training, optimizer = config.training, config.optimizer
    if training.train_iters is not None:
        length, in_samples = training.train_iters, batches.samples_after
        decay, warmup = optimizer.lr_decay_iters or length, optimizer.lr_warmup_iters
        wsd_decay = optimizer.lr_wsd_decay_iters
    else:
        length, in_samples = training.train_samples, int
        decay, warmup = optimizer.lr_decay_samples or length, optimizer.lr_warmup_samples
        wsd_decay = optimizer.lr_wsd_decay_samples
    lr_decay_steps = in_samples(decay)
    has_range = optimizer.start_weight_decay is not None
    return ScheduleSamples(
        # Not rounded: Megatron does not either, and the rates would differ in the last bits.
        lr_warmup_steps=(
            in_samples(warmup)
            if optimizer.lr_warmup_fraction is None
            else optimizer.lr_warmup_fraction * lr_decay_steps
        ),
        lr_decay_steps=lr_decay_steps,
        wsd_decay_steps=None if wsd_decay is None else lr_decay_steps - in_samples(max(0, decay - wsd_decay)),
        wd_incr_steps=in_samples(length),
        start_wd=optimizer.start_weight_decay if has_range else optimizer.weight_decay,
        end_wd=optimizer.end_weight_decay if has_range else optimizer.weight_decay,
    )


def check_config(config: Config) -> None:
    """Raise SettingError if settings of different sections contradict each other, whatever the world size."""
    _check_model(config)
    _check_data(config)
    _check_batch(config)
    _check_schedule_unit(config)
    _check_schedule_lengths(config)
    require(
        config.checkpoint.dist_ckpt_optim_fully_reshardable or config.parallel.use_distributed_optimizer,
        "checkpoint.dist_ckpt_optim_fully_reshardable is off, which stores the shards of a distributed optimizer, but "
        "parallel.use_distributed_optimizer is off; switch one of them on",
        "checkpoint.dist_ckpt_optim_fully_reshardable",
        "parallel.use_distributed_optimizer",
    )


def _check_model(config: Config) -> None:
    model, parallel = config.model, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    require(
        model.num_layers >= pp,
        f"parallel.pipeline_model_parallel_size is {pp}, more stages than layers (model.num_layers "
        f"{model.num_layers}), so that some would have none; use fewer stages",
        "parallel.pipeline_model_parallel_size",
        "model.num_layers",
    )
    cuts = [
        ("model.num_attention_heads", model.num_attention_heads, "parallel.tensor_model_parallel_size", tp),
        ("model.ffn_hidden_size", _ffn_hidden_size(config), "parallel.tensor_model_parallel_size", tp),
    ]
    if parallel.sequence_parallel:
        cuts.append(("model.seq_length", model.seq_length, "parallel.tensor_model_parallel_size", tp))
    for key, value, size_key, size in cuts:
        reason = ", with parallel.sequence_parallel on" if key == "model.seq_length" else ""
        require(
            value % size == 0,
            f"{key} is {value}, which {size_key} {size} does not divide{reason}; change one of them",
            key,
            size_key,
        )
    groups = model.num_query_groups or model.num_attention_heads
    require(
        groups % tp == 0 or tp % groups == 0,
        f"model.num_query_groups is {groups} and parallel.tensor_model_parallel_size {tp}, but one has to divide the "
        "other; change one of them",
        "model.num_query_groups",
        "parallel.tensor_model_parallel_size",
    )
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    rows = (model.num_attention_heads + 2 * groups) * width
    require(
        # Only where a group lies on several ranks; else whole groups do.
        rows % tp == 0,
        f"the query, key and value projection has {rows} rows: (model.num_attention_heads {model.num_attention_heads} "
        f"+ 2 x model.num_query_groups {groups}) x model.kv_channels {width}, which "
        f"parallel.tensor_model_parallel_size {tp} does not divide; change one of them",
        "model.num_query_groups",
        "model.kv_channels",
        "parallel.tensor_model_parallel_size",
    )
    require(
        _ffn_hidden_size(config) > 0,
        f"model.hidden_size is {model.hidden_size}, too small for swiglu's default inner width; set "
        "model.ffn_hidden_size",
        "model.hidden_size",
        "model.ffn_hidden_size",
    )
    layer_layout(config)


def _check_data(config: Config) -> None:
    model, training, data = config.model, config.training, config.data
    require(
        data.tokenizer_type != "NullTokenizer" or model.vocab_size is not None,
        "data.tokenizer_type is 'NullTokenizer', which has no vocabulary of its own, but model.vocab_size is not set; "
        "set it to the number of token ids in the data",
        "data.tokenizer_type",
        "model.vocab_size",
    )
    is_evaluated = training.eval_interval is not None and training.eval_iters > 0
    if not is_evaluated or data.mock_data:
        return
    if data.train_data_path is not None:
        require(
            data.valid_data_path is not None,
            f"training.eval_interval is {training.eval_interval}, but data.train_data_path is given without "
            "data.valid_data_path, so that there is nothing for validation; add it, or set eval_iters to 0",
            "training.eval_interval",
            "data.train_data_path",
        )
    elif not data.has_paths_per_split:
        require(
            data.split_weights()[1] > 0,
            f"training.eval_interval is {training.eval_interval}, but data.split {data.split!r} leaves nothing for "
            "validation; give the second number of split a share, or set eval_iters to 0",
            "training.eval_interval",
            "data.split",
        )


def _check_batch(config: Config) -> None:
    training = config.training
    micro, total, samples = training.micro_batch_size, training.global_batch_size, training.train_samples
    if total is None:
        return
    require(
        total % micro == 0,
        f"training.global_batch_size is {total}, which training.micro_batch_size {micro} does not divide; change one "
        "of them",
        "training.global_batch_size",
        "training.micro_batch_size",
    )
    require(
        samples is None or samples >= total,
        f"training.train_samples is {samples}, less than one global batch (training.global_batch_size {total}); raise "
        "it",
        "training.train_samples",
        "training.global_batch_size",
    )


def _check_schedule_unit(config: Config) -> None:
    chosen, other = ("iters", "samples") if config.training.train_iters is not None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(config.optimizer, f"{name}_{other}")
        require(
            # Not set is 0 for the warmup and None for the others.
            not value,
            f"optimizer.{name}_{other} is {value}, but the length of the run is training.train_{chosen}; count both in "
            f"one unit and use {name}_{chosen}",
            f"optimizer.{name}_{other}",
            f"training.train_{chosen}",
        )


def _check_schedule_lengths(config: Config) -> None:
    optimizer = config.optimizer
    unit = "iters" if config.training.train_iters is not None else "samples"
    length_key = f"training.train_{unit}"
    decay_key = f"optimizer.lr_decay_{unit}" if getattr(optimizer, f"lr_decay_{unit}") is not None else length_key
    # With a global batch of one, iterations and samples are the same number.
    schedule = schedule_in_samples(config, BatchSchedule(((0, 1),)))
    warmup, decay, wsd_decay = schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wsd_decay_steps
    warmup_key = f"optimizer.lr_warmup_{unit if optimizer.lr_warmup_fraction is None else 'fraction'}"
    require(
        warmup < decay,
        f"{warmup_key} is {warmup}, not less than {decay_key} {decay}, so the rate would never decay; shorten the "
        "warmup or lengthen the decay",
        warmup_key,
        decay_key,
    )
    if optimizer.lr_decay_style != "WSD":
        return
    wsd_key = f"optimizer.lr_wsd_decay_{unit}"
    require(
        wsd_decay is not None,
        f"optimizer.lr_decay_style is 'WSD', but {wsd_key} is not set; say how long the last phase is",
        "optimizer.lr_decay_style",
        wsd_key,
    )
    require(
        wsd_decay <= decay - warmup,
        f"{wsd_key} is {wsd_decay}, more than what {decay_key} {decay} leaves after a warmup of {warmup}; shorten it",
        wsd_key,
        decay_key,
        warmup_key,
    )


def default_bucket_size(dp_size: int) -> int:
    """Return Megatron's default: max(40e6, 1e6 * dp) elements."""
    return max(40_000_000, 1_000_000 * dp_size)


def check_batch_sizes(config: Config, derived: Derived, consumed_samples: int) -> None:
    """Raise SettingError unless this and all later global batches can be cut over the data-parallel ranks.

    Not a part of ``derive``: a resumed run need not care for sizes that it has left behind.
    """
    micro, dp = derived.micro_batch_size, derived.data_parallel_size
    for total in derived.batches.sizes_from(consumed_samples):
        _require_divided("training.global_batch_size", total, micro, dp)
        count, stages = total // (micro * dp), len(derived.layer_layout)
        require(
            derived.num_model_chunks == 1 or count % stages == 0,
            f"a step has {count} micro-batches (global batch {total} / micro_batch_size {micro} / data-parallel size "
            f"{dp}), which parallel.pipeline_model_parallel_size {stages} does not divide; with virtual stages it has "
            "to. Change one of them, or use no virtual stages",
            "training.global_batch_size",
            "parallel.pipeline_model_parallel_size",
        )


def _eval_global_batch_size(config: Config, batches: BatchSchedule, data_parallel_size: int) -> int:
    training = config.training
    total = training.eval_global_batch_size or batches.last
    if training.eval_interval is not None and training.eval_iters > 0:
        micro = training.eval_micro_batch_size or training.micro_batch_size
        _require_divided("training.eval_global_batch_size", total, micro, data_parallel_size)
    return total


def _require_divided(key: str, total: int, micro: int, data_parallel_size: int) -> None:
    samples_at_once = micro * data_parallel_size
    require(
        total % samples_at_once == 0,
        f"{key} is {total}, not a multiple of the micro-batch size {micro} x data-parallel size {data_parallel_size} = "
        f"{samples_at_once}; use {_nearby(total, samples_at_once)}, or change the others",
        key,
        "training.micro_batch_size",
    )


def _ffn_hidden_size(config: Config) -> int:
    model = config.model
    # Two thirds of 4h, down to a multiple of 64: a gated MLP has three matrices instead of two.
    default = int(4 * model.hidden_size * 2 / 3 / 64) * 64 if model.swiglu else 4 * model.hidden_size
    return model.ffn_hidden_size or default


def _data_parallel_size(config: Config, world_size: int) -> int:
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    require_at_least("the world size", world_size, 1)
    require(
        world_size % (tp * pp) == 0,
        f"the run has {world_size} ranks, not a multiple of parallel.tensor_model_parallel_size {tp} x "
        f"parallel.pipeline_model_parallel_size {pp} = {tp * pp}; start it on {_nearby(world_size, tp * pp)} ranks, or "
        "change the sizes",
        "parallel.tensor_model_parallel_size",
        "parallel.pipeline_model_parallel_size",
    )
    return world_size // (tp * pp)


def _run_length(config: Config, batches: BatchSchedule) -> tuple[int, int]:
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is not None:
        return iters, batches.samples_after(iters)
    first = batches.batch_size(0)
    require(
        samples >= first,
        f"training.train_samples is {samples}, less than one global batch of {first}; raise it, or use fewer ranks or "
        "a smaller batch",
        "training.train_samples",
    )
    return batches.iterations_until(samples), samples


def _nearby(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
