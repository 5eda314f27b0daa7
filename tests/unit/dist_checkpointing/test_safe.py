"""Damaged and hostile files: refused with the name of the file, and nothing they carry is run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import os
import pickle
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.safe import find_unreadable, load_archive
from megalite.dist_checkpointing.serialization import (
    LoadOptions,
    load,
    load_plain_tensors,
    read_index,
    save,
    write_marker,
)
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.open, (self.path, os.O_CREAT))


def _request():
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(64, 4)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "iter_0000001"
    path.mkdir()
    save(
        {
            "w": ShardedTensor.from_rank_offsets("w", torch.arange(256.0).view(64, 4)),
            "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
            "iteration": 1,
        },
        path,
        group=SINGLE,
    )
    write_marker(path)
    load(_request(), path, group=SINGLE)
    return path


def _edit_index(folder, edit):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _replace_item(folder, key, data):
    """Append ``data`` to the data file and let the index point there."""
    with open(folder / "__0_0.distcp", "ab") as file:
        begin = file.tell()
        file.write(data)

    def edit(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.offset, info.length = begin, len(data)

    _edit_index(folder, edit)


def _archive(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _refused(folder, match):
    with pytest.raises(CheckpointError, match=match):
        load(_request(), folder, group=SINGLE)


def test_code_in_the_index_is_not_run(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "run")))
    _refused(folder, r"\.metadata is damaged or hostile: it names (posix|os)\.open")
    _edit_index_with_extra = pickle.dumps(Metadata({"w": Touch(tmp_path / "run")}, storage_data={}))
    (folder / ".metadata").write_bytes(_edit_index_with_extra)
    _refused(folder, r"\.metadata is damaged or hostile")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "code",
    [b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n(S'x'\ntR.", b"ctorch.serialization\nload\n(S'x'\ntR.", b"N."],
)
def test_index_that_names_functions_is_refused(folder, code):
    (folder / ".metadata").write_bytes(code)
    _refused(folder, r"\.metadata")


def test_index_cannot_change_classes_of_torch(folder):
    # GLOBAL MetadataIndex, then BUILD with slot state {"__hash__": None}: on the real class it would set an attribute.
    code = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N(S'__hash__'\nNdtb."
    (folder / ".metadata").write_bytes(code)
    _refused(folder, r"\.metadata")
    assert MetadataIndex.__hash__ is not None


def test_code_in_common_is_not_run(folder, tmp_path):
    (folder / "common.pt").write_bytes(_archive({"iteration": 1, "args": Touch(tmp_path / "run")}))
    _refused(folder, r"common\.pt is damaged or hostile: it names (posix|os)\.open")
    (folder / "common.pt").write_bytes(pickle.dumps(Touch(tmp_path / "run")))
    _refused(folder, r"common\.pt is damaged")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["w", "o/shard_0_1"])
def test_code_in_an_item_is_not_run(folder, tmp_path, key):
    _replace_item(folder, key, _archive([Touch(tmp_path / "run"), "x" * 4096]))
    _refused(folder, f"{key} in .*__0_0.distcp")
    _replace_item(folder, key, pickle.dumps(Touch(tmp_path / "run")))
    _refused(folder, f"{key}.*__0_0.distcp.*damaged")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "sub/__0_0.distcp", "a\0b", 7, None])
def test_index_cannot_point_outside_the_folder(folder, name):
    def edit(metadata):
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", name)

    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    _edit_index(folder, edit)
    _refused(folder, r"\.metadata")


def test_link_out_of_the_folder_is_not_followed(folder):
    data = folder / "__0_0.distcp"
    data.rename(folder.parent / "elsewhere")
    data.symlink_to(folder.parent / "elsewhere")
    _refused(folder, "link out of the checkpoint folder")


def test_data_file_that_is_a_folder_or_missing(folder):
    (folder / "__0_0.distcp").unlink()
    _refused(folder, "cannot read .*__0_0.distcp")
    (folder / "__0_0.distcp").mkdir()
    _refused(folder, "__0_0.distcp is not a regular file")


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_missing_small_file(folder, name):
    (folder / name).unlink()
    _refused(folder, name)


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp"])
def test_file_cut_short_is_refused(folder, name):
    whole = (folder / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:length])
        _refused(folder, name)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp"])
def test_garbage_is_refused_or_harmless(folder, name, seed):
    pick = random.Random(seed)
    data = bytearray((folder / name).read_bytes())
    begin = pick.randrange(len(data))
    data[begin : begin + 64] = pick.randbytes(min(64, len(data) - begin))
    (folder / name).write_bytes(data)
    # Padding between records may be overwritten without a loss; anything else must be one explained error.
    try:
        loaded = load(_request(), folder, group=SINGLE)
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert torch.equal(loaded["w"], torch.arange(256.0).view(64, 4)) and loaded["o"] == {"a": 1}


def _set_length(metadata):
    for info in metadata.storage_data.values():
        info.length = 2**50


def _set_size(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([2**40, 4])


def _set_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([65, 4])


def _drop_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks.clear()


def _double_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks *= 2


def _negative_offset(metadata):
    for info in metadata.storage_data.values():
        info.offset = -4


def _transformed(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    "edit", [_set_length, _set_size, _set_chunk, _drop_chunk, _double_chunk, _negative_offset, _transformed]
)
def test_index_that_contradicts_itself_or_the_files_is_refused(folder, edit):
    _edit_index(folder, edit)
    _refused(folder, str(folder) if edit is not _set_size else "w")


def test_index_that_lies_about_the_element_count_reserves_no_memory(folder):
    def edit(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([64, 4 * 2**20])
        entry.chunks[0].sizes = torch.Size([64, 4 * 2**20])

    _edit_index(folder, edit)
    request = {"w": ShardedTensor.from_block("w", torch.zeros(1, 4), (64, 4 * 2**20), (0, 0))}
    with pytest.raises(CheckpointError, match="bytes of elements"):
        load(
            request | {"o": _request()["o"]}, folder, group=SINGLE, options=LoadOptions(validate_access_integrity=False)
        )


def _foreign_module(monkeypatch, name, **content):
    """Pretend that a class lives in a module of Megatron while it is pickled."""
    module = types.ModuleType(name)
    for key, value in content.items():
        value.__module__, value.__qualname__ = name, key
        setattr(module, key, value)
    while name:
        monkeypatch.setitem(sys.modules, name, module)
        name = name.rpartition(".")[0]
    return module


def test_megatrons_classes_become_records(folder, monkeypatch):
    class AttnBackend(enum.Enum):
        auto = 5

    class OptimizerConfig:
        def __init__(self):
            self.lr = 0.1

    module = _foreign_module(
        monkeypatch, "megatron.core.enums", AttnBackend=AttnBackend, OptimizerConfig=OptimizerConfig
    )
    data = _archive(
        {"args": argparse.Namespace(a=1, backend=module.AttnBackend.auto), "config": module.OptimizerConfig()}
    )
    monkeypatch.undo()
    loaded = load_archive(data, "common.pt")
    assert loaded["args"].a == 1 and loaded["args"].backend.name == "megatron.core.enums.AttnBackend"
    assert loaded["args"].backend.args == (5,) and loaded["config"].lr == 0.1


def test_index_with_megatrons_own_metadata_class(folder, monkeypatch):
    @dataclasses.dataclass
    class MCoreMetadata(Metadata):
        mcore_data: dict | None = None

    module = _foreign_module(
        monkeypatch, "megatron.core.dist_checkpointing.strategies.torch", MCoreMetadata=MCoreMetadata
    )
    found = pickle.loads((folder / ".metadata").read_bytes())
    changed = module.MCoreMetadata(found.state_dict_metadata, None, found.storage_data, found.storage_meta)
    changed.all_local_plans = [{"anything": 1}]
    (folder / ".metadata").write_bytes(pickle.dumps(changed))
    monkeypatch.undo()
    assert read_index(folder).keys == ["o/shard_0_1", "w"]
    assert load_plain_tensors(folder)["w"][1, 1] == 5


def test_plain_values_are_readable_and_others_are_named():
    plain = {
        "args": argparse.Namespace(a=None, path=Path("/x"), dtype=torch.bfloat16, size=torch.Size([2])),
        1: [True, 2, 3.0, "s", b"b", (1, {2}), 1j],
        "rng": ("MT19937", np.arange(3, dtype=np.uint32)),
        "tensor": torch.ones(2),
        "ordered": collections.OrderedDict(a=1),
    }
    assert find_unreadable(plain, "common") is None
    loaded = load_archive(_archive(plain), "x")
    assert loaded["args"] == plain["args"] and loaded[1] == plain[1]

    class Own(int):
        pass

    assert find_unreadable({"a": [1, Own(2)]}, "common") == (
        "common.a.1: test_plain_values_are_readable_and_others_are_named.<locals>.Own"
    )
    assert find_unreadable({"a": np.float32(1)}, "common") == "common.a: float32"
    assert find_unreadable({"a": np.zeros(2)}, "common") == "common.a: numpy array of float64"
    assert find_unreadable({"a": argparse.Namespace(b=Touch("x"))}, "common") == "common.a.b: Touch"
