"""Where metrics go: JSON lines in the save folder, TensorBoard event files. Nobody has to parse the console."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Protocol

from megalite.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | int | str | None]


class Sink(Protocol):
    """Something that takes the metrics of one iteration."""

    def write(self, iteration: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per call to ``metrics.jsonl``; each line is handed to the system at once.

    When the disk does not take a line any more, one WARNING says so and the rest is left out: metrics are not worth the
    run. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Without a buffer there is nothing left over that closing would have to write.
            self._file: FileIO | None = FileIO(path, "a")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be opened for writing: {error.strerror}; make it writable, or set "
                "logging.metrics_jsonl to false"
            ) from error

    def write(self, iteration: int, metrics: Metrics) -> None:
        if self._file is None:
            return
        # JSON knows neither NaN nor infinity, and a reader that meets one rejects the line.
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        line = (json.dumps({"iteration": iteration, **values}) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            # A full disk may take a part of the line without an error.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.warning(
                "metrics are no longer written to %s, from iteration %d on: %s; training goes on. Make room and start "
                "the same command again to have them.",
                self._path,
                iteration,
                error.strerror,
            )
            # The next start appends; it must not do so to half a line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardSink:
    """Writes every number as a scalar whose step is the iteration."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"logging.tensorboard_dir is {folder} but tensorboard is not installed; pip install "
                "'megalite[tensorboard]' or leave the setting out"
            ) from error
        self._folder = folder
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                f"logging.tensorboard_dir is {folder}, where nothing can be written: {error.strerror}; choose another "
                "folder or leave the setting out"
            ) from error

    def write(self, iteration: int, metrics: Metrics) -> None:
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, iteration)
        except OSError as error:
            logger.warning("TensorBoard events are no longer written to %s: %s", self._folder, error.strerror)
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
