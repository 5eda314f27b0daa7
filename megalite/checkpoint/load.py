"""From a step on disk to a run that goes on: whether it fits, what is restored, and what is not and why."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.changes import changed_data, changed_settings
from megalite.checkpoint.optimizer_layouts import OptimizerLayout, as_damage, layout_of
from megalite.checkpoint.options import load_options
from megalite.checkpoint.paths import RELEASE, step_name
from megalite.checkpoint.resolve import LoadDecision, LoadMode, check_all_see
from megalite.checkpoint.sniff import check_step
from megalite.checkpoint.state import (
    RNG_KEY,
    TrainProgress,
    TrainState,
    derive_random_states,
    is_used_by_megatron_alone,
    main_params_request,
    misfit_of_random_states,
    model_state,
    random_states_request,
    restore_random_states,
)
from megalite.config.loader import config_to_dict
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.mapping import ShardedObject
from megalite.dist_checkpointing.serialization import LoadOptions, StrictHandling, load, load_common_state_dict
from megalite.utils.dist import Group, agree_any
from megalite.utils.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What a load restored, for the log."""

    decision: LoadDecision
    restored: tuple[str, ...]
    not_restored: tuple[tuple[str, str], ...]
    """(part, reason)"""

    def __str__(self) -> str:
        step = step_name(self.decision.step)
        text = f"loaded {step} from {self.decision.folder}: {', '.join(self.restored)}"
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
    main_params: bool = False
    """Fp32 masters come from the stored weights, not from the run's, which may have fewer digits."""

    @property
    def restored(self) -> tuple[str, ...]:
        """What will have been restored, for the log."""
        taken = {"optimizer": self.optimizer, "main parameters": self.main_params, "scheduler": self.scheduler}
        taken |= {"random states": self.random_states, "progress": self.progress}
        return ("weights", *(part for part, is_taken in taken.items() if is_taken))


_WHOLE_MODE = {LoadMode.WEIGHTS: "weights only, a new run", LoadMode.RELEASE: "a release, from which a run begins"}


def plan_load(mode: LoadMode, config: CheckpointConfig, common: Mapping[str, Any], run: TrainState) -> LoadPlan:
    """Decide what to ask for. A resume asks for everything; the ``no_load_*`` settings are for first starts."""
    weights_only = _WHOLE_MODE.get(mode)
    no_load_optim, no_load_rng = (
        mode is LoadMode.START_FROM and on for on in (config.no_load_optim, config.no_load_rng)
    )
    left_out: list[tuple[str, str]] = []

    def wanted(part: str, *reasons: str | None) -> bool:
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            left_out.append((part, reason))
        return reason is None

    optimizer = wanted("optimizer", weights_only, "checkpoint.no_load_optim is set" if no_load_optim else None)
    if optimizer and "optimizer" not in common:
        another = " and another checkpoint.save" if mode is LoadMode.RESUME else ""
        raise CheckpointError(
            "the checkpoint was saved with no_save_optim and holds no optimizer state; to start from its weights, give "
            f"it as checkpoint.load with checkpoint.no_load_optim or checkpoint.finetune{another}"
        )
    # A step without optimizer state has a schedule all the same: it is what no_load_optim leaves of such a step.
    schedule_alone = vars(common["args"]).get("no_save_optim") and "opt_param_scheduler" in common
    return LoadPlan(
        optimizer=optimizer,
        scheduler=wanted("scheduler", weights_only, "no_load_optim" if no_load_optim and not schedule_alone else None),
        random_states=wanted(
            "random states",
            weights_only,
            "checkpoint.no_load_rng is set" if no_load_rng else None,
            _random_states_do_not_fit(common, run),
        ),
        progress=wanted("progress", weights_only if mode is LoadMode.WEIGHTS else None),
        left_out=tuple(left_out),
        main_params=config.load_main_params_from_ckpt and not optimizer,
    )


def _random_states_do_not_fit(common: Mapping[str, Any], run: TrainState) -> str | None:
    args = vars(common["args"])
    if args.get("no_save_rng"):
        return "saved with no_save_rng"
    saved = tuple(int(args.get(f"{axis}_model_parallel_size") or 1) for axis in ("tensor", "pipeline"))
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


# Kinds of Megatron's models that are not built here. Some leave no trace in names and shapes of the tensors.
_NOT_BUILT = (
    "apply_layernorm_1p",
    "multi_latent_attention",
    "num_experts",
    "quick_geglu",
    "rotary_interleaved",
    "squared_relu",
    "use_rope_scaling",
)


def check_model(common: Mapping[str, Any], run: TrainState, folder: Path, mode: LoadMode) -> None:
    """Raise ``CheckpointError`` listing every number of the model that differs from the checkpoint's."""
    derived, model = run.derived, run.config.model
    args = dict(vars(common["args"]))
    unknown = [f"{name} {args[name]}" for name in _NOT_BUILT if args.get(name)]
    if unknown:
        raise CheckpointError(
            f"{folder} is of a model with {', '.join(unknown)}, which this version does not build; load it with the "
            "program that wrote it"
        )
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
    padded = args.get("padded_vocab_size")
    if saved_vocab is None and padded is not None and padded < run.vocab_size:
        different.append(
            f"the vocabulary has {padded} rows in the checkpoint, vocab_size is {run.vocab_size} in this run"
        )
    if different:
        raise CheckpointError(
            f"{folder} does not fit the model: {'; '.join(different)}. Set the model section to the checkpoint's "
            "values, or train the changed model in a new checkpoint.save folder."
        )


def read_common(decision: LoadDecision, group: Group) -> dict[str, Any]:
    """Return the part of the step that is equal on all ranks. Collective over ``group``.

    Raises DamagedCheckpointError on all ranks when the step is incomplete or this part of it is not readable.
    """

    def read() -> dict[str, Any]:
        if not group.is_first:
            return {}
        check_step(decision.folder.parent, decision.step)
        common = load_common_state_dict(decision.folder)
        _check_common(common, decision)
        return common

    # First: a folder that this rank alone does not see would look like damage.
    check_all_see(decision.folder, group)
    common = agreed(group, f"reading {decision.folder / 'common.pt'}", read)
    return group.broadcast_object(common)


def _check_common(common: Mapping[str, Any], decision: LoadDecision) -> None:
    path = decision.folder / "common.pt"
    if "args" not in common:
        raise CheckpointError(f"{path} has no 'args': not a trainer's checkpoint; start from one that a trainer saved")
    if not isinstance(common["args"], argparse.Namespace):
        raise DamagedCheckpointError(
            f"{path} has 'args' of type {type(common['args']).__name__}, expected a Namespace; use another checkpoint"
        )
    if not isinstance(common.get("megalite", {}), dict):
        kind = type(common["megalite"]).__name__
        raise DamagedCheckpointError(f"{path} has 'megalite' of type {kind}, expected a dict; use another checkpoint")
    iteration = common.get("iteration")
    if decision.mode is not LoadMode.WEIGHTS and decision.step not in (RELEASE, iteration):
        raise DamagedCheckpointError(
            f"{path} is that of iteration {iteration}, its folder that of iteration {decision.iteration}; files of "
            "several steps are mixed or the folder was renamed, use another checkpoint"
        )


# Of any layout; several optimizers of one run are numbered.
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def is_left_out(key: str, plan: LoadPlan) -> bool:
    """Return whether a key on disk is knowingly not asked for."""
    return (
        is_used_by_megatron_alone(key)
        or (not plan.optimizer and _OF_OPTIMIZER.match(key) is not None)
        or (not plan.random_states and key.startswith(f"{RNG_KEY}/"))
    )


def load_checkpoint(run: TrainState, decision: LoadDecision, common: Mapping[str, Any]) -> LoadReport:
    """Restore ``run`` in place from the decided step. Collective over all ranks.

    After an error the content of all tensors that the step has is undefined; another load overwrites them.
    """
    settings, world = run.config.checkpoint, run.parallel.world

    def fit() -> tuple[LoadPlan, OptimizerLayout | None, LoadOptions]:
        # Of a stranger's values only the types of the outermost are known.
        with as_damage(decision.folder / "common.pt"):
            check_model(common, run, decision.folder, decision.mode)
            plan = plan_load(decision.mode, settings, common, run)
            _restore_plain_values(run, decision, plan, common)
            layout = layout_of(common, run, decision.folder) if plan.optimizer else None
            return plan, layout, load_options(settings, run.parallel, common)

    plan, layout, options = agreed(world, "comparing the checkpoint with the run", fit)
    run.finish_param_sync()
    weights = model_state(run)
    # Extra states hold nothing of ours, and other versions of the same layers have them or do not.
    tensors = {name: leaf for name, leaf in weights.items() if not isinstance(leaf, ShardedObject)}
    request: dict[str, Any] = {"model": tensors}
    if layout is not None:
        request |= layout.request(run, weights)
    if plan.main_params:
        request["main_params"] = main_params_request(run, weights)
    if plan.random_states:
        request[RNG_KEY] = random_states_request(run.parallel)
    loaded = load(
        request,
        decision.folder,
        group=world,
        strict=StrictHandling(settings.dist_ckpt_strictness),
        ignore_keys=lambda key: is_left_out(key, plan),
        options=options,
    )
    if layout is not None:
        layout.apply(run, common, loaded)
    if not plan.optimizer and not plan.main_params:
        run.optimizer.reload_masters()
    plan = _apply_random_states(run, decision, plan, loaded)
    return LoadReport(decision, plan.restored, plan.left_out)


def name_changes(run: TrainState, common: Mapping[str, Any]) -> None:
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


def _restore_plain_values(run: TrainState, decision: LoadDecision, plan: LoadPlan, common: Mapping[str, Any]) -> None:
    """Restore schedule and progress: before any tensor, so that a schedule that differs costs no reading."""
    if plan.scheduler:
        settings = run.config.optimizer
        run.scheduler.load_state_dict(
            common["opt_param_scheduler"],
            override=settings.override_opt_param_scheduler,
            use_checkpoint=settings.use_checkpoint_opt_param_scheduler,
        )
    if plan.progress:
        restored = progress_at_start(decision, common)
        for field in fields(TrainProgress):
            setattr(run.progress, field.name, getattr(restored, field.name))
    ours = common.get("megalite", {})
    if decision.mode is LoadMode.RESUME and ours:
        run.run_id = ours["run_id"]


def progress_at_start(decision: LoadDecision | None, common: Mapping[str, Any]) -> TrainProgress:
    """Return the progress that a run starts with: of a release only the position in the data."""
    if decision is None or decision.mode is LoadMode.WEIGHTS:
        return TrainProgress()
    progress = saved_progress(common)
    return replace(progress, iteration=0, skipped_iterations=0) if decision.mode is LoadMode.RELEASE else progress


def saved_progress(common: Mapping[str, Any]) -> TrainProgress:
    """Return the progress in a common part, from Megatron's keys where ours are absent."""
    ours = common.get("megalite", {}).get("progress")
    if ours is not None:
        known = {field.name for field in fields(TrainProgress)}
        return TrainProgress(**{name: value for name, value in ours.items() if name in known})
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


def _apply_random_states(
    run: TrainState, decision: LoadDecision, plan: LoadPlan, loaded: Mapping[str, Any]
) -> LoadPlan:
    """Restore the random states, or derive new ones where a run goes on without, and return what was done."""
    if plan.random_states:
        own, reason = agreed(
            run.parallel.world, "looking at the random states", lambda: _own_random_states(run, decision, loaded)
        )
        # All ranks or none: streams of one run must not be half old and half new.
        if not agree_any(reason is not None, run.parallel.world):
            _set_random_states(run, decision, own)
            return plan
        left_out = (*plan.left_out, ("random states", "saved on another kind of device"))
        plan = replace(plan, random_states=False, left_out=left_out)
    if decision.mode in (LoadMode.RESUME, LoadMode.START_FROM):
        derive_random_states(run.config, run.parallel, decision.iteration, run.tracker)
        if run.parallel.world.is_first:
            logger.warning(
                "random states are not restored: %s. New ones are derived from seed %d, iteration %d and this rank's "
                "place; dropout masks differ from those of the unbroken run.",
                dict(plan.left_out)["random states"],
                run.config.training.seed,
                decision.iteration,
            )
    return plan


def _set_random_states(run: TrainState, decision: LoadDecision, own: dict[str, Any]) -> None:
    def restore() -> None:
        with as_damage(decision.folder):
            restore_random_states(run.tracker, own)

    agreed(run.parallel.world, "restoring the random states", restore)


def _own_random_states(
    run: TrainState, decision: LoadDecision, loaded: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Return this rank's states, and why they cannot be set, or None. CheckpointError when some are not there."""
    states = loaded[RNG_KEY]
    index = run.parallel.dp.rank if isinstance(states, list) and len(states) > 1 else 0
    if not isinstance(states, list) or index >= len(states) or not isinstance(states[index], dict):
        raise DamagedCheckpointError(
            f"{RNG_KEY} of {decision.folder} is not a list of the states of each rank; use another checkpoint"
        )
    missing, reason = misfit_of_random_states(states[index], run.tracker)
    if missing:
        another = " and another checkpoint.save" if decision.mode is LoadMode.RESUME else ""
        raise CheckpointError(
            f"the random states in {decision.folder} are without {', '.join(missing)}, so that the masks of dropout "
            "cannot go on. Start from it as checkpoint.load with checkpoint.no_load_rng, which derives new ones, or "
            f"with checkpoint.finetune{another}"
        )
    return states[index], reason
