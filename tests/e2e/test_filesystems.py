"""Saves and loads on filesystems that differ in what they take: mounted here where that is permitted.

No training, but processes: mount is one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.dist_checkpointing import (
    LoadOptions,
    SaveOptions,
    ShardedTensor,
    load,
    load_plain_tensors,
    save,
    write_marker,
)
from megalite.dist_checkpointing.strategies.direct import takes_direct_writes
from megalite.utils.dist import SINGLE
from megalite.utils.errors import SaveError

MEBIBYTE = 1 << 20


def _call(*command: object) -> None:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


def _mount(kind: str, folder: Path) -> Path:
    point = folder / "mounted"
    point.mkdir()
    if kind == "overlay":
        parts = [folder / name for name in ("lower", "upper", "work")]
        for part in parts:
            part.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(*parts)
        _call("mount", "-t", "overlay", "overlay", "-o", options, point)
    elif kind == "tmpfs":
        _call("mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", point)
    else:
        image = folder / "image"
        with open(image, "wb") as file:
            file.truncate(160 * MEBIBYTE)
        _call(f"mkfs.{kind}", "-q", image)
        _call("mount", "-o", "loop", image, point)
    return point


@pytest.fixture(params=["ext4", "tmpfs", "overlay", "plain"])
def filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    if request.param == "plain":
        yield request.param, tmp_path
        return
    point = _mount(request.param, tmp_path)
    try:
        yield request.param, point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def _state(num_bytes: int) -> dict[str, torch.Tensor]:
    return {f"w{part}": torch.rand(num_bytes // 4 // 4) for part in range(4)}


def _save(state: dict[str, torch.Tensor], folder: Path, num_files: int) -> None:
    folder.mkdir()
    leaves = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}
    save(leaves, folder, group=SINGLE, options=SaveOptions(num_files=num_files, verify_integrity="xxh3"))
    write_marker(folder)


@pytest.mark.parametrize("num_files", [1, 3])
def test_what_is_saved_is_loaded(filesystem: tuple[str, Path], num_files: int) -> None:
    kind, folder = filesystem
    assert takes_direct_writes(folder) or kind != "ext4"
    state = _state(40 * MEBIBYTE)
    _save(state, folder / "step", num_files)
    for key, value in load_plain_tensors(folder / "step").items():
        assert torch.equal(value, state[key])
    targets = {key: torch.zeros_like(value) for key, value in state.items()}
    request = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in targets.items()}
    load(request, folder / "step", group=SINGLE, options=LoadOptions(verify_integrity="xxh3"))
    assert all(torch.equal(targets[key], state[key]) for key in state)
    assert not [path.name for path in (folder / "step").iterdir() if path.suffix == ".tmp"]


def test_a_full_disk_is_one_error_and_the_older_step_stays(filesystem: tuple[str, Path]) -> None:
    kind, folder = filesystem
    if kind not in ("ext4", "tmpfs"):
        pytest.skip("it has the space of the disk below")
    state = _state(40 * MEBIBYTE)
    _save(state, folder / "old", 1)
    with pytest.raises(SaveError, match="No space left on device"):
        _save(_state(200 * MEBIBYTE), folder / "new", 2)
    assert not (folder / "new" / ".metadata").exists() and not (folder / "new" / "metadata.json").exists()
    for key, value in load_plain_tensors(folder / "old").items():
        assert torch.equal(value, state[key])
