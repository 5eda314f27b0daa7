"""From settings to datasets: splits, sizes from the checkpoint, and data that does not fit the run."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megalite.data.build import build_datasets, check_token_range
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megalite.data.tokenizers import ByteTokenizer, NullTokenizer
from megalite.utils.errors import ConfigError, DataError

TOKENIZER = ByteTokenizer()


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16, "ByteTokenizer", 257, 256) as writer:
        for number in range(100):
            writer.add_document([number] * 20 + [256])
        writer.finalize()
    return tmp_path / "corpus"


def build(prefix, **options):
    settings = {
        "data_path": [str(prefix)],
        "mock_data": False,
        "split": "80,10,10",
        "num_samples": {"train": 50, "valid": 5, "test": 5},
        "seq_length": 16,
        "seed": 1,
        "tokenizer": TOKENIZER,
    }
    return build_datasets(**{**settings, **options})


def write_foreign(prefix, documents, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=dtype))
        writer.finalize()
    Path(f"{prefix}.meta.json").unlink()


def test_splits_hold_their_own_documents(prefix):
    data = build(prefix)
    for dataset, low, high in ((data.train, 0, 80), (data.valid, 80, 90), (data.test, 90, 100)):
        tokens = np.unique(np.concatenate([dataset.read_text(i) for i in range(len(dataset))]))
        assert set(tokens) - {256} <= set(range(low, high))
    assert (prefix.parent / "cache" / "GPTDataset_indices").is_dir()


def test_the_cache_goes_where_it_is_told(prefix, tmp_path):
    build(prefix, data_cache_path=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").is_dir() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mock", [False, True])
def test_index_sizes_come_back_from_the_checkpoint(prefix, mock):
    source = {"mock_data": mock, "data_path": None if mock else [str(prefix)], "seq_length": 512 if mock else 16}
    counts = {"train": 200, "valid": 20}
    first = build(prefix, num_samples=counts, **source)
    assert first.index_sizes == {"train": [200], "valid": [20]} and first.test is None
    wanted = {"train": len(first.train) + 300, "valid": 5}
    longer = build(prefix, num_samples=wanted, index_sizes=first.index_sizes, **source)
    assert longer.index_sizes["train"][0] == 200 and len(longer.index_sizes["train"]) == 2
    assert longer.index_sizes["valid"] == [20]
    for i in range(0, len(first.train), max(1, len(first.train) // 50)):
        assert np.array_equal(first.train.read_text(i), longer.train.read_text(i))


def test_mock_data_needs_no_files():
    data = build(Path("/nowhere"), data_path=None, mock_data=True, num_samples={"train": 10})
    assert len(data.train) >= 10 and data.valid is None and int(data.train.read_text(0).max()) < 257


def test_options_reach_the_samples(prefix):
    data = build(prefix, eod_mask_loss=True, mmap_bin_files=False)
    assert any(float(data.train[i]["loss_mask"].min()) == 0 for i in range(20))
    assert data.train.source.mmap is False


@pytest.mark.parametrize("path", [None, [], ["a", "b"]])
def test_data_path_is_one_prefix(prefix, path):
    with pytest.raises(ConfigError, match=r"data\.data_path"):
        build(prefix, data_path=path)


def test_a_split_without_data_that_is_asked_for(prefix):
    with pytest.raises(DataError, match=r"valid split is asked for 5 samples.*'1,0,0' gives it none of the 100"):
        build(prefix, split="1,0,0")
    assert build(prefix, split="1,0,0", num_samples={"train": 5, "valid": 0}).valid is None


def test_a_split_too_short_for_a_sample(prefix):
    with pytest.raises(DataError, match=r"valid split has 10 sequences with 210 tokens, one sample needs 301"):
        build(prefix, seq_length=300)


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_an_empty_corpus(tmp_path, documents):
    write_foreign(tmp_path / "empty", documents, np.uint16)
    with pytest.raises(DataError, match=r"empty is empty: it has \d sequences and no token"):
        build(tmp_path / "empty")


def test_data_of_another_tokenizer_or_end_id_is_refused(tmp_path, prefix):
    with pytest.raises(DataError, match=r"made with ByteTokenizer, this run uses NullTokenizer"):
        build(prefix, tokenizer=NullTokenizer(256))
    with IndexedDatasetWriter(tmp_path / "ids", np.uint16, "NullTokenizer", 101, 100) as writer:
        writer.add_document([1] * 50)
        writer.finalize()
    with pytest.raises(DataError, match=r"end with token 100, NullTokenizer of this run ends them with 200"):
        build(tmp_path / "ids", tokenizer=NullTokenizer(200))


def test_a_token_beyond_the_vocabulary_is_found_at_the_start(prefix):
    with pytest.raises(
        DataError, match=r"token id 256 in document 0 \(sequence 0\), the vocabulary has 200 ids \(.* made for 257\)"
    ):
        build(prefix, vocab_size=200)
    build(prefix, vocab_size=257)


def test_foreign_data_is_read_once_to_find_its_largest_id(tmp_path, caplog):
    write_foreign(tmp_path / "f", [[1, 2], [3], [4, 299]], np.uint16)
    indexed, cache = IndexedDataset(tmp_path / "f"), tmp_path / "cache"
    caplog.set_level(logging.INFO, logger="megalite")
    with pytest.raises(
        DataError, match=r"token id 299 in document 2 .* the vocabulary has 256 ids; the largest id is 299"
    ):
        check_token_range(indexed, 256, cache)
    check_token_range(indexed, 300, cache)
    assert caplog.text.count("read its 5 tokens") == 1
    for path in cache.iterdir():
        path.write_bytes(b"{")
    check_token_range(indexed, 300, cache)
    assert caplog.text.count("read its 5 tokens") == 2


def test_a_range_that_cannot_be_kept_is_read_again(tmp_path, caplog):
    write_foreign(tmp_path / "f", [[1, 299]], np.uint16)
    (tmp_path / "occupied").write_text("a file where a folder should be")
    check_token_range(IndexedDataset(tmp_path / "f"), 300, tmp_path / "occupied")
    assert "cannot be kept in" in caplog.text


def test_negative_ids_and_values_that_are_no_ids(tmp_path):
    np.array([3, -7], dtype=np.int32).tofile(tmp_path / "n.bin")
    write_foreign(tmp_path / "n2", [[3, 7]], np.int32)
    (tmp_path / "n.idx").write_bytes((tmp_path / "n2.idx").read_bytes())
    with pytest.raises(DataError, match="token id -7 in document 0"):
        check_token_range(IndexedDataset(tmp_path / "n"), 300)
    write_foreign(tmp_path / "float", [[0.5]], np.float32)
    with pytest.raises(DataError, match="float32 values, which are not token ids"):
        check_token_range(IndexedDataset(tmp_path / "float"), 300)


def test_types_that_cannot_leave_the_vocabulary_are_not_read(tmp_path, caplog):
    write_foreign(tmp_path / "small", [[1, 255]], np.uint8)
    caplog.set_level(logging.INFO, logger="megalite")
    check_token_range(IndexedDataset(tmp_path / "small"), 256)
    assert caplog.text == ""


def test_paths_with_odd_characters(tmp_path, prefix):
    folder = tmp_path / "b c%20 \u4e2d'\""
    folder.mkdir()
    for suffix in ("bin", "idx", "meta.json"):
        Path(f"{prefix}.{suffix}").rename(folder / f"corpus.{suffix}")
    build(folder / "corpus")
    assert build(folder / "corpus", data_cache_path=folder / "k%").train.read_text(0).shape == (17,)
