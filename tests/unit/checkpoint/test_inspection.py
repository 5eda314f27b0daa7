from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megalite.checkpoint.inspection import difference, find_step, is_equal, keys, part_of, summary, verify
from megalite.dist_checkpointing import SaveOptions, ShardedObject, ShardedTensor, save, write_marker
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError
from tests.helpers.fixtures import checkpoint_of, megatron_fixture

ROWS = 70_000


def _state(scale: float = 1.0) -> dict[str, Any]:
    halves = [
        ShardedTensor.from_rank_offsets("w", torch.arange(ROWS * 4.0).view(ROWS, 4) * scale + part, (0, part, 2))
        for part in range(2)
    ]
    moments = {
        f"optimizer.state.{word}.w": ShardedTensor.from_rank_offsets(f"optimizer.state.{word}.w", torch.ones(3))
        for word in ("param", "exp_avg", "exp_avg_sq")
    }
    rng = ShardedObject("rng_state", [1, 2], (1, 1), (0, 0))
    return {
        "halves": halves,
        "optimizer_state": moments,
        "rng": rng,
        "iteration": 5,
        "nested": {"lr": 0.1, "list": [1, 2]},
    }


def _write(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    folder.mkdir(parents=True)
    save(state, folder, group=SINGLE, options=SaveOptions(**options))
    write_marker(folder)
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = _write(tmp_path / "run" / "iter_0000005", _state())
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def test_a_step_is_found_by_itself_by_its_save_folder_and_by_number(step: Path) -> None:
    assert find_step(step) == find_step(step.parent) == find_step(step.parent, 5) == step
    for path, number in ((step.parent, 6), (step.parent.parent, None), (step / "common.pt", None)):
        with pytest.raises(CheckpointError):
            find_step(path, number)


def test_summary_of_a_small_step(step: Path) -> None:
    found = summary(step)
    assert (found["format"], found["complete"], found["iteration"]) == ("torch_dist", True, 5)
    assert (found["tensors"], found["chunks"], found["objects"]) == (4, 5, 1)
    assert found["parts"]["weights"] == {"tensors": 1, "elements": ROWS * 8, "bytes": ROWS * 32}
    assert {part: sizes["elements"] for part, sizes in found["parts"].items() if part != "weights"} == dict.fromkeys(
        ("masters", "exp_avg", "exp_avg_sq"), 3
    )
    assert found["ranks"] == {0: {"weights": ROWS * 32, "masters": 12, "exp_avg": 12, "exp_avg_sq": 12}}
    assert found["bytes_per_rank"]["max"] == ROWS * 32 + 36 and json.dumps(found)
    assert set(found["files"]) == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}


def test_summary_of_megatrons_files() -> None:
    found = summary(checkpoint_of(megatron_fixture("optim_dp_reshardable_bf16_tp1dp2")))
    assert (found["written_by"], found["optimizer_layout"]) == ("Megatron", "dp_reshardable")
    assert found["topology"] == {"tp": 1, "pp": 1, "dp": 2} and set(found["ranks"]) == {0, 1}
    assert {part for part in found["parts"]} == {"weights", "masters", "exp_avg", "exp_avg_sq"}
    assert verify(checkpoint_of(megatron_fixture("optim_dp_reshardable_bf16_tp1dp2"))) == []
    legacy = find_step(megatron_fixture("legacy_fp32_tp2pp2") / "ckpt")
    assert (summary(legacy)["format"], summary(legacy)["complete"]) == ("torch", False)


def test_an_incomplete_step_is_described_and_not_believed(step: Path) -> None:
    (step / "metadata.json").unlink()
    found = summary(step)
    assert (found["format"], found["complete"]) == ("incomplete torch_dist", False) and "parts" not in found
    (finding,) = verify(step)
    assert "did not finish" in finding["text"]


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", "weights"),
        ("optimizer.state.param.decoder.weight", "masters"),
        ("optimizer.state.fp32_param.decoder.weight", "masters"),
        ("optimizer.state.exp_avg_sq.decoder.weight", "exp_avg_sq"),
        ("chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg", "exp_avg"),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param", "masters"),
        ("optimizer.state.step", "other optimizer state"),
    ],
)
def test_part_of_the_state(key: str, part: str) -> None:
    assert part_of(key) == part


def test_keys_by_pattern_and_with_chunks(step: Path) -> None:
    assert [row["key"] for row in keys(step)][-1] == "rng_state/shard_0.0_1.1" and len(keys(step)) == 5
    assert [row["key"] for row in keys(step, "*.exp_avg.*")] == ["optimizer.state.exp_avg.w"]
    (row,) = [row for row in keys(step, "w", with_chunks=True) if row["key"] == "w"]
    assert (row["shape"], row["dtype"], row["num_chunks"]) == ([2 * ROWS, 4], "float32", 2)
    first, second = row["chunks"]
    assert (first["offset"], second["offset"], second["sizes"]) == ([0, 0], [ROWS, 0], [ROWS, 4])
    assert first["first_byte"] + first["length"] == second["first_byte"]


def _edit_index(folder: Path, edit: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _drop_chunk(metadata: Any) -> None:
    del metadata.state_dict_metadata["w"].chunks[1]


def _overlap(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((ROWS + 1, 4)))


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected", "key", "file"),
    [
        (lambda step: _edit_index(step, _drop_chunk), "no chunk holds (70000, 4) at (70000, 0)", "w", ".metadata"),
        (lambda step: _edit_index(step, _overlap), "overlap", "w", None),
        (lambda step: _flip(step / "__0_0.distcp", 2000), "the checksum of record", "w at (0, 0)", "__0_0.distcp"),
        (lambda step: (step / "__0_0.distcp").unlink(), "cannot read", None, "__0_0.distcp"),
        (lambda step: os.truncate(step / "__0_0.distcp", 5000), "cut short", None, "__0_0.distcp"),
        (lambda step: (step / "__7_0.distcp").write_bytes(b"x"), "named by nothing", None, "__7_0.distcp"),
        (lambda step: (step / "common.pt").write_bytes(b""), "common.pt", None, "common.pt"),
        (lambda step: (step / ".metadata").write_bytes(b"x"), "cannot read", None, ".metadata"),
    ],
)
def test_verify_names_what_is_wrong(step: Path, damage: Any, expected: str, key: str | None, file: str | None) -> None:
    assert verify(step) == []
    damage(step)
    findings = verify(step)
    assert findings and any(expected in entry["text"] for entry in findings)
    (entry,) = [entry for entry in findings if expected in entry["text"]][:1]
    assert (key is None or entry["key"] == key) and (file is None or entry["file"] == file)


def _swap_items(step: Path) -> None:
    def edit(metadata: Any) -> None:
        one, other = (
            MetadataIndex(key, torch.Size((0,))) for key in ("optimizer.state.param.w", "optimizer.state.long")
        )
        places = metadata.storage_data
        places[one], places[other] = places[other], places[one]

    _edit_index(step, edit)


def test_verify_notices_exchanged_items_and_bytes_that_belong_to_nothing(tmp_path: Path) -> None:
    state = _state()
    state["long"] = ShardedTensor.from_rank_offsets("optimizer.state.long", torch.ones(9))
    folder = _write(tmp_path / "a", state)
    with open(folder / "__0_0.distcp", "ab") as file:
        file.write(b"xyz")
    (entry,) = verify(folder)
    assert "3 bytes at its end that belong to no item" in entry["text"]
    _swap_items(folder)
    assert {entry["key"] for entry in verify(folder)} == {None, "optimizer.state.param.w", "optimizer.state.long"}


def test_difference_looks_into_objects_and_long_tensors_of_the_common_part(tmp_path: Path) -> None:
    def state(last: float, note: int) -> dict[str, Any]:
        long = torch.zeros(5000)
        long[2500] = last
        return {"long": long, "rng": ShardedObject("rng_state", {"x": [1, note]}, (1, 1), (0, 0))}

    one, other = _write(tmp_path / "a", state(0.0, 1)), _write(tmp_path / "b", state(1.0, 2))
    found = difference(one, other, with_values=True)
    assert set(found["common"]) == {"long"} and found["objects"] == ["rng_state/shard_0.0_1.1"]
    assert is_equal(difference(one, one, with_values=True))


def test_verify_lists_all_findings_and_the_manifests(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", _state(), verify_integrity="xxh3", num_files=2)
    assert verify(folder) == []
    _flip(folder / "__0_0.distcp", 1500)
    _flip(folder / "__0_1.distcp", 1500)
    (folder / "stray.distcp").write_bytes(b"")
    texts = [entry["text"] for entry in verify(folder)]
    assert sum("checksum of record" in text for text in texts) == 2 and sum("have hash" in text for text in texts) == 2
    assert any("stray.distcp" in text for text in texts)


def test_difference_of_keys_shapes_values_and_plain_values(step: Path, tmp_path: Path) -> None:
    same = _write(tmp_path / "same", _state(), num_files=3)
    assert is_equal(difference(step, same, with_values=True))
    other = _state()
    other["halves"][1].data[7, 3] += 0.5
    other["nested"] = {"lr": 0.2, "list": [1, 3]}
    other["optimizer_state"]["optimizer.state.param.w"] = ShardedTensor.from_rank_offsets(
        "optimizer.state.param.w", torch.ones(4)
    )
    other["more"] = ShardedTensor.from_rank_offsets("more", torch.ones(2))
    del other["optimizer_state"]["optimizer.state.exp_avg.w"]
    found = difference(step, _write(tmp_path / "other", other), with_values=True)
    assert found["only_in_first"] == ["optimizer.state.exp_avg.w"] and found["only_in_second"] == ["more"]
    assert found["shapes"] == {"optimizer.state.param.w": ["float32 [3]", "float32 [4]"]}
    assert found["common"] == {"nested.list": ["[1, 2]", "[1, 3]"], "nested.lr": ["0.1", "0.2"]}
    assert found["values"] == {"w": {"elements": 1, "of": ROWS * 8, "largest": 0.5}}
    assert not is_equal(found) and json.dumps(found)
    assert "values" not in difference(step, same)


def test_values_are_compared_whatever_they_are(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"s": ShardedTensor.from_rank_offsets("s", torch.tensor(value, dtype=torch.bfloat16))}

    one, other = _write(tmp_path / "a", state(float("nan"))), _write(tmp_path / "b", state(1.0))
    shutil.copytree(one, tmp_path / "c")
    assert is_equal(difference(one, tmp_path / "c", with_values=True))
    assert difference(one, other, with_values=True)["values"]["s"]["elements"] == 1
