"""What a step's folder holds: a case for each layout, and for each way in which a save can have died."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.checkpoint.load import read_common
from megalite.checkpoint.paths import TRACKER, iteration_folder
from megalite.checkpoint.resolve import LoadDecision, LoadMode, resolve_load
from megalite.checkpoint.sniff import StepFormat, check_step, format_of, sniff
from megalite.config.schema import CheckpointConfig
from megalite.dist_checkpointing.core import TORCH_DIST, CheckpointingConfig
from megalite.dist_checkpointing.serialization import write_marker
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, DamagedCheckpointError
from tests.helpers.fixtures import checkpoint_of, megatron_fixture

WHOLE = ("common.pt", "__0_0.distcp", ".metadata", "metadata.json")


@pytest.mark.parametrize(
    ("names", "marker", "expected"),
    [
        (WHOLE, TORCH_DIST, StepFormat.TORCH_DIST),
        # The valid marker decides, whatever else is there or not.
        ((*WHOLE, "mp_rank_00"), TORCH_DIST, StepFormat.TORCH_DIST),
        (("metadata.json",), TORCH_DIST, StepFormat.TORCH_DIST),
        # Each point at which a torch_dist save can have died.
        (("common.pt",), None, StepFormat.INCOMPLETE_TORCH_DIST),
        (("__1_0.distcp",), None, StepFormat.INCOMPLETE_TORCH_DIST),
        (("common.pt", "__0_0.distcp"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        (("common.pt", "__0_0.distcp", ".metadata"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        (("common.pt", ".metadata"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        (("common.pt", "__0_0.distcp", ".metadata", "config.yaml"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        # A marker that is there, but not valid.
        (WHOLE, None, StepFormat.INCOMPLETE_TORCH_DIST),
        ((".metadata", "metadata.json"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        # Legacy: one folder for each model-parallel rank.
        (("mp_rank_00",), None, StepFormat.TORCH),
        (("mp_rank_01_003", "mp_rank_00_000"), None, StepFormat.TORCH),
        # Plain DCP has an index and no common part.
        ((".metadata", "__0_0.distcp"), None, StepFormat.TORCH_DCP),
        ((".metadata",), None, StepFormat.TORCH_DCP),
        (("__0_0.distcp", "__1_0.distcp"), None, StepFormat.INCOMPLETE_TORCH_DIST),
        # Markers of others.
        (("metadata.json",), CheckpointingConfig("zarr"), StepFormat.FOREIGN),
        (("metadata.json",), replace(TORCH_DIST, sharded_backend_version=2), StepFormat.FOREIGN),
        (("metadata.json", "mp_rank_00"), CheckpointingConfig("torch"), StepFormat.TORCH),
        (("metadata.json", ".metadata"), CheckpointingConfig("torch_dcp"), StepFormat.TORCH_DCP),
        (("metadata.json", ".metadata"), CheckpointingConfig("fsdp_dtensor"), StepFormat.TORCH_DCP),
        ((), None, StepFormat.NOTHING),
        (("config.yaml", "notes.txt"), None, StepFormat.NOTHING),
    ],
    ids=str,
)
def test_layouts(names: tuple[str, ...], marker: CheckpointingConfig | None, expected: StepFormat) -> None:
    assert sniff(names, marker) is expected


def _step(root: Path, *names: str, iteration: int = 30) -> Path:
    folder = iteration_folder(root, iteration)
    folder.mkdir(parents=True)
    for name in names:
        if name.startswith("mp_rank_"):
            (folder / name).mkdir()
        elif name == "metadata.json":
            write_marker(folder)
        else:
            (folder / name).write_bytes(b"x")
    return folder


def test_the_marker_is_read_for_itself(tmp_path: Path) -> None:
    folder = _step(tmp_path, *WHOLE)
    assert format_of(folder) is StepFormat.TORCH_DIST
    check_step(tmp_path, 30)
    (folder / "metadata.json").write_bytes(b"{}")
    assert format_of(folder) is StepFormat.INCOMPLETE_TORCH_DIST


@pytest.mark.parametrize("names", [("common.pt", "__0_0.distcp", ".metadata"), ("__0_0.distcp",), ()], ids=str)
def test_p2_an_unfinished_step_is_named_so_with_the_complete_ones_beside_it(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    _step(tmp_path, *WHOLE, iteration=10)
    _step(tmp_path, *WHOLE, iteration=20)
    _step(tmp_path, *names)
    with pytest.raises(DamagedCheckpointError, match=r"iteration 30 of .* is incomplete .*complete there: 10, 20\."):
        check_step(tmp_path, 30)


REFUSED = {
    "legacy": (("mp_rank_00_000",), "legacy 'torch' checkpoint .*--ckpt-convert-format torch_dist"),
    "dcp": (("__0_0.distcp", ".metadata"), "plain PyTorch DCP .*'torch_dcp' or 'fsdp_dtensor'.*save it as torch_dist"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
@pytest.mark.parametrize("key", ["save", "load", "pretrained_checkpoint"])
def test_p5_layouts_that_are_not_read_are_refused_by_name(tmp_path: Path, kind: str, key: str) -> None:
    names, text = REFUSED[kind]
    folder = _step(tmp_path, *names)
    (tmp_path / TRACKER).write_text("30")
    with pytest.raises(CheckpointError, match=f"{folder} is a .*{text}") as caught:
        resolve_load(CheckpointConfig(**{key: tmp_path}))
    # It is whole, only not for us: no older step takes its place.
    assert type(caught.value) is CheckpointError


def test_p5_a_legacy_checkpoint_of_megatron_is_refused_by_name() -> None:
    folder = checkpoint_of(megatron_fixture("legacy_fp32_tp2pp2"))
    assert format_of(folder) is StepFormat.TORCH
    with pytest.raises(CheckpointError, match=r"legacy 'torch' checkpoint .*one for each tensor and pipeline rank"):
        resolve_load(CheckpointConfig(load=folder.parent))
    with pytest.raises(CheckpointError, match=f"{folder} is a single iteration.*parent {folder.parent}"):
        resolve_load(CheckpointConfig(load=folder))


def test_p5_a_checkpoint_of_megatron_is_known(tmp_path: Path) -> None:
    assert format_of(checkpoint_of(megatron_fixture("gpt2_tp2pp2"))) is StepFormat.TORCH_DIST


def test_other_versions_are_refused_with_their_numbers(tmp_path: Path) -> None:
    folder = _step(tmp_path)
    (folder / "metadata.json").write_bytes(replace(TORCH_DIST, sharded_backend_version=2).marker_bytes())
    with pytest.raises(CheckpointError, match="has layout torch_dist version 2 with torch version 1, this version"):
        check_step(tmp_path, 30)


def test_a_step_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _step(tmp_path, *WHOLE)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(CheckpointError, match=f"cannot list {folder}: Permission denied; check"):
        format_of(folder)


def test_a_step_is_looked_at_again_when_it_is_read(tmp_path: Path) -> None:
    folder = _step(tmp_path, "common.pt")
    with pytest.raises(DamagedCheckpointError, match="iteration 30 of .* is incomplete"):
        read_common(LoadDecision(folder, 30, LoadMode.RESUME), SINGLE)
