"""One console for many ranks: INFO from rank 0, WARNING and above from every rank with its number in front."""

from __future__ import annotations

import logging
import sys


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"[rank {self.rank}] {record.levelname}: {text}"


def setup_logging(rank: int, level: str = "INFO") -> None:
    """Send the ``megalite`` loggers of this process to standard error with the rank rule above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter(rank))
    handler.addFilter(_RankFilter(rank))
    root = logging.getLogger("megalite")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
