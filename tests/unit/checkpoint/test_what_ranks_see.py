"""Ranks on several nodes: what each reads of one folder, and that a difference is an error of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.checkpoint.paths import TRACKER
from megalite.checkpoint.resolve import check_all_see, check_ranks_see_the_same, ranks_text
from megalite.config.schema import CheckpointConfig
from megalite.utils.dist import Group
from megalite.utils.errors import CheckpointError
from tests.unit.samples import on_threads


def _root(path: Path, text: str | None) -> Path:
    path.mkdir(parents=True)
    if text is not None:
        (path / TRACKER).write_text(text)
    return path


_PATH = re.compile(r"/\S+(?=/latest_checkpointed)")


def _verdicts(configs: list[CheckpointConfig]) -> list[str | None]:
    """What each rank raises, where rank r sees the folders of ``configs[r]``, as if they had one path for all."""

    def body(group: Group) -> str | None:
        try:
            check_ranks_see_the_same(configs[group.rank], group)
        except CheckpointError as error:
            return _PATH.sub("ROOT", str(error))
        return None

    return on_threads(len(configs), body)


@pytest.mark.parametrize("key", ["save", "load", "pretrained_checkpoint"])
def test_p9_ranks_that_read_different_trackers_are_an_error_on_all_of_them(tmp_path: Path, key: str) -> None:
    roots = [_root(tmp_path / str(rank), text) for rank, text in enumerate(("20", "20", "10", None, "release"))]
    roots.append(tmp_path / "nowhere")
    (text,) = set(_verdicts([CheckpointConfig(**{key: root}) for root in roots]))
    assert f"do not see the same ROOT/{TRACKER}: ranks 0-1 read 20; rank 2 read 10; rank 3 find no tracker" in text
    assert "rank 4 read release; rank 5 do not see the folder" in text
    assert f"as checkpoint.{key}: put it on a filesystem that they share" in text


def test_p9_ranks_that_read_the_same_agree(tmp_path: Path) -> None:
    for text in ("20", "release", None):
        roots = [_root(tmp_path / f"{text}{rank}", text) for rank in range(3)]
        assert _verdicts([CheckpointConfig(save=root, load=tmp_path / "nowhere") for root in roots]) == [None] * 3


def test_a_tracker_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path) -> None:
    roots = [_root(tmp_path / "a", "20"), _root(tmp_path / "b", "rubbish")]
    (text,) = set(_verdicts([CheckpointConfig(save=root) for root in roots]))
    assert "rank 0 read 20; rank 1 cannot read it (" in text and f"ROOT/{TRACKER} holds 'rubbish'" in text


def test_an_empty_folder_that_one_rank_does_not_see_yet_is_none(tmp_path: Path) -> None:
    roots = [_root(tmp_path / "a", None), tmp_path / "nowhere"]
    assert _verdicts([CheckpointConfig(save=root) for root in roots]) == [None, None]


def test_only_folders_that_have_a_say_are_compared(tmp_path: Path) -> None:
    same = [_root(tmp_path / f"same{rank}", "20") for rank in range(2)]
    other = [_root(tmp_path / f"other{rank}", str(rank)) for rank in range(2)]
    empty = _root(tmp_path / "empty", None)
    # A published step in save: load is not looked at.
    assert _verdicts([CheckpointConfig(save=a, load=b) for a, b in zip(same, other, strict=True)]) == [None, None]
    # A number that is given: no tracker counts.
    assert _verdicts([CheckpointConfig(load=root, ckpt_step=7) for root in other]) == [None, None]
    assert None not in _verdicts([CheckpointConfig(save=empty, load=root) for root in other])
    assert None not in _verdicts([CheckpointConfig(load=empty, pretrained_checkpoint=root) for root in other])


def test_a_step_that_some_ranks_do_not_see_is_an_error_of_all(tmp_path: Path) -> None:
    def body(group: Group) -> str | None:
        try:
            check_all_see(tmp_path / ("nowhere" if group.rank in (1, 2) else ""), group)
        except CheckpointError as error:
            assert type(error) is CheckpointError, "files that are not seen are not damaged"
            return str(error)
        return None

    texts = on_threads(4, body)
    assert all("is not there for ranks 1-2, but for the other ranks it is" in text for text in texts)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")], ids=str
)
def test_ranks_as_text(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
