from __future__ import annotations

import gc
import logging
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megalite.dist_checkpointing.serialization import (
    LoadOptions,
    StrictHandling,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensor_metadata,
    save,
    write_marker,
)
from megalite.dist_checkpointing.strategies.filesystem import FileSink
from megalite.utils.dist import SINGLE
from megalite.utils.errors import CheckpointError, SaveError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

W = torch.arange(12.0).view(3, 4)
PARTIAL = LoadOptions(validate_access_integrity=False)


def _state():
    return {
        "model": {
            f"layers.{layer}.w": ShardedTensor.from_rank_offsets(
                "w", W + 100 * layer, (0, layer, 2), prepend_axis_num=1
            )
            for layer in range(2)
        },
        "vocabulary": ShardedTensor.from_rank_offsets("v", torch.ones(4, 2), allow_shape_mismatch=True),
        "rng": ShardedObject("rng", {"seed": 7}, (1, 1), (0, 0)),
        "optimizer": {"param_groups": [{"params": LocalNonpersistentObject([0]), "lr": 0.1}]},
        "iteration": 3,
    }


@pytest.fixture
def folder(tmp_path):
    save(_state(), tmp_path, group=SINGLE, content_metadata={"kind": "x"})
    write_marker(tmp_path)
    return tmp_path


def test_files_of_a_checkpoint(folder):
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    assert load_common_state_dict(folder) == {
        "optimizer": {"param_groups": [{"lr": 0.1}]},
        "iteration": 3,
        "content_metadata": {"kind": "x"},
    }
    assert load_content_metadata(folder) == {"kind": "x"}
    assert load_tensor_metadata(folder) == {"w": ((2, 3, 4), torch.float32), "v": ((4, 2), torch.float32)}


def test_round_trip_fills_the_tensors_that_were_passed(folder):
    request = _state()
    for leaf in (*request["model"].values(), request["vocabulary"]):
        leaf.data.zero_()
    passed = request["model"]["layers.1.w"].data
    result = load(request, folder, group=SINGLE)
    assert torch.equal(passed, W + 100) and result["model"]["layers.1.w"] is passed
    assert result["rng"] == {"seed": 7} and result["iteration"] == 3
    assert result["optimizer"] == {"param_groups": [{"params": [0], "lr": 0.1}]}


def test_saving_does_not_change_or_keep_the_state(tmp_path):
    state = _state()
    save(state, tmp_path, group=SINGLE)
    assert isinstance(state["rng"], ShardedObject) and state["iteration"] == 3


def test_parameters_that_require_gradients_are_filled(folder):
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4))
    request = {"w": ShardedTensor.from_rank_offsets("w", parameter)}
    assert load(request, folder, group=SINGLE, ignore_keys=lambda key: key != "w")["w"] is parameter
    assert torch.equal(parameter.detach()[0], W)


def test_strided_target_and_other_dtype(folder):
    target = torch.zeros(4, 2, dtype=torch.bfloat16).t()
    request = {"w": ShardedTensor.from_block("w", target, (2, 3, 4), (1, 1, 0), prepend_axis_num=1)}
    load(request, folder, group=SINGLE, ignore_keys=lambda key: key in ("v", "rng/shard_0.0_1.1"), options=PARTIAL)
    assert torch.equal(target, (W + 100)[1:].bfloat16())


def test_factories_are_stored_as_parts_and_merged(tmp_path):
    def build(key, data, replica_id):
        return [ShardedTensor.from_rank_offsets(key, part, (0, i, 2)) for i, part in enumerate(data.chunk(2))]

    save({"f": ShardedTensorFactory("f", torch.arange(4.0), build, torch.cat)}, tmp_path, group=SINGLE)
    write_marker(tmp_path)
    assert load_plain_tensors(tmp_path)["f"].tolist() == [0, 1, 2, 3]
    request = {"f": ShardedTensorFactory("f", torch.zeros(4), build, lambda parts: torch.cat(parts) * 2)}
    assert load(request, tmp_path, group=SINGLE)["f"].tolist() == [0, 2, 4, 6]


def test_larger_vocabulary_gets_zero_rows_and_smaller_one_is_cut(folder):
    ignore = {"ignore_keys": lambda key: key != "v", "options": PARTIAL}
    larger = ShardedTensor.from_rank_offsets("v", torch.full((3, 2), 9.0), (0, 1, 2), allow_shape_mismatch=True)
    assert load({"v": larger}, folder, group=SINGLE, **ignore)["v"].tolist() == [[1, 1], [0, 0], [0, 0]]
    beyond = ShardedTensor.from_rank_offsets("v", torch.full((2, 2), 9.0), (0, 2, 3), allow_shape_mismatch=True)
    assert load({"v": beyond}, folder, group=SINGLE, **ignore)["v"].tolist() == [[0, 0], [0, 0]]
    smaller = ShardedTensor.from_rank_offsets("v", torch.zeros(3, 2), allow_shape_mismatch=True)
    assert load({"v": smaller}, folder, group=SINGLE, **ignore)["v"].tolist() == [[1, 1]] * 3


def test_other_global_shape_is_refused(folder):
    request = _state() | {"vocabulary": ShardedTensor.from_rank_offsets("v", torch.zeros(5, 2))}
    with pytest.raises(CheckpointError, match=r"v has global shape \(4, 2\) in .*, the run needs \(5, 2\)"):
        load(request, folder, group=SINGLE)
    flat = ShardedTensor.from_rank_offsets("v", torch.zeros(8), allow_shape_mismatch=True)
    with pytest.raises(CheckpointError, match="v has global shape"):
        load(_state() | {"vocabulary": flat}, folder, group=SINGLE)


def test_missing_and_unexpected_keys_are_named(folder):
    request = _state() | {"more": ShardedTensor.from_rank_offsets("more", torch.zeros(1))}
    del request["rng"]
    expected = "asks for 1 keys that are not stored: more; 1 stored keys are not asked for: rng/shard_0.0_1.1"
    with pytest.raises(CheckpointError, match=expected):
        load(request, folder, group=SINGLE)
    with pytest.raises(CheckpointError, match="not stored: more"):
        load(request, folder, group=SINGLE, ignore_keys=lambda key: key.startswith("rng"))


def test_load_that_is_not_strict_says_what_differs(folder, caplog):
    request = _state() | {"more": ShardedTensor.from_rank_offsets("more", torch.full((1,), 5.0))}
    request["extra"] = ShardedObject("extra", "local", (1,), (0,))
    del request["vocabulary"]
    with caplog.at_level(logging.WARNING, logger="megalite"):
        result = load(request, folder, group=SINGLE, strict=StrictHandling.LOG_ALL)
    assert result["more"].tolist() == [5] and result["extra"] == "local"
    (record,) = caplog.records
    assert "[extra/shard_0_1, more]" in record.getMessage() and "[v]" in record.getMessage()


def test_object_asked_for_as_a_tensor_is_not_stored(folder):
    request = _state() | {"rng": ShardedObject("w", 1, (1,), (0,))}
    with pytest.raises(CheckpointError, match="not stored: w/shard_0_1"):
        load(request, folder, group=SINGLE)


def test_plain_dcp_reads_the_files(folder):
    state = {"w": torch.zeros(2, 3, 4), "v": torch.zeros(4, 2), "rng/shard_0.0_1.1": None}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["w"], torch.stack([W, W + 100])) and state["rng/shard_0.0_1.1"] == [{"seed": 7}]


def test_index_has_the_attributes_of_megatrons(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert metadata.planner_data is None and metadata.storage_meta.checkpoint_id == str(folder)
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata.state_dict_metadata["w"].chunks]
    assert chunks == [((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 3, 4))]
    places = sorted((info.offset, info.length, index.fqn) for index, info in metadata.storage_data.items())
    assert places[-1][2].startswith("rng/") and places[0][0] == 0
    ends = [offset + length for offset, length, _ in places]
    assert [offset for offset, _, _ in places[1:]] + [(folder / "__0_0.distcp").stat().st_size] == ends


def test_plain_tensors_by_key(folder):
    assert list(load_plain_tensors(folder, ["v"])) == ["v"]
    with pytest.raises(CheckpointError, match="not stored: u"):
        load_plain_tensors(folder, ["v", "u"])


def test_folder_without_marker_is_not_loaded(tmp_path):
    save(_state(), tmp_path, group=SINGLE)
    for read in (load_plain_tensors, load_common_state_dict, load_tensor_metadata):
        with pytest.raises(CheckpointError, match="did not finish"):
            read(tmp_path)
    with pytest.raises(CheckpointError, match="did not finish"):
        load(_state(), tmp_path, group=SINGLE)


def test_state_without_tensors(tmp_path):
    save({"iteration": 3}, tmp_path, group=SINGLE)
    write_marker(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".metadata", "common.pt", "metadata.json"]
    assert load({}, tmp_path, group=SINGLE) == {"iteration": 3}


def test_value_that_could_not_be_read_back_is_refused(tmp_path):
    with pytest.raises(SaveError, match="common.pt.args.x: object cannot be read back"):
        save({"args": {"x": object()}}, tmp_path, group=SINGLE)
    assert not list(tmp_path.iterdir())


POINTS = ["open", "write", "fsync", "close", "rename", "fsync_directory"]


def test_all_fault_points_are_passed_in_the_order_of_durability(tmp_path):
    seen = []
    save(_state(), tmp_path, group=SINGLE, hook=lambda point, path: seen.append((point, path.name)))
    assert set(POINTS) == {point for point, _ in seen}
    index = [i for i, (_, name) in enumerate(seen) if "metadata" in name][0]
    data_durable = seen.index(("fsync", "__0_0.distcp"))
    assert max(data_durable, seen.index(("fsync", "common.pt"))) < index
    assert seen[data_durable:index].count(("fsync_directory", tmp_path.name)) == 1
    assert seen[-2:] == [("rename", ".metadata"), ("fsync_directory", tmp_path.name)]


@pytest.mark.parametrize("point", POINTS[:5])
def test_failing_io_leaves_no_index(tmp_path, point):
    def hook(name, path):
        if name == point:
            raise OSError(28, "No space left on device")

    with pytest.raises(SaveError, match="cannot write into .*No space left"):
        save(_state(), tmp_path, group=SINGLE, hook=hook)
    assert not (tmp_path / ".metadata").exists()


def test_sink_writes_pieces_of_any_size(tmp_path):
    sink = FileSink(tmp_path / "x")
    sink.write([b"", b"ab", memoryview(b"cd")])
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"abcd"


def test_the_index_stores_equal_rectangles_once_and_leaves_the_collector_as_it_was(tmp_path):
    def state(words):
        return {
            f"{word}{row}": ShardedTensor.from_block(word, torch.zeros(1, 300), (200, 300), (row, 0))
            for word in words
            for row in range(200)
        }

    sizes = []
    for words in (["a"], ["a", "b", "c"]):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        assert gc.isenabled()
        save(state(words), folder, group=SINGLE)
        write_marker(folder)
        assert gc.isenabled()
        sizes.append((folder / ".metadata").stat().st_size)
        assert load_plain_tensors(folder).keys() == set(words) and gc.isenabled()
    assert sizes[1] < 2.75 * sizes[0]
