"""Elements go straight into the tensors that ask for them; whatever is unusual takes the long way to the same bits."""

from __future__ import annotations

import io
import logging
import os
import pickle
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.dist_checkpointing import LoadOptions, SaveOptions, ShardedTensor, load, save, write_marker
from megalite.dist_checkpointing.integrity import BLOCK
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
    real = reader._Lane._take
    monkeypatch.setattr(reader._Lane, "_take", lambda self, n, is_whole: (taken.append(n), real(self, n, is_whole))[1])
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


def _bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what the reader takes from data files."""
    taken: list[int] = []
    real = os.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        done = real(handle, buffers, offset)
        taken.append(done)
        return done

    monkeypatch.setattr(os, "preadv", preadv)
    return taken


TALL = torch.arange(3_000_000, dtype=torch.float32).view(3000, 1000)


def _part(folder: Path, rows: slice, columns: slice, kind: str, key: str = "w") -> torch.Tensor:
    """Return a rectangle of the stored tensor, loaded into a block of its own."""
    target = torch.full((rows.stop - rows.start, columns.stop - columns.start), -1.0)
    leaf = ShardedTensor.from_block(key, target, tuple(TALL.shape), (rows.start, columns.start))
    options = LoadOptions(verify_integrity=kind, validate_access_integrity=False)
    load({key: leaf}, folder, group=SINGLE, options=options)
    return target


@pytest.mark.parametrize("kind", ["off", "xxh3"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(0, 3000), slice(0, 1000)),
        (slice(700, 1400), slice(0, 1000)),
        (slice(2999, 3000), slice(0, 1000)),
        (slice(5, 6), slice(999, 1000)),
        (slice(0, 3000), slice(250, 750)),
        (slice(100, 2900), slice(0, 1)),
    ],
    ids=str,
)
def test_parts_of_a_chunk_are_its_elements_and_little_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows: slice, columns: slice
) -> None:
    _write(tmp_path, {"w": TALL}, kind)
    taken = _bytes_read(monkeypatch)
    assert torch.equal(_part(tmp_path, rows, columns, kind), TALL[rows, columns])
    # Columns of a narrow tensor are read through; rows are not, but for the blocks that have a hash.
    needed = 4 * (rows.stop - rows.start) * 1000
    assert sum(taken) <= needed + 2 * 4096 + (2 * BLOCK if kind == "xxh3" else 16)


@pytest.mark.parametrize("kind", ["off", "xxh3"])
def test_wide_columns_are_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    wide = torch.rand(40, 100_000)
    _write(tmp_path, {"w": wide}, kind)
    taken = _bytes_read(monkeypatch)
    target = torch.zeros(40, 10_000)
    leaf = ShardedTensor.from_block("w", target, tuple(wide.shape), (0, 30_000))
    options = LoadOptions(verify_integrity=kind, validate_access_integrity=False)
    load({"w": leaf}, tmp_path, group=SINGLE, options=options)
    assert torch.equal(target, wide[:, 30_000:40_000])
    if kind == "off":
        assert sum(taken) <= 1.05 * target.nbytes
    else:
        assert sum(taken) <= wide.nbytes + BLOCK, "no block twice"


def test_with_hashes_a_flip_in_a_needed_block_is_found_and_another_is_not_read(tmp_path: Path) -> None:
    _write(tmp_path, {"w": TALL}, "xxh3")
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    data[6 * BLOCK] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)
    row = 6 * BLOCK // 4000 + 2
    _part(tmp_path, slice(0, 1000), slice(0, 1000), "xxh3")
    with pytest.raises(CheckpointError, match="w in .*damaged: bytes 6291456 to 7340032"):
        _part(tmp_path, slice(row, row + 1), slice(0, 1), "xxh3")
    with pytest.raises(CheckpointError, match="w in .*damaged"):
        _part(tmp_path, slice(0, 3000), slice(0, 1000), "off")


@pytest.mark.parametrize("kind", ["off", "xxh3"])
@pytest.mark.parametrize("shift", [4, 8])
def test_a_header_that_moves_the_elements_is_found(tmp_path: Path, kind: str, shift: int) -> None:
    """The length of padding before the elements decides where they begin: a part of them would look sound."""
    _write(tmp_path, {"w": TALL}, kind)
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    header = data.index(b"archive/data/0") - 30
    (extra,) = struct.unpack_from("<H", data, header + 28)
    struct.pack_into("<H", data, header + 28, extra - shift)
    (tmp_path / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError, match="w in .*damaged"):
        _part(tmp_path, slice(1600, 1700), slice(0, 1000), kind)


def test_of_an_archive_of_another_writer_all_is_read_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, {"w": TALL})
    _replace(tmp_path, TALL + 1)
    assert torch.equal(_part(tmp_path, slice(5, 7), slice(0, 1000), "off"), TALL[5:7] + 1)
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    data[-2_000_000] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError, match="w in .*damaged"):
        _part(tmp_path, slice(5, 7), slice(0, 1000), "off")


def test_threads_read_the_same_and_report_the_first_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_WORTH_THREADS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    before, lanes, real = threading.active_count(), [], reader._Lane.__init__
    monkeypatch.setattr(reader._Lane, "__init__", lambda self, own: (lanes.append(self), real(self, own))[1])
    tensors = {f"w{number:02}": torch.rand(50, 60 + number) for number in range(40)}
    for kind in ("off", "xxh3"):
        folder = tmp_path / kind
        folder.mkdir()
        _write(folder, tensors, kind)
        targets = {key: torch.zeros_like(value) for key, value in tensors.items()}
        request = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in targets.items()}
        options = LoadOptions(verify_integrity=kind)
        load(request, folder, group=SINGLE, options=options)
        assert all(torch.equal(targets[key], tensors[key]) for key in tensors)
        assert len(lanes) > 2, "one for the objects and at least two threads"
        data = bytearray((folder / "__0_0.distcp").read_bytes())
        places = pickle.loads((folder / ".metadata").read_bytes()).storage_data
        for place, info in places.items():
            if place.fqn in ("w17", "w30"):
                data[info.offset + info.length // 2] ^= 1
        (folder / "__0_0.distcp").write_bytes(data)
        with pytest.raises(CheckpointError, match="w17 in .*damaged"):
            load(request, folder, group=SINGLE, options=options)
    assert threading.active_count() == before


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
