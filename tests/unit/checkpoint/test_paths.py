from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.paths import RELEASE, TRACKER, complete_iterations, iteration_folder, read_tracker, step_folder
from megalite.dist_checkpointing.serialization import write_marker
from megalite.utils.errors import CheckpointError


@pytest.mark.parametrize(
    ("iteration", "name"), [(0, "iter_0000000"), (100, "iter_0000100"), (12345678, "iter_12345678")]
)
def test_folders_have_at_least_seven_digits(iteration: int, name: str) -> None:
    assert iteration_folder(Path("runs"), iteration) == Path("runs") / name


@pytest.mark.parametrize(("text", "iteration"), [("100", 100), ("100\n", 100), (" 0000007 ", 7), ("0", 0)])
def test_the_tracker_is_a_number(tmp_path: Path, text: str, iteration: int) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert read_tracker(tmp_path) == iteration


def test_the_tracker_may_name_a_release(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release\n")
    assert read_tracker(tmp_path) == RELEASE
    assert step_folder(tmp_path, RELEASE) == tmp_path / "release"
    assert step_folder(tmp_path, 7) == tmp_path / "iter_0000007"


def test_no_tracker_is_a_first_start(tmp_path: Path) -> None:
    assert read_tracker(tmp_path) is None
    assert read_tracker(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    assert read_tracker(tmp_path / "file") is None


@pytest.mark.parametrize(
    "content", [b"", b"  \n", b"Release", b"-5", b"1.0", b"12 13", b"\xff\xfe\x00", b"iter_0000100", b"x" * 5000]
)
def test_garbage_is_refused_with_what_it_says(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=f"{TRACKER} holds .* is neither an iteration nor 'release'; write the number"
    ) as caught:
        read_tracker(tmp_path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_tracker_that_cannot_be_read_is_not_a_first_start(tmp_path: Path) -> None:
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(CheckpointError, match=f"cannot read .*{TRACKER}"):
        read_tracker(tmp_path)


def _complete(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_marker(folder)


def test_complete_steps_are_those_with_a_valid_marker(tmp_path: Path) -> None:
    for iteration in (300, 20, 12345678):
        _complete(iteration_folder(tmp_path, iteration))
    for other in ("iter_50", "iter_00000x0", "iter_0000060_old", "xiter_0000070", "release"):
        _complete(tmp_path / other)
    iteration_folder(tmp_path, 400).mkdir()
    iteration_folder(tmp_path, 500).mkdir()
    (iteration_folder(tmp_path, 500) / "metadata.json").write_text("{")
    (tmp_path / "iter_0000600").touch()
    assert complete_iterations(tmp_path) == [20, 300, 12345678]
    assert complete_iterations(tmp_path / "missing") == []
