from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.utils.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (3,), (1, 1, 2), (0, 4), (100, 70)]


def _bits(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("zip64_from", [0xFFFFFFFF, 1, 500], ids=["zip32", "zip64", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_the_item_and_its_length_is_known(dtype, zip64_from):
    framing = TorchSaveFraming(zip64_from)
    for shape in SHAPES:
        tensor = (torch.rand(shape) * 100).to(dtype)
        data = b"".join(framing.frame_tensor(tensor))
        assert len(data) == framing.tensor_length(dtype, shape)
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape, loaded.is_contiguous()) == (dtype, tensor.shape, True)
        assert _bits(loaded) == _bits(tensor) == _bits(framing.parse_tensor(data, dtype, shape, "x"))
        assert loaded.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None


def test_item_can_be_mapped_into_memory(tmp_path):
    tensor = torch.arange(6.0)
    (tmp_path / "item.pt").write_bytes(b"".join(TorchSaveFraming().frame_tensor(tensor)))
    assert torch.equal(torch.load(tmp_path / "item.pt", mmap=True, weights_only=True), tensor)


def test_elements_are_a_view_of_the_tensor():
    tensor = torch.zeros(5)
    elements = TorchSaveFraming().frame_tensor(tensor)[1]
    tensor.fill_(1)
    assert np.frombuffer(elements, np.float32).tolist() == [1.0] * 5


def test_items_of_torch_save_are_read_too():
    buffer = io.BytesIO()
    torch.save(torch.arange(3), buffer)
    assert TorchSaveFraming().parse_tensor(buffer.getvalue(), torch.int64, (3,), "x").tolist() == [0, 1, 2]


def test_item_without_checksums_is_read():
    torch.serialization.set_crc32_options(False)
    try:
        buffer = io.BytesIO()
        torch.save(torch.arange(3), buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    assert TorchSaveFraming().parse_tensor(buffer.getvalue(), torch.int64, (3,), "x").tolist() == [0, 1, 2]


def test_every_flipped_bit_of_the_elements_is_noticed():
    data = bytearray(b"".join(TorchSaveFraming().frame_tensor(torch.arange(64, dtype=torch.uint8))))
    begin = data.index(bytes(range(64)))
    for position in (begin, begin + 31, begin + 63):
        data[position] ^= 1
        with pytest.raises(CheckpointError, match="x is damaged: the checksum of record archive/data/0"):
            TorchSaveFraming().parse_tensor(bytes(data), torch.uint8, (64,), "x")
        data[position] ^= 1


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.float32, (7,), "holds 24 bytes"),
        (torch.float32, (2, 3), "the index says"),
        (torch.int32, (6,), "the index"),
    ],
)
def test_tensor_of_another_shape_or_type_is_refused(dtype, shape, message):
    data = b"".join(TorchSaveFraming().frame_tensor(torch.zeros(6)))
    with pytest.raises(CheckpointError, match=message):
        TorchSaveFraming().parse_tensor(data, dtype, shape, "x")


def test_objects_are_wrapped_in_a_list_of_one():
    value = {"state": (3, (1, 2), None), "np": np.arange(4, dtype=np.uint32), "t": torch.ones(2, dtype=torch.uint8)}
    data = TorchSaveFraming().frame_object(value)
    assert isinstance(torch.load(io.BytesIO(data), weights_only=False), list)
    loaded = TorchSaveFraming().parse_object(data, "x")
    assert loaded["state"] == (3, (1, 2), None) and loaded["np"].tolist() == [0, 1, 2, 3]
    assert loaded["np"].dtype == np.uint32


def test_object_without_its_list_is_refused():
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    with pytest.raises(CheckpointError, match="no list of one object"):
        TorchSaveFraming().parse_object(buffer.getvalue(), "x")
