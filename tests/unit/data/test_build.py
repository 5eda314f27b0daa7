"""From settings to datasets: splits, sizes from the checkpoint, and data that does not fit the run."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megalite.config.schema import DataConfig
from megalite.data.build import build_datasets
from megalite.data.content import check_token_range
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megalite.data.tokenizers import ByteTokenizer, NullTokenizer
from megalite.utils.errors import DataError

TOKENIZER = ByteTokenizer()


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16, "ByteTokenizer", 257, 256) as writer:
        for number in range(100):
            writer.add_document([number] * 20 + [256])
        writer.finalize()
    return tmp_path / "corpus"


def build(prefix, **options):
    arguments = {
        "num_samples": {"train": 50, "valid": 5, "test": 5},
        "seq_length": 16,
        "seed": 1,
        "tokenizer": TOKENIZER,
    }
    arguments |= {key: options.pop(key) for key in (*arguments, "vocab_size", "index_sizes") if key in options}
    settings = {"data_path": [str(prefix)], "split": "80,10,10", **options}
    return build_datasets(DataConfig(**settings), **arguments)


def write_foreign(prefix, documents, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=dtype))
        writer.finalize()
    Path(f"{prefix}.meta.json").unlink()


def test_splits_hold_their_own_documents(prefix):
    data = build(prefix)
    for dataset, low, high in ((data.train, 0, 80), (data.valid["valid"], 80, 90), (data.test, 90, 100)):
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
    assert len(data.train) >= 10 and data.valid == {} and int(data.train.read_text(0).max()) < 257


def test_options_reach_the_samples(prefix):
    data = build(prefix, eod_mask_loss=True, mmap_bin_files=False)
    assert any(float(data.train[i]["loss_mask"].min()) == 0 for i in range(20))
    assert data.train.source.mmap is False


def test_a_split_without_data_that_is_asked_for(prefix):
    with pytest.raises(
        DataError, match=r"corpus: the valid split is asked for 5 samples.*'1,0,0' gives it none of the 100"
    ):
        build(prefix, split="1,0,0")
    assert build(prefix, split="1,0,0", num_samples={"train": 5, "valid": 0}).valid == {}


def test_a_split_too_short_for_a_sample(prefix):
    with pytest.raises(
        DataError, match=r"corpus: the valid split has 10 sequences with 210 tokens, one sample needs 301"
    ):
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
    """TOK-12."""
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


# ------------------------------------------------------------------------------------------- blends and their splits


def write(prefix: Path, first: int, documents: int = 30) -> str:
    """Write documents of tokens from ``first`` on, so that a token tells its file."""
    with IndexedDatasetWriter(prefix, np.uint16, "ByteTokenizer", 257, 256) as writer:
        for number in range(documents):
            writer.add_document([first + number] * 20 + [256])
        writer.finalize()
    return str(prefix)


def build_files(tmp_path: Path, **options):
    """A blend of two files that is 40 samples long."""
    paths = ["0.3", write(tmp_path / "a", 0), "0.7", write(tmp_path / "b", 100)]
    return build(None, **{"data_path": paths, "split": "1", "num_samples": {"train": 40}, **options}).train


def files_of(dataset) -> list[int]:
    """Which file each sample is from: 0 for tokens below 100, and so on."""
    return [int(np.median(dataset.read_text(i))) // 100 for i in range(len(dataset))]


def test_a_list_with_weights_is_a_blend_in_every_split(tmp_path):
    paths = ["30", write(tmp_path / "a", 0), "70", write(tmp_path / "b", 100)]
    counts = {"train": 40, "valid": 10, "test": 10}
    data = build(None, data_path=paths, split="80,10,10", num_samples=counts, mid_level_dataset_surplus=0.5)
    for name, dataset in data.by_name.items():
        assert np.bincount(files_of(dataset)).tolist() == [0.3 * counts[name], 0.7 * counts[name]]
    assert data.index_sizes["train"] == {"blend": [40], "sources": [[18], [42]]}
    assert data.definitions["train"]["weights"] == [30.0, 70.0]
    assert (tmp_path / "cache" / "GPTDataset_indices").is_dir()


def test_a_single_prefix_with_a_weight_is_a_blend_of_one(tmp_path):
    data = build(None, data_path=["1.0", write(tmp_path / "a", 0)])
    assert data.train[0]["dataset_id"] == 0 and data.index_sizes["train"]["sources"] == [[51]]
    assert "dataset_id" not in build(None, data_path=[str(tmp_path / "a")]).train[0]


def test_entries_may_stand_in_a_file(tmp_path):
    build_files(tmp_path)
    (tmp_path / "entries.txt").write_text(f"0.3 {tmp_path / 'a'}\n0.7\t{tmp_path / 'b'}\n")
    options = {"split": "1", "num_samples": {"train": 40}}
    train = build(None, data_path=None, data_args_path=tmp_path / "entries.txt", **options).train
    assert np.bincount(files_of(train)).tolist() == [12, 28]


def test_blends_come_back_from_the_checkpoint(tmp_path):
    first = build_files(tmp_path)
    longer = build_files(tmp_path, num_samples={"train": 200}, index_sizes={"train": first.index_sizes})
    assert len(longer) >= 200
    assert all(np.array_equal(first.read_text(i), longer.read_text(i)) for i in range(len(first)))


def test_every_split_may_have_paths_of_its_own(tmp_path):
    paths = [write(tmp_path / name, 100 * number, 20) for number, name in enumerate("ab")]
    data = build(
        None,
        data_path=None,
        split=None,
        train_data_path=["1", paths[0], "3", paths[1]],
        valid_data_path=["5", paths[0]],
        test_data_path=[paths[1]],
    )
    assert np.bincount(files_of(data.train)).tolist() == [13, 38]
    # All documents of a file, and a single source is no blend.
    for dataset, file in ((data.valid["valid"], 0), (data.test, 1)):
        assert set(files_of(dataset)) == {file} and "dataset_id" not in dataset[0]
        assert dataset.tokens_per_epoch == 20 * 21


def test_a_split_without_a_path_cannot_be_asked_for(tmp_path):
    options = {"data_path": None, "split": None, "train_data_path": [write(tmp_path / "a", 0)]}
    with pytest.raises(DataError, match=r"valid split is asked for 5 samples but has no data: .*data\.valid_data_path"):
        build(None, **options)
    assert build(None, **options, num_samples={"train": 5}).valid == {}


def test_each_of_several_validation_sets_has_its_own_name_order_and_sizes(tmp_path):
    for folder in ("wiki", "code"):
        (tmp_path / folder).mkdir()
    paths = [write(tmp_path / "wiki" / "held", 0), write(tmp_path / "code" / "held", 100)]
    options = {
        "data_path": None,
        "split": None,
        "train_data_path": [paths[0]],
        "valid_data_path": paths,
        "multiple_validation_sets": True,
    }
    data = build(None, **options, num_samples={"train": 50, "valid": 5})
    assert list(data.valid) == ["valid/wiki/held", "valid/code/held"]
    assert [set(files_of(dataset)) for dataset in data.valid.values()] == [{0}, {1}]
    assert all(len(dataset) >= 5 for dataset in data.valid.values())
    assert list(data.index_sizes) == ["train", "valid/wiki/held", "valid/code/held"]
    sizes = {"valid/code/held": [5]}
    longer = build(None, **options, num_samples={"train": 50, "valid": 90}, index_sizes=sizes)
    assert longer.index_sizes["valid/wiki/held"] == [90] and longer.index_sizes["valid/code/held"][0] == 5


def test_a_file_is_opened_and_checked_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megalite")
    write_foreign(tmp_path / "f", [[1] * 50] * 10, np.uint16)
    paths = {"train_data_path": [str(tmp_path / "f")] * 3, "valid_data_path": [str(tmp_path / "f")]}
    data = build(None, data_path=None, split=None, num_samples={"train": 5, "valid": 5}, **paths)
    assert caplog.text.count("to find the largest id") == 1
    assert data.train.datasets[0].source is data.valid["valid"].source


def test_a_source_of_a_blend_that_does_not_fit_is_named(tmp_path):
    paths = [write(tmp_path / "a", 0), write(tmp_path / "small", 0, documents=3)]
    with pytest.raises(DataError, match=r"small: the test split is asked for 5 samples but has no data"):
        build(None, data_path=paths)
    with pytest.raises(DataError, match=r"small: the train split has 2 sequences with 42 tokens, one sample needs 101"):
        build(None, data_path=paths, seq_length=100, num_samples={"train": 5})
    with pytest.raises(DataError, match=r"missing\.idx cannot be opened"):
        build(None, data_path=[*paths, str(tmp_path / "missing")])


def test_a_changed_number_of_sources_is_said(tmp_path, caplog):
    sizes = {"train": build_files(tmp_path).index_sizes}
    data = build(None, data_path=[str(tmp_path / "a")], split="1", num_samples={"train": 40}, index_sizes=sizes)
    assert data.index_sizes == {"train": [40]}
    assert "is a blend of 2 sources, this run's is a single source" in caplog.text


def test_ends_of_documents_reach_the_samples(prefix):
    data = build(prefix, reset_position_ids=True, reset_attention_mask=True)
    sample = data.train[0]
    assert int(sample["document_ids"].max()) > 0 or 256 not in sample["tokens"][:-1]
    assert any(data.train[i]["position_ids"].tolist() != list(range(16)) for i in range(20))
    assert "document_ids" not in build(prefix).train[0]
