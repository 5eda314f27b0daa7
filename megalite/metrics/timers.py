"""How long the parts of an iteration take, on every rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Timers:
    """Adds up the time spent in named sections between two reports.

    A section has a level: it is measured if the level asked for (``logging.timing_log_level``) is at least as high. On
    CUDA the device is waited for at both ends of a measured section, which is why level 0 measures nothing.
    """

    def __init__(self, level: int, device: torch.device) -> None:
        self.level = level
        self.device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str, level: int) -> Iterator[None]:
        """Measure the block as a part of section ``name``."""
        if level > self.level:
            yield
            return
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return the seconds per section since the last call, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def spread(sections: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return (least, most) seconds of each section over the ranks that have it, in order of appearance."""
    names = list(dict.fromkeys(name for rank in sections for name in rank))
    values = {name: [rank[name] for rank in sections if name in rank] for name in names}
    return {name: (min(times), max(times)) for name, times in values.items()}
