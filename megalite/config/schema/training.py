"""Sections that say how the weights move: training, optimizer, rng."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal

from megalite.config.checks import require, require_above, require_at_least, require_at_most_one, require_probability

# The system delivers the first two to nobody; after a handler for the others Python repeats the faulty instruction.
_UNCATCHABLE_SIGNALS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(kw_only=True, frozen=True)
class TrainingConfig:
    """Batch sizes, the length of the run, validation, and when to stop early."""

    micro_batch_size: int
    """Samples in one forward pass of one data-parallel rank."""

    global_batch_size: int | None = None
    """Samples in one optimizer step; left out, micro_batch_size x data-parallel size. Set it, and the run does not
    change with the number of ranks."""

    rampup_batch_size: list[int] | None = None
    """Start, increment and samples: the global batch grows in equal steps from start to global_batch_size over that
    many samples."""

    step_batch_size_schedule: str | None = None
    """Global batch sizes from given numbers of tokens on, such as "0:768 250B:1536"; takes the place of
    global_batch_size."""

    iterations_to_skip: list[int] = field(default_factory=list)
    """Iterations whose data is consumed without an update, to get around bad samples."""

    train_iters: int | None = None
    """Length of the run in iterations. Exactly one of train_iters and train_samples is given."""

    train_samples: int | None = None
    """Length of the run in samples. The last samples, too few for a whole global batch, are not trained on."""

    seed: int = 1234
    """Seed of weights, dropout and data order."""

    eval_interval: int | None = None
    """Iterations between two validations; left out, there is none during training."""

    eval_iters: int = 100
    """Global batches in one validation; 0 switches validation off."""

    eval_micro_batch_size: int | None = None
    """Samples in one forward pass of a validation; left out, micro_batch_size."""

    eval_global_batch_size: int | None = None
    """Samples in one of the eval_iters batches of a validation; left out, the last global batch size."""

    calculate_per_token_loss: bool = False
    """Let every token that counts weigh the same, over the whole global batch; otherwise every micro-batch does."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """Compute activations again in the backward pass, to save memory: those inside attention, or of whole layers."""

    recompute_method: Literal["uniform", "block"] | None = None
    """With full: all layers in runs of recompute_num_layers, or only the first recompute_num_layers of a stage."""

    recompute_num_layers: int | None = None
    """Length of a run, or number of layers; see recompute_method."""

    exit_interval: int | None = None
    """Save and stop when the iteration is divisible by this number."""

    exit_duration_in_mins: float | None = None
    """Save and stop when the job has run for this many minutes."""

    exit_signal_handler: bool = True
    """Save and stop when any rank receives exit_signal."""

    exit_signal: str = "SIGTERM"
    """Name of the signal that asks the job to save and stop."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "seed"):
            require_at_least(f"training.{name}", getattr(self, name), 1)
        require(
            self.seed < 2**31,
            f"training.seed is {self.seed}, but NumPy takes 32 bits, of which ranks need some; give less than 2^31",
            "training.seed",
        )
        require_at_least("training.eval_interval", self.eval_interval, 1)
        require_at_least("training.eval_iters", self.eval_iters, 0)
        require_at_least("training.exit_interval", self.exit_interval, 1)
        require_above("training.exit_duration_in_mins", self.exit_duration_in_mins, 0)
        lengths = ("train_iters", "train_samples")
        are_set = (self.train_iters is not None, self.train_samples is not None)
        require_at_most_one("training", lengths, are_set, "the run has one length")
        require(
            any(are_set),
            "training.train_iters and training.train_samples are both left out, but the run needs a length; set one of "
            "them",
            "training.train_iters",
            "training.train_samples",
        )
        self._check_batches()
        self._check_recompute()
        self._check_signal()

    def _check_batches(self) -> None:
        for name in ("eval_micro_batch_size", "eval_global_batch_size"):
            require_at_least(f"training.{name}", getattr(self, name), 1)
        ramp = self.rampup_batch_size
        require(
            ramp is None or (len(ramp) == 3 and min(ramp) >= 1),
            f"training.rampup_batch_size is {ramp}, but takes three numbers above 0; give start, increment, samples",
            "training.rampup_batch_size",
        )
        require(
            ramp is None or self.global_batch_size is not None,
            f"training.rampup_batch_size is {ramp}, but training.global_batch_size, where it ends, is not set; set it",
            "training.rampup_batch_size",
            "training.global_batch_size",
        )
        names = ("global_batch_size", "step_batch_size_schedule")
        are_set = tuple(getattr(self, name) is not None for name in names)
        require_at_most_one("training", names, are_set, "both say how large the global batch is")
        require(
            all(iteration >= 1 for iteration in self.iterations_to_skip),
            f"training.iterations_to_skip is {self.iterations_to_skip}, but iterations count from 1; correct it",
            "training.iterations_to_skip",
        )

    def _check_recompute(self) -> None:
        require_at_least("training.recompute_num_layers", self.recompute_num_layers, 1)
        is_full = self.recompute_granularity == "full"
        for name in ("recompute_method", "recompute_num_layers"):
            value = getattr(self, name)
            require(
                (value is not None) == is_full,
                f"training.{name} is {value} and training.recompute_granularity is {self.recompute_granularity}, but "
                "the first belongs to 'full' and is needed there; set both accordingly",
                f"training.{name}",
                "training.recompute_granularity",
            )

    def _check_signal(self) -> None:
        usable = sorted(s.name for s in signal.Signals if s.name not in _UNCATCHABLE_SIGNALS)
        require(
            self.exit_signal in usable,
            f"training.exit_signal is {self.exit_signal!r}, not the name of a signal that a process can handle; "
            f"choose one such as SIGTERM, SIGUSR1 or SIGINT (all: {', '.join(usable)})",
            "training.exit_signal",
        )


@dataclass(kw_only=True, frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate and weight-decay schedules."""

    optimizer: Literal["adam"] = "adam"
    """Update rule: Adam with decoupled weight decay."""

    lr: float
    """Highest learning rate, reached at the end of the warmup."""

    min_lr: float = 0.0
    """Lowest learning rate, reached at the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay from lr to min_lr. WSD is warmup, stable, decay."""

    lr_decay_iters: int | None = None
    """Iterations after which the rate is min_lr; left out, train_iters."""

    lr_decay_samples: int | None = None
    """Samples after which the rate is min_lr; left out, train_samples. Only with train_samples."""

    lr_warmup_iters: int = 0
    """Iterations over which the rate rises in a line from lr_warmup_init to lr. Only with train_iters."""

    lr_warmup_samples: int = 0
    """Samples over which the rate rises in a line from lr_warmup_init to lr. Only with train_samples."""

    lr_warmup_fraction: float | None = None
    """Warmup as a part of the decay length, instead of a count."""

    lr_warmup_init: float = 0.0
    """Learning rate at the first step of the warmup."""

    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of the last phase of WSD. Only with train_iters."""

    lr_wsd_decay_samples: int | None = None
    """Samples of the last phase of WSD. Only with train_samples."""

    weight_decay: float = 0.01
    """Decoupled weight decay. Biases and norm parameters are not decayed."""

    start_weight_decay: float | None = None
    """Weight decay at the start. Given together with end_weight_decay, it takes the place of weight_decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end of the run."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start_weight_decay to end_weight_decay."""

    override_opt_param_scheduler: bool = False
    """If the schedule in a checkpoint differs from this one, go on with this one."""

    use_checkpoint_opt_param_scheduler: bool = False
    """If the schedule in a checkpoint differs from this one, go on with the checkpoint's."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.999
    """Decay of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        non_negative = ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples", "clip_grad")
        for name in (*non_negative, "weight_decay", "start_weight_decay", "end_weight_decay"):
            require_at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            require_at_least(f"optimizer.{name}", getattr(self, name), 1)
        require_at_most_one(
            "optimizer",
            ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
            (self.override_opt_param_scheduler, self.use_checkpoint_opt_param_scheduler),
            "they take opposite sides",
        )
        for name in ("lr_warmup_fraction", "adam_beta1", "adam_beta2"):
            require_probability(f"optimizer.{name}", getattr(self, name))
        require_above("optimizer.adam_eps", self.adam_eps, 0)
        for name in ("min_lr", "lr_warmup_init"):
            value = getattr(self, name)
            require(
                value <= self.lr,
                f"optimizer.{name} is {value}, above optimizer.lr {self.lr}; lower it, or raise lr",
                f"optimizer.{name}",
                "optimizer.lr",
            )
        self._check_lr_schedule()
        self._check_weight_decay()

    def _check_lr_schedule(self) -> None:
        for name in ("lr_decay", "lr_wsd_decay"):
            names = (f"{name}_iters", f"{name}_samples")
            are_set = (getattr(self, names[0]) is not None, getattr(self, names[1]) is not None)
            require_at_most_one("optimizer", names, are_set, "a schedule is counted in one unit")
        require_at_most_one(
            "optimizer",
            ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
            (self.lr_warmup_iters > 0, self.lr_warmup_samples > 0, self.lr_warmup_fraction is not None),
            "they say the same thing in different ways",
        )
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            require(
                getattr(self, name) is None or self.lr_decay_style == "WSD",
                f"optimizer.{name} is {getattr(self, name)}, but optimizer.lr_decay_style is {self.lr_decay_style!r}, "
                f"which has no such phase; set lr_decay_style to WSD, or {name} to null",
                f"optimizer.{name}",
                "optimizer.lr_decay_style",
            )

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        keys = ("optimizer.start_weight_decay", "optimizer.end_weight_decay", "optimizer.weight_decay_incr_style")
        require(
            (start is None) == (end is None),
            f"optimizer.start_weight_decay is {start} and optimizer.end_weight_decay is {end}; set both, or neither",
            *keys[:2],
        )
        if self.weight_decay_incr_style == "constant":
            require(
                start == end,
                f"optimizer.weight_decay_incr_style is 'constant', but start_weight_decay is {start} and "
                f"end_weight_decay is {end}; make them equal, or choose the style linear or cosine",
                *keys,
            )
        else:
            require(
                start is not None,
                f"optimizer.weight_decay_incr_style is {self.weight_decay_incr_style!r}, but start_weight_decay and "
                "end_weight_decay are left out; set both, or the style to constant",
                keys[2],
            )


@dataclass(kw_only=True, frozen=True)
class RngConfig:
    """Random number streams beyond training.seed."""

    data_parallel_random_init: bool = False
    """Give every data-parallel rank its own random streams when weights are initialised."""
