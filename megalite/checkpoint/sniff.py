"""What a step's folder holds, told from the names in it, and why it cannot be loaded."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from megalite.checkpoint.paths import Step, complete_iterations, step_folder, step_name
from megalite.dist_checkpointing.core import (
    COMMON_FILE,
    INDEX_FILE,
    MARKER_FILE,
    TORCH_DIST,
    CheckpointingConfig,
    read_marker,
)
from megalite.utils.errors import CheckpointError, DamagedCheckpointError


class StepFormat(Enum):
    """Layouts of a step, by Megatron's names for them."""

    TORCH_DIST = "torch_dist"
    INCOMPLETE_TORCH_DIST = "incomplete torch_dist"
    TORCH = "torch"
    TORCH_DCP = "torch_dcp"
    """Also ``fsdp_dtensor``, which looks the same from outside."""
    FOREIGN = "foreign"
    """It has a valid marker of a layout or a version that is not read here."""
    NOTHING = "nothing"


def sniff(names: Collection[str], marker: CheckpointingConfig | None) -> StepFormat:
    """Return the layout of a folder with the entries ``names``; ``marker`` is None unless it is there and valid.

    A ``torch_dist`` save that died is never taken for plain DCP, although both have data files of the same names: it
    writes ``common.pt``, which plain DCP does not have, before ``.metadata``, which plain DCP writes last.
    """
    if marker is not None:
        return StepFormat.TORCH_DIST if marker == TORCH_DIST else _named_by(marker)
    if any(name.startswith("mp_rank_") for name in names):
        return StepFormat.TORCH
    if MARKER_FILE in names or COMMON_FILE in names:
        return StepFormat.INCOMPLETE_TORCH_DIST
    if INDEX_FILE in names:
        return StepFormat.TORCH_DCP
    # Without an index neither is whole, and it does not matter which of the two it was to become.
    is_begun = any(name.startswith("__") or name.endswith(".distcp") for name in names)
    return StepFormat.INCOMPLETE_TORCH_DIST if is_begun else StepFormat.NOTHING


def _named_by(marker: CheckpointingConfig) -> StepFormat:
    by_backend = {"torch": StepFormat.TORCH, "torch_dcp": StepFormat.TORCH_DCP, "fsdp_dtensor": StepFormat.TORCH_DCP}
    return by_backend.get(marker.sharded_backend, StepFormat.FOREIGN)


def format_of(folder: Path) -> StepFormat:
    """Return the layout of an existing folder. CheckpointError when it cannot be listed."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(
            f"cannot list {folder}: {error.strerror}; check the folder, its permissions and its disk"
        ) from error
    try:
        marker = read_marker(folder)
    except CheckpointError:
        marker = None
    return sniff(names, marker)


def check_step(root: Path, step: Step) -> None:
    """Raise unless ``step`` of ``root`` is a complete ``torch_dist`` checkpoint.

    DamagedCheckpointError when it is missing or incomplete; CheckpointError naming the layout and the remedy when it
    is one that is not read here.
    """
    folder = step_folder(root, step)
    if not folder.is_dir():
        raise DamagedCheckpointError(_not_usable(root, step, "missing"))
    found = format_of(folder)
    if found is StepFormat.TORCH_DIST:
        return
    if found is StepFormat.INCOMPLETE_TORCH_DIST:
        raise DamagedCheckpointError(_not_usable(root, step, "incomplete (it has no valid metadata.json)"))
    if found is StepFormat.NOTHING:
        raise DamagedCheckpointError(_not_usable(root, step, "incomplete (no file in it belongs to a checkpoint)"))
    if found is StepFormat.FOREIGN:
        marker = read_marker(folder)
        raise CheckpointError(
            f"{folder} has layout {marker.sharded_backend} version {marker.sharded_backend_version} with "
            f"{marker.common_backend} version {marker.common_backend_version}, this version reads torch_dist 1 with "
            "torch 1 only. Load it with the program that wrote it and save it as torch_dist"
        )
    raise CheckpointError(f"{folder} {_REFUSED[found]}")


_REFUSED = {
    StepFormat.TORCH: (
        "is a legacy 'torch' checkpoint (mp_rank_... folders, one for each tensor and pipeline rank), which this "
        "version does not read. Convert it to torch_dist with Megatron: load it at the TP and PP it was saved with, "
        "and give --ckpt-convert-format torch_dist and --ckpt-convert-save"
    ),
    StepFormat.TORCH_DCP: (
        "is a plain PyTorch DCP checkpoint ('torch_dcp' or 'fsdp_dtensor': it has .metadata, but neither common.pt nor "
        "metadata.json), which this version does not read. Load it with the program that wrote it and save it as "
        "torch_dist"
    ),
}


def _not_usable(root: Path, step: Step, state: str) -> str:
    others = complete_iterations(root)
    choice = f"complete there: {', '.join(map(str, others))}" if others else "no iteration there is complete"
    return (
        f"{step_name(step)} of {root} is {state}; {choice}. Choose one with checkpoint.load and checkpoint.ckpt_step "
        f"and a new checkpoint.save, or write its number into the tracker file."
    )
