"""Where a run starts from: the checkpoint that is loaded, and the model settings that it may bring along."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.checkpoint.load import LoadReport, load_checkpoint, name_changes, progress_at_start
from megalite.checkpoint.manager import CheckpointManager
from megalite.checkpoint.model_args import model_settings
from megalite.checkpoint.resolve import LoadDecision, LoadMode
from megalite.checkpoint.state import TrainState
from megalite.config.derive import check_batch_sizes
from megalite.config.loader import UnresolvedConfig
from megalite.config.schema import Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What the run was started from."""

    decision: LoadDecision | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the run continues another, if only in its position in the data."""
        return self.decision is not None and self.decision.mode is not LoadMode.WEIGHTS

    @property
    def index_sizes(self) -> Mapping[str, list[int]]:
        """The sizes the data order was defined for: a run that goes on keeps them, a new run has none."""
        return self.common.get("megalite", {}).get("index_sizes", {}) if self.goes_on else {}

    def name_changes(self, state: TrainState) -> None:
        """Say in one WARNING which settings and data are not those of the run that is continued."""
        if self.goes_on:
            name_changes(state, self.common)


def resolve_config(
    config: Config | UnresolvedConfig, checkpoints: CheckpointManager, decision: LoadDecision | None
) -> Config:
    """Return ``config`` with the model settings that it takes from the checkpoint. Collective over all ranks."""
    if isinstance(config, Config):
        return config
    assert decision is not None, "use_checkpoint_args needs exit_on_missing_checkpoint"

    def attempt(candidate: LoadDecision, common: Mapping[str, Any]) -> Config:
        return config.resolve(model_settings(common), f"the checkpoint {candidate.folder}")

    return checkpoints.load_start(decision, attempt)


def load_start(state: TrainState, checkpoints: CheckpointManager, decision: LoadDecision | None) -> Start:
    """Restore ``state`` from the decided step or the one that takes its place. Collective over all ranks."""
    if decision is None:
        check_batch_sizes(state.config, state.derived, 0)
        return Start()

    def attempt(candidate: LoadDecision, common: Mapping[str, Any]) -> tuple[Start, LoadReport]:
        consumed = progress_at_start(candidate, common).consumed_train_samples
        check_batch_sizes(state.config, state.derived, consumed)
        return Start(candidate, common), load_checkpoint(state, candidate, common)

    start, report = checkpoints.load_start(decision, attempt)
    logger.info("%s", report)
    return start
