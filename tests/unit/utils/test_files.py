from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalite.utils.files import fsync_directory, make_directories, replace_atomically, write_durably

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The flushes and renames that are really made, with the name of the file or folder."""
    made: Calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        made.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        made.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return made


def test_written_bytes_are_flushed(tmp_path: Path, calls: Calls) -> None:
    write_durably(tmp_path / "a", b"12")
    assert (tmp_path / "a").read_bytes() == b"12"
    assert calls == [("fsync", "a")]


def test_a_replacement_is_flushed_renamed_and_its_folder_flushed(tmp_path: Path, calls: Calls) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tracker").write_text("old, and longer")
    replace_atomically(folder / "tracker", b"new")
    assert (folder / "tracker").read_bytes() == b"new"
    temporary = calls[0][1]
    assert temporary.startswith(".tracker.") and str(os.getpid()) in temporary
    assert calls == [("fsync", temporary), ("rename", "tracker"), ("fsync", "folder")]
    assert [path.name for path in folder.iterdir()] == ["tracker"]


class _Crash(BaseException):
    pass


@pytest.mark.parametrize("point", ["write", "fsync", "rename", "fsync_directory"])
def test_a_crash_leaves_the_old_content_or_the_new(tmp_path: Path, point: str) -> None:
    (tmp_path / "tracker").write_text("old")

    def hook(at: str, path: Path) -> None:
        if at == point:
            raise _Crash

    with pytest.raises(_Crash):
        replace_atomically(tmp_path / "tracker", b"new", hook)
    assert (tmp_path / "tracker").read_text() == ("new" if point == "fsync_directory" else "old")


def test_each_new_folder_is_flushed_in_its_parent(tmp_path: Path, calls: Calls) -> None:
    make_directories(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert calls == [("fsync", tmp_path.name), ("fsync", "a"), ("fsync", "b")]
    calls.clear()
    make_directories(tmp_path / "a" / "b")
    assert calls == []


def test_only_a_folder_can_be_flushed_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "file")
