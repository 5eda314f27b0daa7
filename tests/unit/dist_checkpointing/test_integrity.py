from __future__ import annotations

import hashlib
import importlib.util
import json
import random

import numpy as np
import pytest
import torch
import xxhash

from megalite.dist_checkpointing.integrity import (
    BLOCK,
    SHA256_FILE,
    XXH3_FILE,
    BlockHashes,
    block_hashes,
    parse_sha256,
    require_integrity,
    verify_manifests,
)
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.serialization import LoadOptions, SaveOptions, load, read_index, save, write_marker
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, ConfigError

LARGE = BLOCK // 4 + 1000
"""Elements of a tensor whose item is longer than a block."""


def _state(fill=1.0):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(float(LARGE)) * fill),
        "b": ShardedTensor.from_rank_offsets("b", torch.full((3, 4), 2.0 * fill, dtype=torch.bfloat16)),
        "o": ShardedObject("o", {"text": "x" * 100}, (1,), (0,)),
        "iteration": 5,
    }


def _save(folder, kind, num_files=1):
    folder.mkdir(exist_ok=True)
    save(_state(), folder, group=SINGLE, options=SaveOptions(verify_integrity=kind, num_files=num_files))
    write_marker(folder)
    return folder


def _load(folder, kind):
    request = _state(fill=0.0)
    load(request, folder, group=SINGLE, options=LoadOptions(verify_integrity=kind))
    assert torch.equal(request["w"].data, _state()["w"].data) and torch.equal(request["b"].data, _state()["b"].data)


@pytest.mark.parametrize("sizes", [[0], [1], [BLOCK], [BLOCK - 1, 2], [3, BLOCK, 5 * BLOCK // 2], [BLOCK, BLOCK]])
def test_hash_per_mib_does_not_depend_on_the_pieces(sizes):
    data = random.Random(1).randbytes(sum(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    pieces = [memoryview(data)[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    expected = [xxhash.xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    assert block_hashes(pieces) == block_hashes([data]) == expected


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_what_was_hashed_is_what_lies_on_disk(tmp_path, kind, num_files):
    folder = _save(tmp_path / "a", kind, num_files)
    _load(folder, kind)
    assert verify_manifests(folder) == []
    assert (folder / (SHA256_FILE if kind == "sha256" else XXH3_FILE)).exists()


def test_manifest_is_megatrons(tmp_path):
    folder = _save(tmp_path / "a", "sha256", num_files=2)
    content = (folder / SHA256_FILE).read_text()
    names = ["__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "metadata.json"]
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(names)}
    assert content == json.dumps({"algorithm": "sha256", "files": files}, indent=2)


def test_manifest_is_written_before_the_marker(tmp_path):
    seen = []
    folder = tmp_path
    options = SaveOptions(verify_integrity="sha256")
    save(_state(), folder, group=SINGLE, options=options, hook=lambda point, path: seen.append((point, path.name)))
    assert not (folder / "metadata.json").exists() and (folder / SHA256_FILE).exists()
    assert seen.index(("rename", ".metadata")) < seen.index(("rename", SHA256_FILE))


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_every_flip_in_a_file_is_found(tmp_path, kind):
    folder = _save(tmp_path / "a", kind)
    pick = random.Random(3)
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json"):
        path = folder / name
        whole = path.read_bytes()
        for position in {0, len(whole) - 1, *(pick.randrange(len(whole)) for _ in range(25))}:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << pick.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                _load(folder, kind)
            assert any(name in finding for finding in verify_manifests(folder))
        path.write_bytes(whole)
    _load(folder, kind)


def test_error_names_key_file_and_bytes(tmp_path):
    folder = _save(tmp_path / "a", "xxh3")
    item = read_index(folder).tensors["w"].chunks[0].item
    path = folder / item.file
    data = bytearray(path.read_bytes())
    data[item.offset + BLOCK + 100] ^= 1
    path.write_bytes(data)
    first = item.offset + BLOCK
    with pytest.raises(CheckpointError, match=rf"w in .* is damaged: bytes {first} to .* of __0_0.distcp have hash"):
        _load(folder, "xxh3")


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_absent_manifest_is_an_error(tmp_path, kind):
    folder = _save(tmp_path / "a", "off")
    with pytest.raises(CheckpointError, match="is missing, so the .* hashes that were asked for"):
        _load(folder, kind)


def test_missing_file_and_changed_file_are_listed_together(tmp_path):
    folder = _save(tmp_path / "a", "sha256", num_files=2)
    (folder / "__0_1.distcp").unlink()
    (folder / "common.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="__0_1.distcp is missing; common.pt has sha256"):
        _load(folder, "sha256")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"algorithm": "md5", "files": {}}',
        b'{"algorithm": "sha256", "files": {"../x": "' + b"0" * 64 + b'"}}',
        b'{"algorithm": "sha256", "files": {"x": "0"}}',
        b'{"algorithm": "sha256", "files": {"x": 3}}',
        b"[" * 100_000,
    ],
)
def test_malformed_manifest_is_refused(content):
    with pytest.raises(CheckpointError):
        parse_sha256(content, "integrity.json")


@pytest.mark.parametrize("position", range(0, 1000, 37))
def test_damaged_block_manifest_is_refused(tmp_path, position):
    folder = _save(tmp_path / "a", "xxh3")
    data = bytearray((folder / XXH3_FILE).read_bytes())
    data[position % len(data)] ^= 0xFF
    (folder / XXH3_FILE).write_bytes(data)
    try:
        _load(folder, "xxh3")
    except CheckpointError as error:
        assert XXH3_FILE in str(error)


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json", None])
def test_a_sha256_manifest_has_to_list_every_file_that_is_read(tmp_path, name):
    folder = _save(tmp_path / "a", "sha256")
    content = json.loads((folder / SHA256_FILE).read_text())
    content["files"] = {} if name is None else {k: v for k, v in content["files"].items() if k != name}
    (folder / SHA256_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"has no hash of .*{name or 'common.pt'}"):
        _load(folder, "sha256")


def test_manifest_of_another_save_is_refused(tmp_path):
    first, second = _save(tmp_path / "a", "xxh3"), tmp_path / "b"
    second.mkdir()
    state = _state() | {"more": ShardedTensor.from_rank_offsets("more", torch.ones(7))}
    save(state, second, group=SINGLE, options=SaveOptions(verify_integrity="xxh3"))
    write_marker(second)
    (first / XXH3_FILE).write_bytes((second / XXH3_FILE).read_bytes())
    with pytest.raises(CheckpointError, match="of another save|is damaged"):
        _load(first, "xxh3")


def test_missing_package_is_said_at_the_start(monkeypatch):
    require_integrity("xxh3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_integrity("sha256")
    with pytest.raises(ConfigError, match="pip install xxhash"):
        require_integrity("xxh3")


def test_manifest_that_claims_too_much_takes_no_memory():
    with pytest.raises(CheckpointError):
        BlockHashes(b"PK\x03\x04" + b"\0" * 100, "x")
