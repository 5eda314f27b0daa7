from __future__ import annotations

import pytest

from megalite.dist_checkpointing.core import CheckpointingConfig, is_complete, read_marker, require_torch_dist
from megalite.dist_checkpointing.serialization import write_marker
from megalite.utils.errors import CheckpointError

MARKER = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)


def test_marker_has_megatrons_bytes(tmp_path):
    write_marker(tmp_path)
    assert (tmp_path / "metadata.json").read_bytes() == MARKER
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]
    assert read_marker(tmp_path) == CheckpointingConfig("torch_dist") and is_complete(tmp_path)


def test_defaults_of_old_markers(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert read_marker(tmp_path) == CheckpointingConfig("zarr", 1, "torch", 1)
    with pytest.raises(CheckpointError, match="layout zarr"):
        require_torch_dist(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"sharded_backend": "torch_dist", "more": 1}',
        b"{}",
        b'{"sharded_backend": 3}',
        b"\xff",
    ],
)
def test_marker_that_is_not_valid_does_not_count(tmp_path, text):
    (tmp_path / "metadata.json").write_bytes(text)
    assert not is_complete(tmp_path)
    with pytest.raises(CheckpointError, match="metadata.json"):
        read_marker(tmp_path)


def test_folder_without_marker_and_missing_folder_are_told_apart(tmp_path):
    assert not is_complete(tmp_path)
    with pytest.raises(CheckpointError, match="its save did not finish"):
        read_marker(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_marker(tmp_path / "iter_0000001")


def test_failing_rename_leaves_no_marker(tmp_path):
    def hook(point, path):
        if point == "rename":
            raise OSError("injected")

    with pytest.raises(OSError, match="injected"):
        write_marker(tmp_path, hook)
    assert not is_complete(tmp_path)
