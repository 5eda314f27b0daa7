"""From a step on disk to a run that goes on: what to load, whether it fits, and what was not restored and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from megalite.checkpoint.changes import changed_data, changed_settings
from megalite.checkpoint.options import load_options
from megalite.checkpoint.paths import TRACKER, complete_iterations, iteration_folder, read_tracker
from megalite.checkpoint.state import (
    OPTIMIZER_KEYS,
    RNG_KEY,
    TrainProgress,
    TrainState,
    derive_random_states,
    is_used_by_megatron_alone,
    model_state,
    random_states_request,
    restore_random_states,
)
from megalite.config.loader import config_to_dict
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.core import is_complete
from megalite.dist_checkpointing.serialization import StrictHandling, load, load_common_state_dict
from megalite.utils.dist import Group, failing_together
from megalite.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class LoadMode(Enum):
    """What is taken from a checkpoint."""

    RESUME = "resume"
    """Everything: the run goes on."""
    START_FROM = "start from"
    """First start from ``checkpoint.load``: everything that the ``no_load_*`` settings leave."""
    WEIGHTS = "weights"
    """Weights only, at iteration 0 (``finetune``, ``pretrained_checkpoint``)."""


@dataclass(frozen=True)
class LoadDecision:
    """The step to load."""

    folder: Path
    iteration: int
    mode: LoadMode
    notes: tuple[str, ...] = ()
    """What the user should know about steps that were not taken."""


def resolve_load(config: CheckpointConfig) -> LoadDecision | None:
    """Return where this start comes from, or None for random weights.

    A published step in ``save`` wins: the same command restarts a job. Otherwise ``load`` and then
    ``pretrained_checkpoint`` say where the first start comes from.
    """
    notes: list[str] = []
    if config.save is not None:
        _check_save_folder(config.save)
        iteration = read_tracker(config.save)
        _check_tracker_is_not_lost(config.save, iteration)
        notes += _unpublished(config.save, iteration)
        if iteration is not None:
            return LoadDecision(_existing(config.save, iteration), iteration, LoadMode.RESUME, tuple(notes))
    for root, mode in (
        (config.load, LoadMode.WEIGHTS if config.finetune else LoadMode.START_FROM),
        (config.pretrained_checkpoint, LoadMode.WEIGHTS),
    ):
        if root is None:
            continue
        step = config.ckpt_step if root is config.load else None
        iteration = step if step is not None else read_tracker(root)
        if iteration is not None:
            return LoadDecision(_existing(root, iteration), iteration, mode, tuple(notes))
    named = [str(root) for root in (config.load, config.pretrained_checkpoint) if root is not None]
    if named and config.exit_on_missing_checkpoint:
        raise CheckpointError(_nothing_found(config, named))
    if named:
        notes.append(f"no checkpoint in {' or '.join(named)}: starting from random weights, as configured")
    for note in notes:
        logger.warning(note)
    return None


def _check_save_folder(save: Path) -> None:
    try:
        is_unusable = save.exists() and not save.is_dir()
    except OSError as error:
        raise ConfigError(f"checkpoint.save is {save}, which cannot be used: {error.strerror}; name another") from error
    if is_unusable:
        raise ConfigError(f"checkpoint.save is {save}, which is a file, not a folder; name a folder or remove the file")
    above = next((path for path in save.parents if path.exists()), None)
    if above is not None and not above.is_dir():
        raise ConfigError(
            f"checkpoint.save is {save}, but {above} is a file, not a folder; name a folder or remove the file"
        )


def _check_tracker_is_not_lost(save: Path, published: int | None) -> None:
    """Raise unless at most one complete step has no tracker: the first save may have ended just before its rename."""
    complete = complete_iterations(save)
    if published is None and len(complete) > 1:
        raise CheckpointError(
            f"{save / TRACKER} is missing, but iterations {', '.join(map(str, complete))} are complete: starting anew "
            "would overwrite them. Write the number of one into that file to resume from it, or name another "
            "checkpoint.save."
        )


def _unpublished(root: Path, published: int | None) -> list[str]:
    newer = [it for it in complete_iterations(root) if published is None or it > published]
    if not newer:
        return []
    tracker = "there is no tracker" if published is None else f"the tracker names {published}"
    return [
        f"{root} has complete but unpublished iteration{'s' if len(newer) > 1 else ''} {', '.join(map(str, newer))} "
        f"({tracker}): not used, and replaced when the run reaches them again"
    ]


def _existing(root: Path, iteration: int) -> Path:
    folder = iteration_folder(root, iteration)
    if is_complete(folder):
        return folder
    others = complete_iterations(root)
    choice = f"complete there: {', '.join(map(str, others))}" if others else "no iteration there is complete"
    state = "incomplete (it has no valid metadata.json)" if folder.is_dir() else "missing"
    raise CheckpointError(
        f"iteration {iteration} of {root} is {state}; {choice}. Choose one with checkpoint.load and "
        "checkpoint.ckpt_step and a new checkpoint.save, or write its number into the tracker file."
    )


def _nothing_found(config: CheckpointConfig, named: Sequence[str]) -> str:
    for root in (config.load, config.pretrained_checkpoint):
        if root is not None and is_complete(root):
            return (
                f"{root} is a single iteration, not a folder of iterations; give its parent {root.parent} as "
                f"checkpoint.load and choose the iteration with checkpoint.ckpt_step"
            )
        inner = [p.parent for p in root.glob("*/latest_checkpointed_iteration.txt")] if root is not None else []
        if inner:
            return f"{root} has no checkpoint of its own, but {inner[0]} has; set checkpoint.load to that folder"
    return (
        f"no checkpoint in {' or '.join(named)} (there is no latest_checkpointed_iteration.txt); correct the path, or "
        "set checkpoint.exit_on_missing_checkpoint to false to start from random weights"
    )


# What is restored


@dataclass(frozen=True)
class LoadReport:
    """What a load restored, for the log."""

    decision: LoadDecision
    restored: tuple[str, ...]
    not_restored: tuple[tuple[str, str], ...]
    """(part, reason)"""

    def __str__(self) -> str:
        text = f"loaded iteration {self.decision.iteration} from {self.decision.folder}: {', '.join(self.restored)}"
        if self.not_restored:
            text += "; not restored: " + ", ".join(f"{part} ({reason})" for part, reason in self.not_restored)
        return text


@dataclass(frozen=True)
class LoadPlan:
    """Which parts are asked for; decided from settings and the common part alone."""

    optimizer: bool
    scheduler: bool
    random_states: bool
    progress: bool
    left_out: tuple[tuple[str, str], ...]


def plan_load(mode: LoadMode, config: CheckpointConfig, common: Mapping[str, Any], run: TrainState) -> LoadPlan:
    """Decide what to ask for. A resume asks for everything; the ``no_load_*`` settings are for first starts."""
    weights_only = "weights only, a new run" if mode is LoadMode.WEIGHTS else None
    settings = config if mode is LoadMode.START_FROM else replace(config, no_load_optim=False, no_load_rng=False)
    left_out: list[tuple[str, str]] = []

    def wanted(part: str, *reasons: str | None) -> bool:
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            left_out.append((part, reason))
        return reason is None

    optimizer = wanted(
        "optimizer",
        weights_only,
        "checkpoint.no_load_optim is set" if settings.no_load_optim else None,
    )
    if optimizer and "optimizer" not in common:
        raise CheckpointError(
            "the checkpoint was saved with no_save_optim and holds no optimizer state; to start from its weights, give "
            "it as checkpoint.load with checkpoint.no_load_optim or checkpoint.finetune"
        )
    random_reason = _random_states_do_not_fit(common, run)
    return LoadPlan(
        optimizer=optimizer,
        scheduler=wanted("scheduler", weights_only, "no_load_optim" if settings.no_load_optim else None),
        random_states=wanted(
            "random states",
            weights_only,
            "checkpoint.no_load_rng is set" if settings.no_load_rng else None,
            random_reason,
        ),
        progress=wanted("progress", weights_only),
        left_out=tuple(left_out),
    )


def _random_states_do_not_fit(common: Mapping[str, Any], run: TrainState) -> str | None:
    args = vars(common["args"])
    if args.get("no_save_rng"):
        return "saved with no_save_rng"
    saved = tuple(int(args.get(f"{axis}_model_parallel_size", 1)) for axis in ("tensor", "pipeline"))
    now = (run.parallel.tp.size, run.parallel.pp.size)
    if saved != now:
        return f"saved at TP={saved[0]} PP={saved[1]}, this run has TP={now[0]} PP={now[1]}"
    per_rank = bool(args.get("data_parallel_random_init"))
    if per_rank and args.get("data_parallel_size") != run.parallel.dp.size:
        return f"saved per rank at DP={args.get('data_parallel_size')}, this run has DP={run.parallel.dp.size}"
    if per_rank != run.config.rng.data_parallel_random_init:
        return f"saved with data_parallel_random_init {per_rank}"
    return None


_SHAPE_KEYS = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "seq_length")
_SHAPE_KEYS_OF_WEIGHTS = _SHAPE_KEYS[:-1] + ("max_position_embeddings",)
_KIND_KEYS = ("position_embedding_type", "normalization", "swiglu")


def check_model(common: Mapping[str, Any], run: TrainState, folder: Path, mode: LoadMode) -> None:
    """Raise ``CheckpointError`` listing every number of the model that differs from the checkpoint's."""
    derived, model = run.derived, run.config.model
    args = dict(vars(common["args"]))
    if not args.get("group_query_attention"):
        # Megatron's default of 1 counts for nothing then: each head is a group.
        args["num_query_groups"] = args.get("num_attention_heads") if model.group_query_attention else None
    of_derived = ("ffn_hidden_size", "kv_channels", "max_position_embeddings", "num_query_groups")
    compared = (*_SHAPE_KEYS_OF_WEIGHTS, "num_query_groups", *_KIND_KEYS)
    if mode is not LoadMode.WEIGHTS:
        compared += ("seq_length", "norm_epsilon")
        # They leave no trace in the tensors, so that another value would go unnoticed. Weights alone may be trained on
        # with another one, to reach longer samples.
        compared += ("rotary_base", "rotary_percent") if model.position_embedding_type == "rope" else ()
    now = {name: getattr(derived if name in of_derived else model, name) for name in compared}
    different = [
        f"{name} is {args[name]} in the checkpoint and {now[name]} in this run"
        for name in compared
        if args.get(name) is not None and args[name] != now[name]
    ]
    saved_vocab = common.get("megalite", {}).get("vocab_size")
    if saved_vocab is not None and saved_vocab != run.vocab_size:
        different.append(f"vocab_size is {saved_vocab} in the checkpoint and {run.vocab_size} in this run")
    if different:
        raise CheckpointError(
            f"{folder} does not fit the model: {'; '.join(different)}. Set the model section to the checkpoint's "
            "values, or train the changed model in a new checkpoint.save folder."
        )


def read_common(decision: LoadDecision, group: Group) -> dict[str, Any]:
    """Return the part of the step that is equal on all ranks. Collective over ``group``."""
    common: dict[str, Any] = {}
    with failing_together(group, f"reading {decision.folder / 'common.pt'}"):
        if group.is_first:
            common = load_common_state_dict(decision.folder)
            if "args" not in common:
                raise CheckpointError(f"{decision.folder / 'common.pt'} has no 'args': not a trainer's checkpoint")
    return group.broadcast_object(common)


def load_checkpoint(run: TrainState, decision: LoadDecision, common: Mapping[str, Any]) -> LoadReport:
    """Restore ``run`` in place from the decided step. Collective over all ranks."""
    settings = run.config.checkpoint
    with failing_together(run.parallel.world, "comparing the checkpoint with the run"):
        check_model(common, run, decision.folder, decision.mode)
        plan = plan_load(decision.mode, settings, common, run)
    run.finish_param_sync()
    weights = model_state(run)
    request: dict[str, Any] = {"model": weights}
    if plan.optimizer:
        request["optimizer_state"] = run.optimizer.sharded_state_dict(weights)
    if plan.random_states:
        request[RNG_KEY] = random_states_request(run.parallel)

    def is_left_out(key: str) -> bool:
        return (
            (key.startswith(OPTIMIZER_KEYS) and not plan.optimizer)
            or (key.startswith(f"{RNG_KEY}/") and not plan.random_states)
            or is_used_by_megatron_alone(key)
        )

    if decision.mode is not LoadMode.WEIGHTS:
        _name_changes(run, common)
    loaded = load(
        request,
        decision.folder,
        group=run.parallel.world,
        strict=StrictHandling(settings.dist_ckpt_strictness),
        ignore_keys=is_left_out,
        options=load_options(settings, run.parallel),
    )
    _apply_common(run, decision, plan, common)
    _apply_random_states(run, decision, plan, loaded)
    restored = ["weights"] + [
        part
        for part, is_restored in (
            ("optimizer", plan.optimizer),
            ("scheduler", plan.scheduler),
            ("random states", plan.random_states),
            ("progress", plan.progress),
        )
        if is_restored
    ]
    return LoadReport(decision, tuple(restored), plan.left_out)


def _name_changes(run: TrainState, common: Mapping[str, Any]) -> None:
    """Say in one WARNING which settings and data are not those of the run that is continued."""
    ours = common.get("megalite", {})
    changes = changed_settings(ours.get("config", {}), config_to_dict(run.config))
    changes += changed_data(ours.get("data_definitions", {}), run.data_definitions)
    if changes and run.parallel.world.is_first:
        logger.warning(
            "this run goes on with other settings than the checkpoint's, and so is not the unbroken run: %s. Restore "
            "them if that is not meant.",
            "; ".join(changes),
        )


def _apply_common(run: TrainState, decision: LoadDecision, plan: LoadPlan, common: Mapping[str, Any]) -> None:
    if plan.optimizer:
        run.optimizer.load_common_state_dict(common["optimizer"])
    else:
        run.optimizer.reload_masters()
    if plan.scheduler:
        settings = run.config.optimizer
        run.scheduler.load_state_dict(
            common["opt_param_scheduler"],
            override=settings.override_opt_param_scheduler,
            use_checkpoint=settings.use_checkpoint_opt_param_scheduler,
        )
    if plan.progress:
        restored = saved_progress(common)
        for field in fields(TrainProgress):
            setattr(run.progress, field.name, getattr(restored, field.name))
    ours = common.get("megalite", {})
    if decision.mode is LoadMode.RESUME and ours:
        run.run_id = ours["run_id"]


def saved_progress(common: Mapping[str, Any]) -> TrainProgress:
    """Return the progress in a common part, from Megatron's keys where ours are absent."""
    ours = common.get("megalite", {}).get("progress")
    if ours is not None:
        return TrainProgress(**ours)
    args = vars(common["args"])
    iteration = int(common["iteration"])
    # Old checkpoints do not count samples; Megatron then takes iteration x global batch.
    consumed = args.get("consumed_train_samples") or iteration * int(args.get("global_batch_size") or 0)
    return TrainProgress(
        iteration=iteration,
        consumed_train_samples=int(consumed),
        consumed_valid_samples={"valid": int(args.get("consumed_valid_samples") or 0)},
        skipped_train_samples=int(args.get("skipped_train_samples") or 0),
        num_floating_point_operations_so_far=float(common.get("num_floating_point_operations_so_far") or 0),
    )


def _apply_random_states(run: TrainState, decision: LoadDecision, plan: LoadPlan, loaded: Mapping[str, Any]) -> None:
    if plan.random_states:
        states = loaded[RNG_KEY]
        restore_random_states(run.tracker, states[run.parallel.dp.rank if len(states) > 1 else 0])
    elif plan.progress:
        derive_random_states(run.config, run.parallel, decision.iteration, run.tracker)
        reason = dict(plan.left_out)["random states"]
        if run.parallel.world.is_first:
            logger.warning(
                "random states are not restored: %s. New ones are derived from seed %d, iteration %d and this rank's "
                "place; dropout masks differ from those of the unbroken run.",
                reason,
                run.config.training.seed,
                decision.iteration,
            )
