"""Sections that surround the training itself: checkpoint, logging, resilience, profiling."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalite.config.checks import require, require_at_least


@dataclass(kw_only=True, frozen=True)
class CheckpointConfig:
    """When and where training state is written, and where the first start comes from.

    If the folder ``save`` has a published checkpoint, the run resumes from it. ``load``, ``ckpt_step``, ``finetune``,
    ``no_load_optim``, ``no_load_rng``, ``load_main_params_from_ckpt`` and ``pretrained_checkpoint`` describe the first
    start only.
    """

    save: Path | None = None
    """Folder that receives ``iter_0000100/``; leave out to save nothing."""

    save_interval: int | None = None
    """Iterations between two regular checkpoints; left out, one is written when the run ends or stops."""

    load: Path | None = None
    """Folder with checkpoints of the run to continue from, if ``save`` has none."""

    ckpt_step: int | None = None
    """Iteration to load from ``load``, whatever its tracker names."""

    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Layout on disk."""

    finetune: bool = False
    """Take only the weights from the loaded checkpoint, and start at iteration 0."""

    no_load_optim: bool = False
    """Do not load optimizer and schedules; master weights are set from the loaded weights. Of a checkpoint that was
    saved with no_save_optim the schedules are loaded all the same."""

    no_load_rng: bool = False
    """Do not load the states of the random number generators."""

    load_main_params_from_ckpt: bool = False
    """Set fp32 master weights from the checkpoint's weights with all their digits, not from the run's rounded ones.
    Needs no_load_optim; without effect where weights are their own masters."""

    use_checkpoint_args: bool = False
    """Take those settings of the section ``model`` that are left out from the checkpoint. One that is given must be
    the checkpoint's."""

    no_save_optim: bool = False
    """Write no optimizer state, only the schedules. Such a checkpoint cannot be resumed from; it can be started from
    with no_load_optim or finetune."""

    no_save_rng: bool = False
    """Write no states of random number generators."""

    pretrained_checkpoint: Path | None = None
    """Folder with a checkpoint whose weights the run starts from, if neither ``save`` nor ``load`` has one."""

    exit_on_missing_checkpoint: bool = True
    """Stop if ``load`` or ``pretrained_checkpoint`` is given and has no checkpoint; off, start from random weights."""

    dist_ckpt_optim_fully_reshardable: bool = True
    """Store optimizer state by parameter, for any topology. Off, by gradient bucket, as Megatron does by default: then
    TP and PP cannot change, and ``use_distributed_optimizer`` must be on."""

    ckpt_fully_parallel_save: bool = True
    """Spread what several data-parallel ranks hold over them, so that each writes an equal share."""

    ckpt_fully_parallel_save_process_group: Literal["dp", "ep_dp"] = "dp"
    """Ranks over which a save is spread; they are the same without expert parallelism."""

    ckpt_fully_parallel_load: bool = False
    """Read once what several data-parallel ranks need, and exchange it; for disks slower than the network."""

    ckpt_fully_parallel_load_process_group: Literal["dp", "ep_dp"] = "dp"
    """Ranks that share the reading; they are the same without expert parallelism."""

    ckpt_fully_parallel_load_exchange_algo: Literal["broadcast", "gather_rounds", "gather_object"] = "broadcast"
    """How the ranks exchange what they read. The bits do not depend on it."""

    ckpt_load_validate_sharding_integrity: bool = True
    """Check that the ranks together load every element of each tensor exactly once."""

    ckpt_assume_constant_structure: bool = False
    """Plan the first save only, without looking at later ones whether the set of tensors is still the same."""

    dist_ckpt_workers: int = 1
    """Files that a rank writes at the same time, each in its own thread."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "ignore_all"
    ] = "raise_all"
    """What happens about keys that only the run (unexpected) or only the checkpoint (missing) has."""

    verify_integrity: Literal["off", "xxh3", "sha256"] = "xxh3"
    """Hashes that a save stores and a load compares: ``xxh3`` of each MiB, ``sha256`` of each file as Megatron does. A
    load compares the kind that the checkpoint was saved with."""

    ckpt_load_require_integrity: bool | None = None
    """Refuse a checkpoint without hashes: on, every one; off, none, with one WARNING. Not set: one that was saved with
    hashes and has lost them."""

    async_save: bool = False
    """Copy the state to host memory and write it while training goes on; it is published once every rank has written.
    A save at the end of the run is waited for. Takes as much host memory as the rank's part of the state."""

    async_save_on_busy: Literal["wait", "skip", "error"] = "wait"
    """What a save does that is due while the one before is still being written: wait for it, be left out with one
    WARNING, or end the run."""

    async_save_on_failure: Literal["stop", "continue"] = "stop"
    """What happens when a save could not be written while training went on: end the run, or go on with one ERROR; the
    tracker then still names the step before."""

    fallback: Literal["error", "newest_complete"] = "error"
    """What happens when the step that the tracker of ``save`` names is missing, incomplete or damaged: stop, or go on
    from the newest complete older one, with a warning for each step that was refused."""

    log_state_hash: bool = False
    """Log a fingerprint of weights and moments at each save and load. It does not depend on the topology."""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.save_interval", self.save_interval, 1)
        require_at_least("checkpoint.dist_ckpt_workers", self.dist_ckpt_workers, 1)
        require_at_least("checkpoint.ckpt_step", self.ckpt_step, 0)
        require(
            self.save_interval is None or self.save is not None,
            f"checkpoint.save_interval is {self.save_interval}, but checkpoint.save is not set, so nothing would be "
            "written; add a folder to save into, or set save_interval to null as well",
            "checkpoint.save_interval",
            "checkpoint.save",
        )
        require(
            self.ckpt_step is None or self.load is not None,
            f"checkpoint.ckpt_step is {self.ckpt_step}, but checkpoint.load is not set; name the folder to load from, "
            "or leave ckpt_step out",
            "checkpoint.ckpt_step",
            "checkpoint.load",
        )
        for name in ("finetune", "no_load_optim", "no_load_rng", "use_checkpoint_args"):
            require(
                not getattr(self, name) or self.load is not None or self.pretrained_checkpoint is not None,
                f"checkpoint.{name} is on, but neither checkpoint.load nor checkpoint.pretrained_checkpoint is set, so "
                f"it has nothing to act on; name a checkpoint to start from, or switch {name} off",
                f"checkpoint.{name}",
                "checkpoint.load",
                "checkpoint.pretrained_checkpoint",
            )
        self._check_load_policy()

    def _check_load_policy(self) -> None:
        require(
            not self.load_main_params_from_ckpt or self.no_load_optim,
            "checkpoint.load_main_params_from_ckpt is on, but checkpoint.no_load_optim is off, so that master weights "
            "come from the optimizer's state; switch no_load_optim on, or load_main_params_from_ckpt off",
            "checkpoint.load_main_params_from_ckpt",
            "checkpoint.no_load_optim",
        )
        require(
            not self.use_checkpoint_args or self.exit_on_missing_checkpoint,
            "checkpoint.use_checkpoint_args is on, but checkpoint.exit_on_missing_checkpoint is off; without a "
            "checkpoint there would be no model to start with, so switch one of them",
            "checkpoint.use_checkpoint_args",
            "checkpoint.exit_on_missing_checkpoint",
        )
        self._check_first_start_is_elsewhere()
        require(
            self.fallback == "error" or self.save is not None,
            f"checkpoint.fallback is {self.fallback!r}, but checkpoint.save is not set, and only its steps can replace "
            "each other; add the folder, or leave fallback out",
            "checkpoint.fallback",
            "checkpoint.save",
        )

    def _check_first_start_is_elsewhere(self) -> None:
        """What describes a first start would never act on a folder whose steps are always resumed whole."""
        if self.save is None:
            return
        for key, names in (
            ("load", ("ckpt_step", "finetune", "no_load_optim", "no_load_rng")),
            ("pretrained_checkpoint", ("pretrained_checkpoint",)),
        ):
            root = getattr(self, key)
            is_same = root is not None and os.path.abspath(root) == os.path.abspath(self.save)
            for name in names:
                value = getattr(self, name)
                require(
                    not is_same or value is None or value is False,
                    f"checkpoint.{name} is {_shown(value)}, but checkpoint.{key} and checkpoint.save are one folder, "
                    f"{self.save}, whose published step is resumed whole; name another folder to save into, or leave "
                    f"{name} out",
                    f"checkpoint.{name}",
                    "checkpoint.save",
                )


def _shown(value: object) -> object:
    return "on" if value is True else value


@dataclass(kw_only=True, frozen=True)
class LoggingConfig:
    """What is reported, how often and where."""

    log_interval: int = 10
    """Iterations between two progress lines."""

    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """Least important messages that are shown."""

    log_throughput: bool = False
    """Also show model TFLOP/s of a rank on the progress line; metrics.jsonl always has it."""

    timing_log_level: int = 0
    """Show how long parts of an iteration take: 1 the large ones, 2 all. Costs a device synchronisation for each."""

    metrics_jsonl: bool = True
    """Write metrics to ``metrics.jsonl`` in the save folder. Without effect if nothing is saved."""

    tensorboard_dir: Path | None = None
    """Folder for TensorBoard event files; needs the extra ``tensorboard``."""

    def __post_init__(self) -> None:
        require_at_least("logging.log_interval", self.log_interval, 1)
        require(
            0 <= self.timing_log_level <= 2,
            f"logging.timing_log_level is {self.timing_log_level}, but must be 0, 1 or 2; choose one",
            "logging.timing_log_level",
        )


@dataclass(kw_only=True, frozen=True)
class ResilienceConfig:
    """What the run does about its own faults."""

    check_for_nan_in_loss_and_grad: bool = True
    """Stop the run when the loss or the gradient norm is not finite; off, such an update is skipped."""


@dataclass(kw_only=True, frozen=True)
class ProfilingConfig:
    """A torch profiler trace of a few iterations."""

    profile: bool = False
    """Record a trace on ``profile_ranks``."""

    profile_step_start: int = 10
    """First iteration that is recorded."""

    profile_step_end: int = 12
    """Iteration before which the recording ends."""

    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Global ranks that record; those the run does not have are ignored."""

    profile_dir: Path | None = None
    """Folder for the traces."""

    def __post_init__(self) -> None:
        require_at_least("profiling.profile_step_start", self.profile_step_start, 0)
        require(
            self.profile_step_end > self.profile_step_start,
            f"profiling.profile_step_end is {self.profile_step_end}, not after profiling.profile_step_start "
            f"{self.profile_step_start}; raise it, or lower profile_step_start",
            "profiling.profile_step_end",
            "profiling.profile_step_start",
        )
        require(
            len(self.profile_ranks) > 0 and min(self.profile_ranks) >= 0,
            f"profiling.profile_ranks is {self.profile_ranks}, but must name at least one rank, none negative; write "
            "for example 0,1",
            "profiling.profile_ranks",
        )
        require(
            not self.profile or self.profile_dir is not None,
            "profiling.profile is on, but profiling.profile_dir is not set; name a folder for the traces",
            "profiling.profile",
            "profiling.profile_dir",
        )
