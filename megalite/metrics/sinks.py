"""Where metrics go: JSON lines in the save folder, TensorBoard event files. Nobody has to parse the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megalite.utils.errors import ConfigError

Metrics = Mapping[str, float | int | str | None]


class Sink(Protocol):
    """Something that takes the metrics of one iteration."""

    def write(self, iteration: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per call to ``metrics.jsonl``; each line is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, iteration: int, metrics: Metrics) -> None:
        # JSON knows neither NaN nor infinity, and a reader that meets one rejects the line.
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
        self._writer = SummaryWriter(str(folder))

    def write(self, iteration: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()
