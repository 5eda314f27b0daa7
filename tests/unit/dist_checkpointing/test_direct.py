"""Files written past the page cache: the same bytes, and the cache where a filesystem does not take that."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.dist_checkpointing import ShardedTensor, load_plain_tensors, save, write_marker
from megalite.dist_checkpointing.strategies import direct, filesystem, writer
from megalite.dist_checkpointing.strategies.direct import SECTOR, DirectNotSupported, DirectSink, takes_direct_writes
from megalite.dist_checkpointing.strategies.filesystem import FileSink
from megalite.utils.dist import SINGLE
from megalite.utils.errors import SaveError

BUFFER = direct._BUFFER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not takes_direct_writes(tmp_path):
        pytest.skip("the filesystem of temporary files takes no direct writes")
    return tmp_path


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [SECTOR - 1, 2],
        [SECTOR, SECTOR],
        [BUFFER],
        [BUFFER - 1, 1, 1],
        [3, BUFFER, 2 * BUFFER + 5],
        [BUFFER + 1] * 5,
    ],
    ids=str,
)
def test_the_file_holds_exactly_the_pieces(folder: Path, sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    sink = DirectSink(folder / "x")
    for piece in pieces:
        sink.write([memoryview(piece), b""])
    sink.close()
    assert (folder / "x").read_bytes() == b"".join(pieces)


def test_an_older_longer_file_is_replaced(folder: Path) -> None:
    (folder / "x").write_bytes(b"y" * 3 * SECTOR)
    sink = DirectSink(folder / "x")
    sink.write([b"short"])
    sink.close()
    assert (folder / "x").read_bytes() == b"short"


def _state(layers: int = 3) -> dict[str, Any]:
    return {
        f"w{layer}": ShardedTensor.from_rank_offsets(f"w{layer}", torch.arange(1_000_000.0) + layer)
        for layer in range(layers)
    }


def _save(folder: Path, hook: Any = None) -> None:
    save(_state(), folder, group=SINGLE, **({"hook": hook} if hook else {}))
    write_marker(folder)


def test_large_saves_go_past_the_cache_and_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = direct.DirectSink.__init__
    monkeypatch.setattr(
        direct.DirectSink, "__init__", lambda self, path, *rest: (opened.append(path.name), real(self, path, *rest))[1]
    )
    _save(folder)
    assert "__0_0.distcp" in opened and not list(folder.glob(".direct*"))
    found = load_plain_tensors(folder)
    assert all(torch.equal(found[key], leaf.data) for key, leaf in _state().items())


@pytest.mark.parametrize("refusing", ["open", "pwrite"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_filesystem_that_refuses_gets_writes_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str, code: int
) -> None:
    real = getattr(os, refusing)

    def refuse(*args: Any, **settings: Any) -> Any:
        if refusing == "pwrite" or args[1] & os.O_DIRECT:
            raise OSError(code, "not here")
        return real(*args, **settings)

    monkeypatch.setattr(direct.os, refusing, refuse)
    assert not takes_direct_writes(tmp_path)
    if refusing == "open":
        with pytest.raises(DirectNotSupported):
            DirectSink(tmp_path / "x")
    _save(tmp_path)
    monkeypatch.undo()
    assert torch.equal(load_plain_tensors(tmp_path)["w2"], _state()["w2"].data)


@pytest.mark.parametrize("point", ["open", "write", "fsync", "close"])
def test_a_fault_at_any_point_fails_the_save_and_leaves_no_index(folder: Path, point: str) -> None:
    def hook(name: str, path: Path) -> None:
        if name == point and path.suffix == ".distcp":
            raise OSError(errno.ENOSPC, "No space left on device")

    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SaveError, match="No space left"):
        _save(folder, hook)
    assert not (folder / ".metadata").exists()
    assert len(os.listdir("/proc/self/fd")) <= handles + 1


def test_a_full_device_in_the_middle_is_the_same_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def fail(handle: int, data: Any, position: int) -> int:
        if position >= BUFFER:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, position)

    monkeypatch.setattr(direct.os, "pwrite", fail)
    with pytest.raises(SaveError, match="No space left"):
        _save(folder)


def test_small_saves_need_no_detour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "takes_direct_writes", lambda folder: pytest.fail("asked for a small file"))
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}, tmp_path, group=SINGLE)


@pytest.mark.parametrize("has_function", [True, False])
def test_through_the_cache_the_device_begins_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_function: bool
) -> None:
    begun: list[tuple[int, int]] = []

    def note(handle: int, offset: Any, length: Any, flags: int) -> int:
        begun.append((offset.value, length.value))
        return 0

    monkeypatch.setattr(filesystem, "_sync_file_range", lambda: note if has_function else None)
    monkeypatch.setattr(filesystem, "_WRITE_BACK", 1000)
    pieces = [os.urandom(size) for size in (300, 5200, 10, 0, 995)]
    sink = FileSink(tmp_path / "x")
    for piece in pieces:
        sink.write([piece])
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)
    if has_function:
        assert sum(length for _, length in begun) >= 5500
        assert [offset for offset, _ in begun] == [sum(length for _, length in begun[:n]) for n in range(len(begun))]
    else:
        assert begun == []


def test_the_systems_own_function_is_called(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "x")
    sink.write([b"a" * (20 << 20)])
    sink.close()
    assert (tmp_path / "x").stat().st_size == 20 << 20
