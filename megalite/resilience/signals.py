"""Asking a run to stop: a signal to any rank, or the death of the launcher.

The handler only notes that the signal came. What follows is decided at the end of an iteration, by all ranks together.
From that decision on the signal is ignored, so a second or third one changes nothing and none can interrupt a save.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


class ExitSignal:
    """Remembers whether this rank was asked to stop.

    A rank whose parent process has gone (``torchrun`` was killed) counts as asked: nobody would restart or even notice
    it, so it saves and leaves.
    """

    def __init__(self, name: str = "SIGTERM", handle: bool = True) -> None:
        """Start to listen, if ``handle``; must be called from the main thread."""
        self.number = signal.Signals[name]
        self.received = 0
        self._parent = os.getppid()
        self._handles = handle
        self._is_followed = False
        if handle:
            self._previous = signal.signal(self.number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received += 1

    @property
    def parent_is_gone(self) -> bool:
        return os.getppid() != self._parent

    def is_raised(self) -> bool:
        """Return whether this rank has a reason to stop; the ranks still have to agree."""
        return self._handles and (self.received > 0 or self.parent_is_gone)

    def describe(self) -> str:
        """Say why, for the log."""
        return self.number.name if self.received or not self.parent_is_gone else "the launcher's death"

    def follow(self) -> None:
        """Note that the run is over, whether or not because of the signal: from here on it is ignored."""
        self._is_followed = True
        if self._handles:
            signal.signal(self.number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the previous handler back, unless the run came to its end.

        The process is then on its way out with everything published, and schedulers repeat themselves: a signal that
        arrives while the interpreter ends would make a death by signal of a status 0.
        """
        if self._handles and not self._is_followed:
            signal.signal(self.number, self._previous)
