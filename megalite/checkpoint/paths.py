"""Names in a save folder, and the two facts about a step: is it complete, and does the tracker name it.

runs/debug/
    latest_checkpointed_iteration.txt     the published step; its rename is the commit point
    metrics.jsonl
    iter_0000100/                         one step, see dist_checkpointing
    release/                              weights to start from, made from others' files; in place of steps
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from megalite.dist_checkpointing.core import is_complete
from megalite.utils.errors import CheckpointError
from megalite.utils.files import read_regular_file

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE: Literal["release"] = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")

_MOST_OF_TRACKER = 1 << 16

Step = int | Literal["release"]
"""An iteration, or weights that belong to none: the word stands in the tracker and is the name of the folder."""


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder of a step: ``iter_`` and at least seven digits."""
    return root / f"iter_{iteration:07d}"


def step_folder(root: Path, step: Step) -> Path:
    """Return the folder of what a tracker names."""
    return root / RELEASE if step == RELEASE else iteration_folder(root, step)


def step_name(step: Step) -> str:
    """Return a step as messages name it."""
    return "the release" if step == RELEASE else f"iteration {step}"


def read_tracker(root: Path) -> Step | None:
    """Return the step that the tracker names, or None if there is no tracker.

    Raises ``CheckpointError`` if it holds anything else or cannot be read, as an unreadable tracker must not look like
    a first start.
    """
    path = root / TRACKER
    try:
        text = read_regular_file(path, _MOST_OF_TRACKER).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; check the file, its permissions and its disk"
        ) from error
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(
            f"{path} holds {text[:40]!r}, which is neither an iteration nor 'release'; write the number of a complete "
            "iter_ folder into it, or remove the file and all iter_ folders to start over"
        )
    return int(text)


def complete_iterations(root: Path) -> list[int]:
    """Return the steps in ``root`` that have a valid completeness marker, ascending."""
    if not root.is_dir():
        return []
    found = []
    for entry in root.iterdir():
        match = _ITERATION.fullmatch(entry.name)
        if match and is_complete(entry):
            found.append(int(match[1]))
    return sorted(found)
