"""The one owner of checkpoint folders: nobody else creates, publishes or removes one.

A step becomes a checkpoint in this order, each line durable before the next begins:

    folder cleared of debris -> data, common.pt -> .metadata -> readable copies -> metadata.json -> tracker

``metadata.json`` makes the folder complete; the rename of the tracker publishes it and is the commit point. Whatever
happens before it leaves the previous step as the newest one.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megalite.checkpoint.load import read_common
from megalite.checkpoint.options import save_options
from megalite.checkpoint.paths import TRACKER, Step, iteration_folder, read_tracker, step_name
from megalite.checkpoint.resolve import LoadDecision, check_ranks_see_the_same, resolve_load
from megalite.checkpoint.save import state_to_save
from megalite.checkpoint.state import TrainState, content_metadata, save_layout
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.core import MARKER_FILE, is_complete
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.integrity import require_integrity
from megalite.dist_checkpointing.serialization import PreparedSave, SaveCache, prepare_save, write_marker
from megalite.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megalite.dist_checkpointing.strategies.staging import KeptStaging
from megalite.utils.dist import Group, failing_together
from megalite.utils.errors import CheckpointError, ConfigError, DamagedCheckpointError, PeerError, SaveError
from megalite.utils.files import (
    FaultHook,
    fsync_directory,
    make_directories,
    no_fault,
    replace_atomically,
    write_durably,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """How long one save took."""

    iteration: int
    save_seconds: float
    stall_seconds: float
    """Time that training stood still; for a synchronous save all of it."""
    finalize_seconds: float = 0.0
    """The part of it at the end of an asynchronous save."""


class CheckpointManager:
    """Saves and publishes steps in ``checkpoint.save``, and decides where a start comes from."""

    def __init__(self, config: CheckpointConfig, world: Group, hook: FaultHook = no_fault) -> None:
        self.config = config
        self.world = world
        self.hook = hook
        self.published: Step | None = None
        """The step that the tracker of ``save`` is known to name."""
        self._cache = SaveCache()
        self._queue = AsyncCallsQueue(world)
        self._staging = KeptStaging()
        self._reports: list[SaveReport] = []
        self.num_failed_saves = 0
        """Asynchronous saves of this start that could not be written."""
        self.damaged: set[Path] = set()
        """Folders of ``save`` that this start has found damaged."""
        self.loaded: Path | None = None
        """The folder that this start has loaded."""

    @property
    def can_save(self) -> bool:
        return self.config.save is not None

    def resolve_start(self) -> LoadDecision | None:
        """Decide where this start comes from; one rank looks, all get the answer. Collective over all ranks.

        Raises the same error on all ranks, also when they do not see the same trackers.
        """
        check_ranks_see_the_same(self.config, self.world)

        def look() -> tuple[LoadDecision | None, Step | None]:
            require_integrity(self.config.verify_integrity)
            if not self.world.is_first:
                return None, None
            decision = resolve_load(self.config)
            if not self.can_save:
                return decision, None
            # Now and not at the first save: a folder that cannot be made should not cost hours of training.
            _make_save_folder(self.config.save)
            return decision, read_tracker(self.config.save)

        found = agreed(self.world, "looking for a checkpoint", look)
        decision, self.published = self.world.broadcast_object(found)
        if decision is not None and self.world.is_first:
            for note in decision.notes:
                logger.warning(note)
        return decision

    def load_start(self, decision: LoadDecision, attempt: Callable[[LoadDecision, Mapping[str, Any]], T]) -> T:
        """Return what ``attempt`` makes of the decided step and its common part. Collective over all ranks.

        If the step is damaged, ``checkpoint.fallback`` may allow older ones in its place: each is tried until one is
        not, and each that is refused is one WARNING. Nothing is removed. An attempt that raises DamagedCheckpointError
        raises it on all ranks, and the next one overwrites whatever it has left.
        """
        for candidate in decision.alternatives():
            if candidate.folder in self.damaged:
                continue
            try:
                result = attempt(candidate, read_common(candidate, self.world))
                self.loaded = candidate.folder
                return result
            except DamagedCheckpointError as error:
                if not decision.older:
                    raise
                self._refuse(candidate, error)
        steps = ", ".join(str(candidate.iteration) for candidate in decision.alternatives())
        raise CheckpointError(
            f"no step of {decision.folder.parent} can be loaded: {steps} are damaged, as the warnings say. Nothing was "
            "overwritten. Restore one of them, or name another checkpoint.save"
        )

    def _refuse(self, candidate: LoadDecision, error: DamagedCheckpointError) -> None:
        self.damaged.add(candidate.folder)
        if self.world.is_first:
            logger.warning(
                "%s in %s is damaged and not used: %s. As checkpoint.fallback says, the newest complete older one is "
                "tried; the damaged one stays until the run reaches it again.",
                step_name(candidate.step),
                candidate.folder,
                error,
            )

    def is_published(self, iteration: int) -> bool:
        """Return whether ``iteration`` is there and good: saving it again would only endanger it.

        That is the one that the tracker names, and one that was loaded in its place; not one that was found damaged.
        """
        folder = iteration_folder(self.config.save, iteration)
        return folder not in self.damaged and (self.published == iteration or self.loaded == folder)

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun that is not published yet; equal on all ranks."""
        return self._queue.num_unfinalized > 0

    def save(self, state: TrainState, readable: Mapping[Path, bytes]) -> SaveReport:
        """Write and publish the present iteration. Collective over all ranks.

        Raises ``SaveError`` on all ranks if a file of any cannot be written; published steps are untouched then.
        """
        started = time.perf_counter()
        iteration, folder = self._place_of(state)
        with _explained(iteration, folder):
            prepared = self._begin(state, folder, staging=None)
            prepared.write()
            self._finish(prepared, iteration, folder, readable)
        seconds = time.perf_counter() - started
        return SaveReport(iteration, seconds, seconds)

    def save_async(self, state: TrainState, readable: Mapping[Path, bytes]) -> float:
        """Copy the present iteration and begin to write it; return the seconds that this took. Collective.

        ``maybe_finalize_async_save`` publishes it. One at a time: there is one copy of the state.
        """
        assert not self.is_saving, "the save before has to be finalized first"
        started = time.perf_counter()
        iteration, folder = self._place_of(state)
        with _explained(iteration, folder):
            prepared = self._begin(state, folder, staging=self._staging)
        stall = time.perf_counter() - started

        def finish() -> None:
            resumed = time.perf_counter()
            with _explained(iteration, folder):
                self._finish(prepared, iteration, folder, readable)
            now = time.perf_counter()
            self._reports.append(SaveReport(iteration, now - started, stall + now - resumed, now - resumed))

        self._queue.schedule(AsyncRequest(f"save of iteration {iteration}", prepared.write, (finish,)))
        return stall

    def maybe_finalize_async_save(self, *, blocking: bool = False) -> list[SaveReport]:
        """Publish the save that is being written, if every rank has written its part. Collective over all ranks.

        With ``blocking`` it is waited for. If it failed, all ranks raise the same ``SaveError``, or log it and go on,
        as ``checkpoint.async_save_on_failure`` says; the tracker names the step before.
        """
        self._reports = []
        try:
            self._queue.maybe_finalize(blocking=blocking)
        except SaveError as error:
            if self.config.async_save_on_failure == "stop":
                raise
            self.num_failed_saves += 1
            if self.world.is_first:
                logger.error("%s. Training goes on; %d saves of this start have failed", error, self.num_failed_saves)
        return self._reports

    def close(self) -> None:
        """End what is being written without publishing it. No communication."""
        self._queue.close()
        self._staging.close()

    def _place_of(self, state: TrainState) -> tuple[int, Path]:
        assert self.config.save is not None, "saving needs checkpoint.save"
        iteration = state.progress.iteration
        return iteration, iteration_folder(self.config.save, iteration)

    def _begin(self, state: TrainState, folder: Path, staging: KeptStaging | None) -> PreparedSave:
        self._prepare(folder)
        return prepare_save(
            state_to_save(state),
            folder,
            group=self.world,
            staging=staging,
            content_metadata=content_metadata(save_layout(self.config)),
            options=save_options(self.config, state.parallel),
            cache=self._cache,
            hook=self.hook,
        )

    def _finish(self, prepared: PreparedSave, iteration: int, folder: Path, readable: Mapping[Path, bytes]) -> None:
        prepared.finish()
        self._publish(folder, iteration, readable)
        self.published = iteration
        self.damaged.discard(folder)

    def _prepare(self, folder: Path) -> None:
        """Clear what an earlier attempt left and make the folder. Collective over all ranks."""
        with failing_together(self.world, f"preparing {folder}"):
            if self.world.is_first:
                self._check_sole_owner()
                if folder.is_symlink() or folder.exists():
                    self._remove(folder)
                self.hook("mkdir", folder)
                make_directories(folder)
        with failing_together(self.world, f"opening {folder}"):
            # On a shared filesystem the new entry may reach other nodes late; making it again asks the server.
            folder.mkdir(parents=True, exist_ok=True)

    def _check_sole_owner(self) -> None:
        """Raise unless the tracker names what this run has published: another run writes here otherwise."""
        tracker = read_tracker(self.config.save)
        if tracker != self.published:
            raise SaveError(
                f"{self.config.save / TRACKER} names iteration {tracker}, this run knows of {self.published}: another "
                "run writes into the folder, such as an earlier attempt that is still alive. End one of them"
            )

    def _remove(self, folder: Path) -> None:
        """Remove an unpublished step, the marker first, so that no instant shows a complete folder with holes."""
        logger.info("removing the unpublished %s before it is written again", folder)
        if folder.is_symlink() or not folder.is_dir():
            # Not ours, but in the way; what a link points to stays.
            self.hook("unlink", folder)
            folder.unlink()
            fsync_directory(folder.parent)
            return
        if is_complete(folder):
            self.hook("unlink", folder / MARKER_FILE)
            (folder / MARKER_FILE).unlink()
            fsync_directory(folder)
        self.hook("rmtree", folder)
        shutil.rmtree(folder)
        fsync_directory(folder.parent)

    def _publish(self, folder: Path, iteration: int, readable: Mapping[Path, bytes]) -> None:
        with failing_together(self.world, f"publishing {folder}"):
            if self.world.is_first:
                for path, data in readable.items():
                    make_directories((folder / path).parent)
                    write_durably(folder / path, data, self.hook)
                    fsync_directory((folder / path).parent)
                write_marker(folder, self.hook)
                self._check_sole_owner()
                # Last of all: a crash before this line leaves the previous step as the newest one.
                replace_atomically(self.config.save / TRACKER, str(iteration).encode(), self.hook)


@contextlib.contextmanager
def _explained(iteration: int, folder: Path) -> Iterator[None]:
    """Turn what can go wrong with a save into a SaveError that says what is left."""
    try:
        yield
    except (OSError, MemoryError, PeerError, SaveError, CheckpointError) as error:
        raise SaveError(
            f"iteration {iteration} could not be saved to {folder}: {error}. Published iterations are untouched; "
            "free the cause and start the same command again."
        ) from error


def _make_save_folder(save: Path) -> None:
    try:
        make_directories(save)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.save is {save}, which cannot be made: {error.strerror}; name a folder on a disk that can be "
            "written"
        ) from error
