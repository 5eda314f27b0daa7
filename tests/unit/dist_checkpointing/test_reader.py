"""Elements go straight into the tensors that ask for them; whatever is unusual takes the long way to the same bits."""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.dist_checkpointing import LoadOptions, SaveOptions, ShardedTensor, load, save, write_marker
from megalite.dist_checkpointing.strategies import reader
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError

W = torch.arange(600.0).view(30, 20)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def _write(folder: Path, tensors: dict[str, torch.Tensor], kind: str = "off") -> Path:
    leaves = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    save(leaves, folder, group=SINGLE, options=SaveOptions(verify_integrity=kind))
    write_marker(folder)
    return folder


def _load(folder: Path, target: torch.Tensor, key: str = "w", kind: str = "off") -> torch.Tensor:
    load(
        {key: ShardedTensor.from_block(key, target, tuple(target.shape), (0,) * target.dim())},
        folder,
        group=SINGLE,
        ignore_keys=lambda name: name != key,
        options=LoadOptions(verify_integrity=kind),
    )
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7,), (30, 20), (2, 3, 5)], ids=str)
def test_every_type_and_shape_is_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = (torch.rand(shape) * 100).to(dtype)
    _write(tmp_path, {"w": values})
    monkeypatch.setattr(TorchSaveFraming, "parse_tensor", lambda *args: pytest.fail("torch had to load it"))
    assert torch.equal(_load(tmp_path, torch.zeros_like(values)), values)


@pytest.mark.parametrize("kind", ["off", "xxh3"])
def test_whole_chunks_need_no_buffer_and_others_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _write(tmp_path, {"w": W}, kind)
    taken = []
    real = reader.ItemReader._take
    monkeypatch.setattr(reader.ItemReader, "_take", lambda self, n: (taken.append(n), real(self, n))[1])
    assert torch.equal(_load(tmp_path, torch.zeros(30, 20), kind=kind), W) and taken == []
    assert torch.equal(_load(tmp_path, torch.zeros(20, 30).t(), kind=kind), W) and taken == [2400]
    assert torch.equal(_load(tmp_path, torch.zeros(30, 20, dtype=torch.float64), kind=kind), W.double())
    assert taken == [2400, 2400]


def test_a_tensor_larger_than_a_piece_is_read_and_checked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_PIECE", 1000)
    for kind in ("off", "xxh3"):
        folder = tmp_path / kind
        folder.mkdir()
        _write(folder, {"w": W}, kind)
        assert torch.equal(_load(folder, torch.zeros(30, 20), kind=kind), W)
        data = bytearray((folder / "__0_0.distcp").read_bytes())
        data[2000] ^= 1
        (folder / "__0_0.distcp").write_bytes(data)
        with pytest.raises(CheckpointError, match="w in .*damaged"):
            _load(folder, torch.zeros(30, 20), kind=kind)


def _replace(folder: Path, value: Any, **settings: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer, **settings)
    with open(folder / "__0_0.distcp", "ab") as file:
        begin = file.tell()
        file.write(buffer.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = metadata.storage_data
    metadata.storage_data[place] = type(metadata.storage_data[place])("__0_0.distcp", begin, len(buffer.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "unusual",
    [
        lambda: torch.cat([W, W])[5:35].sub(0).add(0),
        lambda: W.t().contiguous().t(),
        lambda: torch.nn.Parameter(W.clone()),
        lambda: torch.cat([torch.zeros(1, 20), W])[1:],
    ],
    ids=["other values", "strided", "parameter", "view behind the start"],
)
def test_archives_that_are_laid_out_otherwise_are_loaded_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unusual: Any
) -> None:
    _write(tmp_path, {"w": W})
    value = unusual()
    _replace(tmp_path, value)
    with caplog.at_level(logging.DEBUG, logger="megalite"):
        assert torch.equal(_load(tmp_path, torch.zeros(30, 20)), value.detach())
    is_usual = type(value) is torch.Tensor and value.is_contiguous() and value.storage_offset() == 0
    assert ("the whole archive is loaded" in caplog.text) == (not is_usual)


def test_what_torch_saves_by_itself_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {"w": W})
    _replace(tmp_path, W + 1)
    monkeypatch.setattr(TorchSaveFraming, "parse_tensor", lambda *args: pytest.fail("torch had to load it"))
    assert torch.equal(_load(tmp_path, torch.zeros(30, 20)), W + 1)
