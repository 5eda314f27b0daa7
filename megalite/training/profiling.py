"""A torch profiler trace of a few iterations, on chosen ranks."""

from __future__ import annotations

import logging
from typing import Any

from megalite.config.schema import ProfilingConfig

logger = logging.getLogger(__name__)


class Profiler:
    """Records iterations [profile_step_start, profile_step_end) into ``profile_dir``, if switched on."""

    def __init__(self, config: ProfilingConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self._is_on = config.profile and rank in config.profile_ranks
        self._trace: Any = None

    def before_iteration(self, iteration: int) -> None:
        """Start or end the recording; ``iteration`` is about to run."""
        if not self._is_on:
            return
        if iteration >= self.config.profile_step_end:
            self.close()
        elif iteration >= self.config.profile_step_start and self._trace is None:
            from torch.profiler import profile

            self._trace = profile(record_shapes=True)
            self._trace.__enter__()

    def close(self) -> None:
        """End a recording that is still open and write it."""
        if self._trace is not None:
            trace, self._trace, self._is_on = self._trace, None, False
            trace.__exit__(None, None, None)
            path = self.config.profile_dir / f"trace_rank{self.rank}.json"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                trace.export_chrome_trace(str(path))
            # torch reports a file that it cannot write as RuntimeError.
            except (OSError, RuntimeError) as error:
                logger.warning("the trace cannot be written to %s: %s; training goes on", path, error)
