"""Where a start comes from: which step of which folder, and how much of it is meant."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from megalite.checkpoint.paths import (
    RELEASE,
    TRACKER,
    Step,
    complete_iterations,
    read_tracker,
    step_folder,
)
from megalite.checkpoint.sniff import StepFormat, check_step, format_of
from megalite.config.schema import CheckpointConfig
from megalite.utils.dist import Group
from megalite.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class LoadMode(Enum):
    """What is taken from a checkpoint."""

    RESUME = "resume"
    """Everything: the run goes on."""
    START_FROM = "start from"
    """First start from ``checkpoint.load``: everything that the ``no_load_*`` settings leave."""
    RELEASE = "release"
    """Weights and the position in the data, at iteration 0: what a tracker with the word ``release`` means."""
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

    older: tuple[int, ...] = ()
    """Complete steps beside it that ``checkpoint.fallback`` allows to take in its place, newest first."""

    @property
    def step(self) -> Step:
        """What the tracker calls it."""
        return RELEASE if self.folder.name == RELEASE else self.iteration

    def alternatives(self) -> Iterator[LoadDecision]:
        """Yield the decision itself, then those that may take its place."""
        yield self
        for iteration in self.older:
            yield replace(self, folder=step_folder(self.folder.parent, iteration), iteration=iteration, older=())


def resolve_load(config: CheckpointConfig) -> LoadDecision | None:
    """Return where this start comes from, or None for random weights.

    A published step in ``save`` wins: the same command restarts a job. Otherwise ``load`` and then
    ``pretrained_checkpoint`` say where the first start comes from. Raises CheckpointError unless the step is one that
    can be read, as far as its names tell; a damaged one that another may replace is let through.
    """
    notes: list[str] = []
    if config.save is not None:
        _check_save_folder(config.save)
        step = read_tracker(config.save)
        _check_tracker_is_not_lost(config.save, step)
        notes += _unpublished(config.save, step)
        if step is not None:
            mode = LoadMode.RELEASE if step == RELEASE else LoadMode.RESUME
            return _decision(config.save, step, mode, notes, _older(config, step))
    for root, mode in (
        (config.load, LoadMode.WEIGHTS if config.finetune else LoadMode.START_FROM),
        (config.pretrained_checkpoint, LoadMode.WEIGHTS),
    ):
        if root is None:
            continue
        # Any given number counts, 0 too, and whatever the tracker says.
        chosen = config.ckpt_step if root is config.load else None
        step = chosen if chosen is not None else read_tracker(root)
        if step is not None:
            mode = LoadMode.RELEASE if step == RELEASE and mode is LoadMode.START_FROM else mode
            return _decision(root, step, mode, notes)
        _check_nothing_is_there(root)
    named = [str(root) for root in (config.load, config.pretrained_checkpoint) if root is not None]
    if named and config.exit_on_missing_checkpoint:
        raise CheckpointError(_nothing_found(config, named))
    if named:
        notes.append(f"no checkpoint in {' or '.join(named)}: starting from random weights, as configured")
    for note in notes:
        logger.warning(note)
    return None


def _decision(root: Path, step: Step, mode: LoadMode, notes: Sequence[str], older: Sequence[int] = ()) -> LoadDecision:
    if not older:
        # Else it is looked at when it is read, where another can take its place.
        check_step(root, step)
    return LoadDecision(step_folder(root, step), 0 if step == RELEASE else step, mode, tuple(notes), tuple(older))


def _older(config: CheckpointConfig, step: Step) -> list[int]:
    if config.fallback == "error" or step == RELEASE:
        return []
    return [iteration for iteration in reversed(complete_iterations(config.save)) if iteration < step]


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


def _check_tracker_is_not_lost(save: Path, published: Step | None) -> None:
    """Raise unless at most one complete step has no tracker: the first save may have ended just before its rename."""
    complete = complete_iterations(save)
    if published is None and len(complete) > 1:
        raise CheckpointError(
            f"{save / TRACKER} is missing, but iterations {', '.join(map(str, complete))} are complete: starting anew "
            "would overwrite them. Write the number of one into that file to resume from it, or name another "
            "checkpoint.save."
        )


def _check_nothing_is_there(root: Path) -> None:
    """Raise if a folder to start from has complete steps, but no tracker says which one is meant."""
    complete = complete_iterations(root)
    if complete:
        raise CheckpointError(
            f"{root / TRACKER} is missing, but iterations {', '.join(map(str, complete))} are complete. Choose one "
            "with checkpoint.load and checkpoint.ckpt_step, or write its number into that file."
        )


def _unpublished(root: Path, published: Step | None) -> list[str]:
    newer = [it for it in complete_iterations(root) if published in (None, RELEASE) or it > published]
    if not newer:
        return []
    tracker = "there is no tracker" if published is None else f"the tracker names {published}"
    return [
        f"{root} has complete but unpublished iteration{'s' if len(newer) > 1 else ''} {', '.join(map(str, newer))} "
        f"({tracker}): not used, and replaced when the run reaches them again"
    ]


def _nothing_found(config: CheckpointConfig, named: Sequence[str]) -> str:
    for root in (config.load, config.pretrained_checkpoint):
        if root is not None and root.is_dir() and format_of(root) not in (StepFormat.NOTHING, StepFormat.FOREIGN):
            return (
                f"{root} is a single iteration, not a folder of iterations; give its parent {root.parent} as "
                f"checkpoint.load and choose the iteration with checkpoint.ckpt_step"
            )
        inner = [p.parent for p in root.glob(f"*/{TRACKER}")] if root is not None else []
        if inner:
            return f"{root} has no checkpoint of its own, but {inner[0]} has; set checkpoint.load to that folder"
    return (
        f"no checkpoint in {' or '.join(named)} (there is no {TRACKER}); correct the path, or set "
        "checkpoint.exit_on_missing_checkpoint to false to start from random weights"
    )


# What the ranks see

_NO_FOLDER, _NO_TRACKER = "do not see the folder", "find no tracker"


def check_ranks_see_the_same(config: CheckpointConfig, group: Group) -> None:
    """Raise CheckpointError on all ranks if they read different trackers. Collective over ``group``.

    Only where the tracker has a say; that some see an empty folder and others none means nothing yet.
    """
    views = group.all_gather_object(_trackers(config))
    for key in views[0]:
        seen = [view[key] for view in views]
        if len(set(seen)) > 1 and not set(seen) <= {_NO_FOLDER, _NO_TRACKER}:
            raise CheckpointError(_disagreement(key, getattr(config, key), seen, group))
        if seen[0] not in (_NO_FOLDER, _NO_TRACKER):
            return


def _trackers(config: CheckpointConfig) -> dict[str, str]:
    """Return what this rank reads in each folder that may be loaded from, in the order in which they count."""
    keys = ("save",) if config.ckpt_step is not None else ("save", "load", "pretrained_checkpoint")
    return {key: _seen_tracker(root) for key in keys if (root := getattr(config, key)) is not None}


def _seen_tracker(root: Path) -> str:
    try:
        step = read_tracker(root)
        if step is not None:
            return f"read {step}"
        return _NO_TRACKER if root.is_dir() else _NO_FOLDER
    except (CheckpointError, OSError) as error:
        return f"cannot read it ({error})"


def _disagreement(key: str, root: Path, seen: Sequence[str], group: Group) -> str:
    by_view: dict[str, list[int]] = {}
    for rank, view in zip(group.ranks, seen, strict=True):
        by_view.setdefault(view, []).append(rank)
    views = "; ".join(f"{ranks_text(ranks)} {view}" for view, ranks in by_view.items())
    return (
        f"the ranks do not see the same {root / TRACKER}: {views}. All nodes have to see one folder as "
        f"checkpoint.{key}: put it on a filesystem that they share, or, if that is slow to show a new file, wait and "
        "start again"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return sorted ranks as text: ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {text}"


def check_all_see(folder: Path, group: Group) -> None:
    """Raise CheckpointError on all ranks if some do not see ``folder`` and others do. Collective over ``group``."""
    blind = [rank for rank, sees in zip(group.ranks, group.all_gather_object(folder.is_dir()), strict=True) if not sees]
    if 0 < len(blind) < group.size:
        raise CheckpointError(
            f"{folder} is not there for {ranks_text(blind)}, but for the other ranks it is. All nodes have to see one "
            "folder: put it on a filesystem that they share, or, if that is slow to show a new folder, wait and start "
            "again"
        )
