"""Files that somebody made on purpose, and every kind of damage: one message that names file and key, nothing is run.

The exploits stay here so that no change of the readers lets them in again (SEC-01, SEC-04, SEC-06).
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import shutil
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from megalite.checkpoint.paths import read_tracker
from megalite.dist_checkpointing import (
    LoadOptions,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    core,
    load,
    load_common_state_dict,
    safe,
    save,
    write_marker,
)
from megalite.dist_checkpointing.integrity import verify_manifests
from megalite.dist_checkpointing.strategies.base import CheckpointIndex, StoredItem
from megalite.dist_checkpointing.strategies.index import check_index
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, DamagedCheckpointError

RNG = "rng_state/shard_0.0_1.1"


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.open, (self.path, os.O_CREAT))


def _state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "w": [
            ShardedTensor.from_rank_offsets("w", (torch.arange(64.0).view(16, 4) + part) * scale, (0, part, 4))
            for part in range(4)
        ],
        "b": ShardedTensor.from_rank_offsets("b", torch.full((5,), 3.0 * scale, dtype=torch.bfloat16)),
        "rng": ShardedObject("rng_state", {"state": [1, 2, 3] if scale else None}, (1, 1), (0, 0)),
        "iteration": 7,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "iter_0000007"
    path.mkdir()
    save(_state(), path, group=SINGLE, options=SaveOptions(num_files=2, verify_integrity="xxh3"))
    write_marker(path)
    _load(path)
    return path


def _load(folder: Path, **options: Any) -> dict[str, Any]:
    request = _state(scale=0.0)
    result = load(request, folder, group=SINGLE, options=LoadOptions(**options))
    expected = _state()
    loaded = [leaf.data for leaf in (*request["w"], request["b"])]
    true = [leaf.data for leaf in (*expected["w"], expected["b"])]
    assert all(torch.equal(one, other) for one, other in zip(loaded, true, strict=True)), "loaded something else"
    assert result["rng"] == {"state": [1, 2, 3]} and result["iteration"] == 7
    return result


def _refused(folder: Path, *names: str, **options: Any) -> str:
    """Load, which has to fail with one explained error; return its text, which names ``names``."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            _load(folder, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, "memory was taken before the claim was checked"
    text = str(caught.value)
    assert all(name in text for name in names), text
    assert len(text) < 2000 and "Traceback" not in text
    return text


def _edit(folder: Path, edit: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _put_item(folder: Path, key: str, data: bytes, part: int = 0) -> None:
    """Append ``data`` to a file and let the index point there."""
    with open(folder / "__0_0.distcp", "ab") as file:
        begin = file.tell()
        file.write(data)

    def edit(metadata: Any) -> None:
        place = MetadataIndex(key) if "/" in key else MetadataIndex(key, torch.Size((16 * part, 0)))
        metadata.storage_data[place] = type(metadata.storage_data[place])("__0_0.distcp", begin, len(data))

    _edit(folder, edit)


# Code


def test_sec_01_sec_06_code_in_any_file_is_not_run(folder: Path, tmp_path: Path) -> None:
    """SEC-01, SEC-06: common part, index, tensors, objects, random states."""
    target = tmp_path / "touched"
    payloads: dict[str, Callable[[Path], None]] = {
        "common.pt": lambda step: (step / "common.pt").write_bytes(_archive({"iteration": 7, "args": Touch(target)})),
        ".metadata": lambda step: (step / ".metadata").write_bytes(pickle.dumps(Touch(target))),
        "w": lambda step: _put_item(step, "w", _archive([Touch(target), "x" * 4096])),
        RNG: lambda step: _put_item(step, RNG, _archive([{"state": Touch(target)}])),
    }
    for number, (name, place) in enumerate(payloads.items()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy)
        place(copy)
        _refused(copy, name)
    assert not target.exists()
    assert pickle.loads(pickle.dumps(Touch(target))) and target.exists(), "the exploit itself works"


def test_code_behind_a_persistent_id_is_not_run(folder: Path, tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", Touch(tmp_path / "touched"), "0", "cpu", 4) if value == "here" else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"iteration": 7, "args": "here"})
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/version", "3\n")
    _refused(folder, "common.pt")
    assert not (tmp_path / "touched").exists()


# Places


def _link(path: Path, tmp_path: Path) -> None:
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")


NAMES = ("__0_0.distcp", "common.pt", ".metadata", "metadata.json", "integrity_xxh3.npz")


@pytest.mark.parametrize("name", NAMES)
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    _link(folder / name, tmp_path)
    _refused(folder, name, "link out of the checkpoint folder", verify_integrity="xxh3")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero")
    _refused(folder, name, verify_integrity="xxh3")


def test_a_tracker_that_is_no_file_does_not_hold_anybody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    with pytest.raises(CheckpointError, match="not a regular file|cannot read"):
        read_tracker(tmp_path)


# Claims


@pytest.mark.parametrize("elements", [10**9, 10**12, 10**18])
def test_claims_of_elements_take_no_memory(folder: Path, elements: int) -> None:
    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata["b"].size = torch.Size((elements,))
        metadata.state_dict_metadata["b"].chunks[0] = ChunkStorageMetadata(torch.Size((0,)), torch.Size((elements,)))

    _edit(folder, edit)
    _refused(folder, ".metadata", "b")


@pytest.mark.parametrize("length", [10**9, 2**62, -1])
def test_claims_of_bytes_take_no_memory(folder: Path, length: int) -> None:
    def edit(metadata: Any) -> None:
        place = MetadataIndex(RNG)
        metadata.storage_data[place] = type(metadata.storage_data[place])("__0_0.distcp", 0, length)

    _edit(folder, edit)
    _refused(folder)


def test_sec_04_storages_that_are_too_small_are_refused(folder: Path) -> None:
    """SEC-04: the size of a storage is a claim of the pickle, as are the strides of a view into it."""
    sound = torch.zeros(16, 4)
    data = _archive(sound)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    for name in content:
        if name.endswith("data/0"):
            content[name] = content[name][:8]
    _put_item(folder, "w", _as_torch(content))
    _refused(folder, "w", "__0_0.distcp")
    _put_item(folder, "w", _archive(torch.zeros(1, 4).expand(16, 4)))
    _refused(folder, "w", "__0_0.distcp")
    _put_item(folder, "w", _archive(torch.zeros(4)))
    _refused(folder, "w", "__0_0.distcp")
    for negative in (b"J\xff\xff\xff\xff", b"J\xf0\xff\xff\xff"):
        # The offset of the view, a one-byte number after the storage, becomes negative.
        pickled = next(value for name, value in content.items() if name.endswith("data.pkl"))
        changed = {
            n: (v.replace(b"QK\x00K\x10", b"Q" + negative + b"K\x10") if n.endswith("data.pkl") else v)
            for n, v in content.items()
        }
        if changed != content and pickled:
            _put_item(folder, "w", _as_torch(changed))
            _refused(folder, "w", "__0_0.distcp")


def _as_torch(content: dict[str, bytes], **settings: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **settings) as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    return buffer.getvalue()


def test_compressed_repeated_and_hidden_records_are_refused(folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(_archive(torch.zeros(16, 4)))) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    bomb = {**content, "archive/bomb": b"\0" * (200 << 20)}
    _put_item(folder, "w", _as_torch(bomb, compression=zipfile.ZIP_DEFLATED))
    _refused(folder, "w", "__0_0.distcp")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        for name, value in (*content.items(), next(iter(content.items()))):
            archive.writestr(name, value)
    _put_item(folder, "w", twice.getvalue())
    _refused(folder, "w", "__0_0.distcp")
    # Another archive in front: readers from the start and from the end would see different tensors.
    _put_item(folder, "w", _archive(torch.ones(16, 4)) + _archive(torch.zeros(16, 4)))
    _refused(folder, "w", "__0_0.distcp")


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


def _deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_structures_that_explode_when_they_are_walked_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 lists that hold the one before twice are 2^60 values for whoever walks them, in a few hundred bytes."""
    # The real limit takes seconds to reach while memory is traced.
    monkeypatch.setattr(safe, "_MOST_VALUES", 50_000)
    whole = (folder / "common.pt").read_bytes()
    for value in (_nested(60), _deep(250)):
        (folder / "common.pt").write_bytes(_archive({"iteration": 7, "x": value}))
        _refused(folder, "common.pt")
        with pytest.raises(DamagedCheckpointError, match="more than"):
            load_common_state_dict(folder)
    (folder / "common.pt").write_bytes(whole)
    _put_item(folder, RNG, _archive([_nested(60)]))
    _refused(folder, RNG)


@pytest.mark.parametrize(
    "code",
    [
        b"(" * 1_000_000 + b".",
        b"]" * 1_000_000 + b".",
        b"\x80\x04" + b"\x8c\x01a\x94" * 200_000 + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
        b"J" + struct.pack("<i", 5) + b"r" + struct.pack("<I", 2**31 - 1) + b".",
    ],
    ids=["marks", "lists", "memo", "frame", "string", "memo index"],
)
def test_pickles_that_claim_too_much_are_refused(folder: Path, code: bytes) -> None:
    (folder / ".metadata").write_bytes(code)
    _refused(folder, ".metadata")


@pytest.mark.parametrize("text", ["[" * 200_000, "{" * 10, "null", "[]", '{"sharded_backend": []}', "x" * 100_000])
def test_markers_that_are_none_are_refused(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_text(text)
    _refused(folder, "metadata.json")


# Damage


def _swap(folder: Path) -> None:
    first, second = folder / "__0_0.distcp", folder / "__0_1.distcp"
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def _swap_chunks(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        one, other = (MetadataIndex("w", torch.Size((16 * part, 0))) for part in (0, 1))
        places = metadata.storage_data
        places[one], places[other] = places[other], places[one]

    _edit(folder, edit)


def _drop(folder: Path) -> None:
    _edit(folder, lambda metadata: metadata.state_dict_metadata["w"].chunks.pop())


def _twice(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        chunks.append(chunks[0])

    _edit(folder, edit)


def _overlap(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["w"].chunks
        first = next(i for i, chunk in enumerate(chunks) if chunk.offsets[0] == 0)
        chunks[first] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((17, 4)))

    _edit(folder, edit)


def _forget_object(folder: Path) -> None:
    _edit(folder, lambda metadata: metadata.state_dict_metadata.pop(RNG))


def _object_for_tensor(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata["b"] = BytesStorageMetadata()

    _edit(folder, edit)


def _other_dtype(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["b"]
        entry.properties = type(entry.properties)(dtype=torch.float16)

    _edit(folder, edit)


def _share_bytes(folder: Path) -> None:
    def edit(metadata: Any) -> None:
        one, other = (MetadataIndex("w", torch.Size((16 * part, 0))) for part in (0, 1))
        metadata.storage_data[one] = metadata.storage_data[other]

    _edit(folder, edit)


DAMAGE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated data": (lambda f: os.truncate(f / "__0_1.distcp", 300), ("__0_1.distcp",)),
    "empty data": (lambda f: (f / "__0_0.distcp").write_bytes(b""), ("__0_0.distcp",)),
    "missing data": (lambda f: (f / "__0_1.distcp").unlink(), ("__0_1.distcp",)),
    "files exchanged": (_swap, ("distcp",)),
    "empty common part": (lambda f: (f / "common.pt").write_bytes(b""), ("common.pt",)),
    "empty index": (lambda f: (f / ".metadata").write_bytes(b""), (".metadata",)),
    "empty marker": (lambda f: (f / "metadata.json").write_bytes(b""), ("metadata.json",)),
    "chunk missing": (_drop, (".metadata", "w")),
    "chunk twice": (_twice, (".metadata", "w", "overlap")),
    "chunks overlap": (_overlap, (".metadata", "w")),
    "chunks share bytes": (_share_bytes, (".metadata", "w", "share bytes")),
    "object missing": (_forget_object, (RNG,)),
    "tensor turned object": (_object_for_tensor, ("b",)),
    "another type": (_other_dtype, ("b", "float16")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_one_error_that_names_it(folder: Path, kind: str) -> None:
    damage, names = DAMAGE[kind]
    damage(folder)
    _refused(folder, *names)


def test_exchanged_chunks_of_equal_shape_need_hashes(folder: Path) -> None:
    """Both are sound archives of the right shape: only the index is wrong, which its own hash shows."""
    _swap_chunks(folder)
    _refused(folder, ".metadata", verify_integrity="xxh3")


def test_extra_files_are_not_looked_at(folder: Path) -> None:
    (folder / "__9_0.distcp").write_bytes(b"x" * 100)
    (folder / "evil.pt").write_bytes(b"x")
    _load(folder, verify_integrity="xxh3")


def _regions(folder: Path) -> list[tuple[Path, int]]:
    """Return places of every kind: the headers, pickle, elements and directory of an item, and of the other files."""
    pick = random.Random(5)
    places = [(folder / name, position) for name in NAMES for position in (0, 1, 10)]
    for name in ("__0_0.distcp", "__0_1.distcp", "common.pt", ".metadata", "metadata.json"):
        size = (folder / name).stat().st_size
        places += [(folder / name, pick.randrange(size)) for _ in range(60)]
    return places


@pytest.mark.parametrize("kind", ["off", "xxh3"])
def test_any_flipped_byte_is_an_error_or_harmless(folder: Path, kind: str) -> None:
    """With hashes every flip is an error that names the file; without, elements are covered by the archive's CRC."""
    for path, position in _regions(folder):
        if kind == "off" and path.name.startswith("integrity"):
            continue
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[position % len(whole)] ^= 0x11
        path.write_bytes(damaged)
        try:
            _load(folder, verify_integrity=kind)
            # The manifest itself is an archive too, with fields that mean nothing.
            assert kind == "off" or path.name.startswith("integrity"), f"{path.name} byte {position}"
        except CheckpointError as error:
            assert path.name in str(error) or ".metadata" in str(error) or kind == "off", error
        path.write_bytes(whole)


@pytest.mark.parametrize("seed", range(40))
def test_files_full_of_nonsense_are_refused_quickly(folder: Path, seed: int) -> None:
    pick = random.Random(seed)
    name = pick.choice(NAMES)
    whole = (folder / name).read_bytes()
    start, end = sorted(pick.randrange(len(whole) + 1) for _ in range(2))
    damaged = pick.choice(
        [
            pick.randbytes(pick.randrange(2000)),
            whole[:start],
            whole[:start] + whole[end:],
            whole[:start] + pick.randbytes(end - start) + whole[end:],
            whole + whole,
            whole[start:] + whole[:start],
        ]
    )
    (folder / name).write_bytes(damaged)
    try:
        _load(folder, verify_integrity="xxh3")
    except CheckpointError as error:
        assert "Traceback" not in str(error) and len(str(error)) < 3000
    else:
        # Bytes behind the last item belong to nothing.
        assert damaged.startswith(whole)


def test_marker_with_the_same_meaning_is_still_another_file(folder: Path) -> None:
    content = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(content, indent=1))
    _load(folder)
    _refused(folder, "metadata.json", verify_integrity="xxh3")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", ""])
def test_manifests_that_name_files_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    path = folder / "integrity_xxh3.npz"
    with np.load(path) as arrays:
        content = {key: arrays[key] for key in arrays.files}
    content["files"] = np.array([name if entry == "common.pt" else entry for entry in content["files"].tolist()])
    np.savez(path, **content)
    _refused(folder, "integrity_xxh3.npz", verify_integrity="xxh3")
    assert all("secret" not in text for text in verify_manifests(folder))


def test_compressed_manifests_are_refused(folder: Path) -> None:
    path = folder / "integrity_xxh3.npz"
    with np.load(path) as arrays:
        content = {key: arrays[key] for key in arrays.files}
    content["bomb"] = np.zeros(20 << 20, dtype=np.uint8)
    np.savez_compressed(path, **content)
    _refused(folder, "integrity_xxh3.npz", "compressed", verify_integrity="xxh3")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_what_the_disk_is_to_blame_for_is_not_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """An older step would fare no better: no fallback because of it."""
    real = core.read_regular_file

    def fail(path: Path, limit: int | None = None) -> bytes:
        if path.name == name:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, limit)

    monkeypatch.setattr(core, "read_regular_file", fail)
    with pytest.raises(CheckpointError, match=name) as caught:
        _load(folder)
    assert type(caught.value) is CheckpointError


def test_too_little_memory_is_not_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **settings: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError, match="needs more memory") as caught:
        load_common_state_dict(folder)
    assert type(caught.value) is CheckpointError


def test_a_marker_of_a_later_version_is_not_damage(folder: Path) -> None:
    content = json.loads((folder / "metadata.json").read_text()) | {"compression": "zstd"}
    (folder / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="'compression', which this version does not know") as caught:
        _load(folder)
    assert type(caught.value) is CheckpointError


def test_one_item_that_claims_a_whole_file_is_found_quickly() -> None:
    items = {f"o/shard_{i}_20000": StoredItem("x", 100 * i, 100) for i in range(1, 20_000)}
    items["o/shard_0_20000"] = StoredItem("x", 0, 10**7)
    begin = time.perf_counter()
    with pytest.raises(DamagedCheckpointError, match="share bytes"):
        check_index(CheckpointIndex({}, items), "index")
    assert time.perf_counter() - begin < 5
