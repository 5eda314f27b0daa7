"""The written index against the objects that torch's own constructors make."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megalite.dist_checkpointing import ShardedTensor
from megalite.dist_checkpointing.safe import unpickle_index
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.index import check_index, parse_index
from megalite.dist_checkpointing.strategies.index_writer import IndexWriter, _integers
from megalite.dist_checkpointing.strategies.planning import merge_plans, plan_local_save


def _leaves(rank: int) -> list[ShardedTensor]:
    block = ShardedTensor.from_block
    half = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    leaves = [
        block("w", half, (8, 6), (4 * rank, 0)),
        block("m", half.float(), (8, 6), (4 * rank, 0)),
        block(f"own.{rank}", torch.empty(3 + rank, device="meta"), (3 + rank,), (0,)),
        block(
            "layers", torch.empty(2, 3, dtype=torch.int64, device="meta"), (2, 2, 3), (rank, 0, 0), prepend_axis_num=1
        ),
        block("s\u00e4tze \U0001f600", torch.empty(2, device="meta"), (4,), (2 * rank,)),
        block("empty", torch.empty(0, 5, device="meta"), (0, 5), (0, 0)),
    ]
    if rank == 0:
        leaves += [block("scalar", torch.empty((), device="meta"), (), ())]
        leaves += [block("long " + "k" * 300, torch.empty(1 << 33, dtype=torch.uint8, device="meta"), (1 << 33,), (0,))]
    return leaves


@pytest.fixture(scope="module")
def writer() -> IndexWriter:
    plans = [plan_local_save(_leaves(rank), [f"o/shard_{rank}_2"], rank, TorchSaveFraming(), 2) for rank in range(2)]
    return IndexWriter(merge_plans(plans, range(2)))


def test_torch_unpickles_what_its_constructors_make(writer: IndexWriter) -> None:
    found = pickle.loads(writer.content([[10], [20]], Path("folder")))
    plan = writer._plan
    assert type(found) is dcp.Metadata and found.planner_data is None
    assert found.version == "1.0.0" and found.storage_meta.checkpoint_id == "folder"
    expected_storage, expected_chunks = {}, {key: [] for key in plan.blocks.keys}
    for block in range(len(plan.blocks)):
        key = plan.blocks.keys[plan.blocks.key_of[block]]
        offset, sizes = map(torch.Size, plan.blocks.rectangle(block))
        place = dcp.MetadataIndex(key, offset)
        if place not in expected_storage:
            file, start, length = (column[block] for column in (plan.file_of, plan.starts, plan.lengths))
            expected_storage[place] = _StorageInfo(plan.files[file], int(start), int(length))
            expected_chunks[key].append(dcp.ChunkStorageMetadata(offset, sizes))
    for item in plan.place_objects([[10], [20]]):
        expected_storage[dcp.MetadataIndex(item.unique_key)] = _StorageInfo(item.file, item.start, item.length)
    assert found.storage_data == expected_storage and list(found.storage_data) == list(expected_storage)
    for key, shape, dtype in zip(plan.blocks.keys, plan.blocks.shapes, plan.blocks.dtypes, strict=True):
        entry = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), expected_chunks[key])
        assert found.state_dict_metadata[key] == entry
    objects = {key for key, entry in found.state_dict_metadata.items() if type(entry) is dcp.BytesStorageMetadata}
    assert objects == {"o/shard_0_2", "o/shard_1_2"} and len(found.state_dict_metadata) == len(plan.blocks.keys) + 2


def test_pickling_it_again_changes_nothing(writer: IndexWriter) -> None:
    found = pickle.loads(writer.content([[10], [20]], Path("folder")))
    assert pickle.loads(pickle.dumps(found)) == found
    python_form = pickle._loads(writer.content([[10], [20]], Path("folder")))
    assert python_form.storage_data == found.storage_data


def test_our_own_reader_takes_it(writer: IndexWriter) -> None:
    data = writer.content([[10], [20]], Path("folder"))
    unpickle_index(data, "x")
    index = parse_index(data, "x")
    check_index(index, "x")
    assert index.tensors["layers"].shape == (2, 2, 3) and index.tensors["scalar"].shape == ()
    assert index.tensors["long " + "k" * 300].chunks[0].item.length > 1 << 33


def test_only_objects_differ_from_save_to_save(writer: IndexWriter) -> None:
    one, other = (pickle.loads(writer.content(lengths, Path("f"))) for lengths in ([[10], [20]], [[11], [2**40]]))
    assert one.state_dict_metadata == other.state_dict_metadata
    changed = {place.fqn for place in one.storage_data if one.storage_data[place] != other.storage_data[place]}
    assert changed == {"o/shard_0_2", "o/shard_1_2"}


def test_a_plan_without_tensors() -> None:
    plan = merge_plans([plan_local_save([], ["o/shard_0_1"], 0, TorchSaveFraming())], [0])
    found = pickle.loads(IndexWriter(plan).content([[7]], Path("f")))
    assert list(found.state_dict_metadata) == ["o/shard_0_1"] and len(found.storage_data) == 1


@pytest.mark.parametrize("largest", [0, 1, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**40, 2**62])
def test_numbers_of_any_size(largest: int) -> None:
    for row, value in zip(_integers(np.array([0, largest, largest // 3])), (0, largest, largest // 3), strict=True):
        assert pickle.loads(b"\x80\x02" + row.tobytes() + b".") == value


def test_more_entries_than_two_bytes_can_number() -> None:
    leaves = [ShardedTensor.from_block("w", torch.empty(1, device="meta"), (70_000,), (at,)) for at in range(70_000)]
    plan = merge_plans([plan_local_save(leaves, [], 0, TorchSaveFraming())], [0])
    found = pickle.loads(IndexWriter(plan).content([[]], Path("f")))
    chunks = found.state_dict_metadata["w"].chunks
    assert [chunk.offsets for chunk in chunks[::7000]] == [torch.Size([at]) for at in range(0, 70_000, 7000)]
    assert found.storage_data[dcp.MetadataIndex("w", torch.Size([69_999]))].offset == int(plan.starts[69_999])
