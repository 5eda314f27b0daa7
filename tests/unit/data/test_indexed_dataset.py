"""The two files of a dataset: their bytes, what is refused on opening, and how they come to be."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import (
    DTYPES,
    IndexedDataset,
    IndexedDatasetWriter,
    best_dtype,
    pointers_from_lengths,
)
from megalite.data.meta import read_meta
from megalite.utils.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [70, 65499], [9]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: type = np.uint16, **about: object) -> Path:
    with IndexedDatasetWriter(prefix, dtype, **about) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finalize()
    return prefix


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "a")
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    idx += struct.pack("<4i", 3, 0, 2, 1) + struct.pack("<4q", 0, 6, 6, 10) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == idx
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 70, 65499, 9)


def test_dtype_codes_are_those_of_the_format():
    names = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
    assert [DTYPES[code].name for code in range(1, 9)] == names


@pytest.mark.parametrize(
    "vocab_size, name", [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (65535, "int32"), (65537, "int32")]
)
def test_highest_id_of_a_vocabulary_survives(tmp_path, vocab_size, name):
    """TOK-13."""
    assert best_dtype(vocab_size).name == name
    write(tmp_path / "a", [[vocab_size - 1]], best_dtype(vocab_size))
    assert IndexedDataset(tmp_path / "a").get(0).tolist() == [vocab_size - 1]


@pytest.mark.parametrize("mmap", [True, False])
def test_get_returns_parts_of_sequences_and_checks_bounds(tmp_path, mmap):
    data = IndexedDataset(write(tmp_path / "a"), mmap=mmap)
    assert len(data) == 4 and data.num_tokens == 6 and data.dtype == np.uint16
    assert [data.get(i).tolist() for i in range(4)] == DOCUMENTS
    assert data.get(0, 1).tolist() == [2, 3]
    assert data.get(0, 1, 1).tolist() == [2]
    assert data.get(0, 3).tolist() == []
    for arguments in [(4,), (-1,), (0, 0, 4), (0, 4), (0, -1, 1), (0, 2, 2)]:
        with pytest.raises(IndexError):
            data.get(*arguments)
    with pytest.raises(ValueError):
        data.get(0)[0] = 5


@pytest.mark.parametrize("mmap", [True, False])
def test_a_pickled_dataset_opens_its_files_again(tmp_path, mmap):
    data = IndexedDataset(write(tmp_path / "a", [[7] * 100_000]), mmap=mmap)
    text = pickle.dumps(data)
    assert len(text) < 1000
    assert pickle.loads(text).get(0, 5, 2).tolist() == [7, 7]


def test_documents_may_have_several_sequences(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_document([1, 2, 3], lengths=[1, 2])
        writer.add_documents(np.array([4, 5, 6]), np.array([2, 1]))
        writer.finalize()
    data = IndexedDataset(tmp_path / "a")
    assert data.document_indices.tolist() == [0, 2, 3, 4]
    assert [data.get(i).tolist() for i in range(4)] == [[1], [2, 3], [4, 5], [6]]
    assert [data.document_of(i) for i in range(4)] == [0, 0, 1, 2]
    with IndexedDatasetWriter(tmp_path / "b", np.int32) as writer, pytest.raises(DataError, match="add up to 2"):
        writer.add_document([1, 2, 3], lengths=[1, 1])


def test_pointers_pass_two_gigabytes():
    """TOK-07."""
    lengths = np.array([2**30, 2**30, 2**31 - 1, 3], dtype=np.int32)
    pointers = pointers_from_lengths(lengths, 4)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [0, 2**32, 2**33, 2**33 + 4 * (2**31 - 1)]


@pytest.mark.parametrize("dtype, wrong", [(np.uint16, 65536), (np.int32, 2**31), (np.uint16, -1), (np.uint8, 256)])
def test_a_token_that_does_not_fit_is_an_error(tmp_path, dtype, wrong):
    with IndexedDatasetWriter(tmp_path / "a", dtype) as writer, pytest.raises(DataError, match=f"token id {wrong} "):
        writer.add_document(np.array([1, wrong], dtype=np.int64))


def test_merge_appends_documents(tmp_path):
    one, two = write(tmp_path / "one"), write(tmp_path / "two", [[5, 6], [65000]])
    with IndexedDatasetWriter(tmp_path / "both", np.uint16) as writer:
        writer.merge(one)
        writer.merge(two)
        writer.finalize()
    whole = write(tmp_path / "whole", [*DOCUMENTS, [5, 6], [65000]])
    for suffix in ("bin", "idx", "meta.json"):
        assert Path(f"{whole}.{suffix}").read_bytes() == (tmp_path / f"both.{suffix}").read_bytes()


def test_merge_refuses_other_types_and_tokenizers(tmp_path):
    write(tmp_path / "wide", dtype=np.int32)
    write(tmp_path / "other", tokenizer="Other", eod=0)
    with IndexedDatasetWriter(tmp_path / "a", np.uint16, "ByteTokenizer", 257, 256) as writer:
        with pytest.raises(DataError, match="int32.*uint16"):
            writer.merge(tmp_path / "wide")
        with pytest.raises(DataError, match="Other.*ByteTokenizer"):
            writer.merge(tmp_path / "other")


def test_nothing_appears_before_finalize_and_nothing_stays_without_it(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([1])
        assert files(tmp_path) == ["a.bin.tmp"]
    assert files(tmp_path) == []
    write(tmp_path / "a")
    assert files(tmp_path) == ["a.bin", "a.idx", "a.meta.json"]


def test_replacing_a_dataset_never_shows_an_old_index_with_new_tokens(tmp_path, monkeypatch):
    write(tmp_path / "a")
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([8] * 6)
        monkeypatch.setattr("megalite.data.indexed_dataset.os.replace", _die)
        with pytest.raises(KeyboardInterrupt):
            writer.finalize()
    assert "a.idx" not in files(tmp_path)
    with pytest.raises(DataError, match="a.idx cannot be opened"):
        IndexedDataset(tmp_path / "a")


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_meta_knows_the_tokens_and_the_tokenizer(tmp_path):
    write(tmp_path / "a", tokenizer="ByteTokenizer", vocab_size=257, eod=256)
    meta = IndexedDataset(tmp_path / "a").meta()
    assert (meta.max_token_id, meta.num_tokens, meta.tokenizer, meta.vocab_size, meta.eod) == (
        65499,
        6,
        "ByteTokenizer",
        257,
        256,
    )


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b'{"num_tokens": 6}', b'{"num_tokens": 6, "max_token_id": "x"}', b"\xff"]
)
def test_damaged_meta_is_named_and_not_used(tmp_path, caplog, text):
    write(tmp_path / "a")
    (tmp_path / "a.meta.json").write_bytes(text)
    assert read_meta(tmp_path / "a", 6) is None
    assert "a.meta.json is not used" in caplog.text


def test_meta_of_another_dataset_is_not_used(tmp_path, caplog):
    write(tmp_path / "a")
    assert read_meta(tmp_path / "a", 7) is None
    assert "written for 6 tokens, the data has 7" in caplog.text


def _header(**changes: int | bytes) -> bytes:
    values = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "sequences": 4, "bounds": 5, **changes}
    return struct.pack("<9sQBQQ", *values.values())


def _patch(at: int, code: str, value: int):
    def change(data: bytes) -> bytes:
        return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]

    return change


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        ("idx", lambda d: b"", r"a\.idx is empty: it has 0 bytes, its header alone has 34"),
        ("idx", lambda d: d[:20], r"a\.idx is cut short: it has 20 bytes"),
        ("idx", lambda d: d[:-3], r"a\.idx is cut short: it has 119 bytes.*need 122"),
        ("idx", lambda d: d + b"\0", r"a\.idx is longer than it should be: it has 123 bytes.*need 122"),
        ("idx", lambda d: b"\x80\x04" + d[2:], r"a\.idx is not an index of token sequences"),
        ("idx", lambda d: _header(version=2) + d[34:], r"a\.idx has format version 2, this reader knows 1"),
        ("idx", lambda d: _header(code=9) + d[34:], r"a\.idx has dtype code 9, known are 1 \(uint8\)"),
        ("idx", lambda d: _header(sequences=2**60) + d[34:], r"a\.idx is cut short"),
        ("idx", _patch(34 + 16 + 8, "<q", 2**40), r"a\.idx places sequence 1 .* outside the \.bin file of 12 bytes"),
        ("idx", _patch(34 + 16 + 8, "<q", -2), r"a\.idx places sequence 1 .* outside"),
        ("idx", _patch(34 + 48, "<q", 1), r"a\.idx has document boundaries that run from 1 to 4"),
        ("idx", _patch(34 + 48 + 32, "<q", 3), r"a\.idx has document boundaries that run from 0 to 3"),
        ("idx", _patch(34 + 48 + 8, "<q", 9), r"a\.idx has document boundaries"),
        ("bin", lambda d: b"", r"a\.bin is empty: it has 0 bytes, .*a\.idx needs 12"),
        ("bin", lambda d: d[:7], r"a\.bin is cut short: it has 7 bytes, .*a\.idx needs 12"),
        ("bin", lambda d: d + b"12", r"a\.bin is longer than its index says: it has 14 bytes, .* needs 12"),
    ],
)
def test_damage_is_refused_by_name_and_sizes(tmp_path, suffix, change, message):
    write(tmp_path / "a")
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "a")
    assert "tools/preprocess_data.py" in str(caught.value)


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_missing_files_are_named(tmp_path, suffix):
    write(tmp_path / "a")
    (tmp_path / f"a.{suffix}").unlink()
    with pytest.raises(DataError, match=rf"a\.{suffix} cannot be opened: No such file.*without '\.bin' or '\.idx'"):
        IndexedDataset(tmp_path / "a")


def test_multimodal_modes_behind_the_index_are_tolerated(tmp_path):
    write(tmp_path / "a")
    path = tmp_path / "a.idx"
    path.write_bytes(path.read_bytes() + b"\0" * 4)
    assert len(IndexedDataset(tmp_path / "a")) == 4


def test_paths_with_odd_characters(tmp_path):
    folder = tmp_path / "a b%20 \u4e2d'\""
    folder.mkdir()
    data = IndexedDataset(write(folder / "corpus.v1.2"))
    assert data.get(3).tolist() == [9]
    assert files(folder) == ["corpus.v1.2.bin", "corpus.v1.2.idx", "corpus.v1.2.meta.json"]
