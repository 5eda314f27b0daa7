"""Samples, splits, the extension of a run, and the index cache."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch

from megalite.data import gpt_dataset
from megalite.data.gpt_dataset import GPTDataset, SampleFields, segment_seed, split_ranges
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megalite.data.mock import MockGPTDataset, MockTokens
from megalite.utils.errors import ConfigError, DataError

EOD = 99
NUM_SEQUENCES = 30


@pytest.fixture
def indexed(tmp_path):
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for length in random.randint(0, 20, NUM_SEQUENCES):
            writer.add_document([*random.randint(0, 90, length), EOD])
        writer.finalize()
    return IndexedDataset(tmp_path / "corpus")


def build(indexed, **options):
    return GPTDataset(indexed, range(NUM_SEQUENCES), **{"num_samples": 40, "seq_length": 16, "seed": 7, **options})


def texts(dataset, count=None):
    return np.stack([dataset.read_text(i) for i in range(count or len(dataset))])


def test_samples_are_windows_of_the_shuffled_documents(indexed):
    dataset = build(indexed)
    tables = dataset._segments[0]
    stream = np.concatenate([indexed.get(int(i)) for i in tables.document_index])
    for i in range(len(dataset)):
        start = int(tables.shuffle_index[i]) * 16
        sample = dataset[i]
        assert sample["tokens"].tolist() == stream[start : start + 16].tolist()
        assert sample["labels"].tolist() == stream[start + 1 : start + 17].tolist()
        assert sample["position_ids"].tolist() == list(range(16))
        assert sample["loss_mask"].tolist() == [1.0] * 16
    types = {key: (value.dtype, tuple(value.shape)) for key, value in dataset[0].items()}
    ids, mask = (torch.int64, (16,)), (torch.float32, (16,))
    assert types == {"tokens": ids, "labels": ids, "loss_mask": mask, "position_ids": ids}


def test_eod_mask_loss_masks_the_position_whose_input_is_the_end(indexed):
    dataset = build(indexed, fields=SampleFields(EOD, eod_mask_loss=True))
    masked = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        assert torch.equal(sample["loss_mask"], (sample["tokens"] != EOD).float())
        masked += int((sample["loss_mask"] == 0).sum())
    assert masked > 0


def test_fields_of_the_documented_example():
    tokens = np.array([5, 0, 7, 8, 0, 9])
    all_on = SampleFields(0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    assert {key: value.tolist() for key, value in all_on.of(tokens).items()} == {
        "loss_mask": [1, 0, 1, 1, 0, 1],
        "position_ids": [0, 1, 0, 1, 2, 0],
        "document_ids": [0, 0, 1, 1, 1, 2],
    }
    assert set(SampleFields(0).of(tokens)) == {"loss_mask", "position_ids"}
    assert SampleFields(None, reset_position_ids=True).of(tokens)["position_ids"].tolist() == list(range(6))


def megatron_fields(tokens, eod):
    """Position ids and mask (True: hidden) by Megatron's definition: changes in place, one end after the other."""
    length = len(tokens)
    visible, positions, start = np.tril(np.ones((length, length))), np.arange(length), 0
    for end in np.flatnonzero(tokens == eod):
        visible[end + 1 :, : end + 1] = 0
        positions[end + 1 :] -= end + 1 - start
        start = end + 1
    return positions, visible < 0.5


def mask_of(document_ids):
    """The mask that the model makes of the numbers."""
    length = len(document_ids)
    row, column = np.arange(length)[:, None], np.arange(length)[None, :]
    return ~((column <= row) & (document_ids[:, None] == document_ids[None, :]))


@pytest.mark.parametrize("share_of_ends", [0.0, 0.1, 0.5, 1.0])
def test_document_ids_say_the_same_as_megatrons_mask(share_of_ends):
    random = np.random.RandomState(int(10 * share_of_ends))
    fields = SampleFields(EOD, reset_position_ids=True, reset_attention_mask=True)
    for _ in range(50):
        tokens = random.randint(0, 90, random.randint(1, 30))
        tokens[random.rand(len(tokens)) < share_of_ends] = EOD
        ours, (positions, mask) = fields.of(tokens), megatron_fields(tokens, EOD)
        assert np.array_equal(ours["position_ids"], positions)
        assert np.array_equal(mask_of(ours["document_ids"]), mask)


def test_resets_reach_the_samples(indexed):
    dataset = build(indexed, fields=SampleFields(EOD, reset_position_ids=True, reset_attention_mask=True))
    for i in range(len(dataset)):
        sample = dataset[i]
        positions, mask = megatron_fields(sample["tokens"].numpy(), EOD)
        assert sample["position_ids"].tolist() == positions.tolist()
        assert np.array_equal(mask_of(sample["document_ids"].numpy()), mask)
    assert (sample["document_ids"].dtype, sample["position_ids"].dtype) == (torch.int32, torch.int64)


def test_samples_share_no_buffer_with_others_or_with_themselves(indexed):
    """TOK-10."""
    dataset = build(indexed, fields=SampleFields(EOD, eod_mask_loss=True))
    expected = [{key: value.clone() for key, value in dataset[i].items()} for i in range(4)]
    for i in range(4):
        sample = dataset[i]
        labels = sample["labels"].clone()
        sample["tokens"].fill_(-5)
        assert torch.equal(sample["labels"], labels)
        for value in sample.values():
            value.fill_(-5)
    for i in range(4):
        assert all(torch.equal(value, expected[i][key]) for key, value in dataset[i].items())


def test_a_sample_outside_is_an_index_error(indexed):
    dataset = build(indexed)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]


def test_the_order_depends_on_the_seed_and_epochs_differ(indexed):
    assert not np.array_equal(texts(build(indexed)), texts(build(indexed, seed=8)))
    documents = build(indexed, num_samples=100)._segments[0].document_index
    assert not np.array_equal(documents[:NUM_SEQUENCES], documents[NUM_SEQUENCES : 2 * NUM_SEQUENCES])


def test_no_number_of_samples_means_one_epoch(indexed):
    dataset = build(indexed, num_samples=None)
    assert len(dataset) == (indexed.num_tokens - 1) // 16
    assert dataset.index_sizes == [len(dataset)]


def test_too_little_data_for_a_sample_names_both_numbers(indexed):
    with pytest.raises(DataError, match=rf"valid split has 30 sequences with {indexed.num_tokens} tokens.*needs 1001"):
        build(indexed, seq_length=1000, split="valid")
    with pytest.raises(DataError, match="0 sequences with 0 tokens"):
        GPTDataset(indexed, range(0), num_samples=1, seq_length=4, seed=1)


@pytest.mark.parametrize(
    "split, count, edges",
    [
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("969, 30, 1", 50, (0, 48, 50, 50)),
        ("1,1", 5, (0, 2, 5, 5)),  # 2.5 rounds to the even 2
        ("1,1", 7, (0, 4, 7, 7)),
        ("1,0,0", 3, (0, 3, 3, 3)),
        ("0.5,0.25,0.25", 8, (0, 4, 6, 8)),
        ("98", 10, (0, 10, 10, 10)),
    ],
)
def test_split_edges(split, count, edges):
    ranges = split_ranges(split, count)
    assert [(r.start, r.stop) for r in ranges] == list(zip(edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize("split", ["", "0,0,0", "a,b", "1,2,3,4", "1.2.3,4", "10,-1,1"])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(ConfigError, match=r"data\.split"):
        split_ranges(split, 10)


def test_a_longer_run_keeps_what_was_defined_and_appends(indexed):
    first = build(indexed, num_samples=40)
    assert first.index_sizes == [40]
    longer = build(indexed, num_samples=150, defined_sizes=first.index_sizes)
    assert len(longer) >= 150 and longer.index_sizes == [40, 150 - len(first)]
    assert np.array_equal(texts(first), texts(longer, len(first)))
    # Without the sizes of the checkpoint the order is another one: what the extension prevents.
    assert not np.array_equal(texts(first), texts(build(indexed, num_samples=150), len(first)))
    again = build(indexed, num_samples=400, defined_sizes=longer.index_sizes)
    assert again.index_sizes[:2] == longer.index_sizes and len(again.index_sizes) == 3
    assert np.array_equal(texts(longer), texts(again, len(longer)))


def test_an_appended_segment_has_a_shuffle_of_its_own(indexed):
    longer = build(indexed, num_samples=80, defined_sizes=[40])
    one, two = longer._segments
    size = min(len(one.document_index), len(two.document_index))
    assert not np.array_equal(one.document_index[:size], two.document_index[:size])
    assert segment_seed(7, 0) == 7
    assert len({segment_seed(7, 1), segment_seed(7, 2), segment_seed(8, 1), 7}) == 4
    # Part of the format of an order: these numbers may not change between versions.
    assert (segment_seed(1234, 1), segment_seed(1234, 2)) == (2900015356, 4259972370)


def test_a_shorter_run_keeps_the_order(indexed):
    first = build(indexed, num_samples=100)
    shorter = build(indexed, num_samples=10, defined_sizes=[100])
    assert shorter.index_sizes == [100]
    assert np.array_equal(texts(first), texts(shorter))


def test_index_sizes_are_plain_and_private(indexed):
    dataset = build(indexed)
    assert type(dataset.index_sizes[0]) is int
    dataset.index_sizes.append(5)
    assert dataset.index_sizes == [40]


@pytest.mark.parametrize("wrong", [0, -3, "40", 4.0, True, None])
def test_damaged_index_sizes_are_refused(indexed, wrong):
    with pytest.raises(DataError, match="segment 1 of the index sizes"):
        build(indexed, defined_sizes=[40, wrong])


def test_definition_tells_what_changes_the_order(indexed):
    base = build(indexed).definition
    assert base == build(indexed, num_samples=90).definition
    assert base != build(indexed, seq_length=8).definition
    assert base != build(indexed, seed=8).definition
    assert base != GPTDataset(indexed, range(20), num_samples=40, seq_length=16, seed=7).definition


# ------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def builds(monkeypatch):
    """The number of index builds so far, as a list that grows."""
    calls = []
    real = gpt_dataset.build_indices
    monkeypatch.setattr(gpt_dataset, "build_indices", lambda *a: calls.append(1) or real(*a))
    return calls


def test_the_cache_is_used_and_gives_the_same(indexed, tmp_path, builds):
    cache = tmp_path / "cache" / "deep"
    expected = texts(build(indexed))
    assert np.array_equal(expected, texts(build(indexed, cache_folder=cache)))
    assert len(builds) == 2
    assert np.array_equal(expected, texts(build(indexed, cache_folder=cache)))
    assert len(builds) == 2
    names = sorted(path.name.split("-", 1)[1] for path in cache.iterdir())
    tables = ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    assert names == [f"GPTDataset-train-{table}" for table in tables]


@pytest.mark.parametrize("change", [{"seed": 8}, {"seq_length": 8}, {"num_samples": 41}, {"split": "valid"}])
def test_another_definition_is_another_cache_entry(indexed, tmp_path, builds, change):
    build(indexed, cache_folder=tmp_path / "cache")
    build(indexed, cache_folder=tmp_path / "cache", **change)
    assert len(builds) == 2


def test_other_documents_under_the_same_name_are_another_cache_entry(indexed, tmp_path, builds):
    build(indexed, cache_folder=tmp_path / "cache")
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(NUM_SEQUENCES):
            writer.add_document([1] * 20)
        writer.finalize()
    dataset = build(IndexedDataset(tmp_path / "corpus"), cache_folder=tmp_path / "cache")
    assert len(builds) == 2 and dataset.read_text(0).tolist() == [1] * 17


class _Trap:
    def __reduce__(self):
        return open, ("trap_was_sprung", "w")


def _objects(path):
    np.save(path, np.array([_Trap()], dtype=object), allow_pickle=True)


def _pickled(path):
    path.write_bytes(pickle.dumps(_Trap()))


def _other_shape(path):
    np.save(path, np.load(path)[:-1])


def _other_dtype(path):
    np.save(path, np.load(path).astype(np.float64))


@pytest.mark.parametrize("table", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        _other_shape,
        _other_dtype,
        _objects,
        _pickled,
    ],
    ids=["empty", "truncated", "header", "shape", "dtype", "objects", "pickle"],
)
def test_a_damaged_cache_is_built_again_with_one_warning(indexed, tmp_path, monkeypatch, caplog, builds, table, damage):
    monkeypatch.chdir(tmp_path)
    expected = texts(build(indexed, cache_folder=tmp_path / "cache"))
    (path,) = (tmp_path / "cache").glob(f"*{table}.npy")
    damage(path)
    assert np.array_equal(expected, texts(build(indexed, cache_folder=tmp_path / "cache")))
    assert len(builds) == 2 and not (tmp_path / "trap_was_sprung").exists()
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and path.name in warnings[0].getMessage()
    build(indexed, cache_folder=tmp_path / "cache")
    assert len(builds) == 2


def test_a_cache_folder_that_cannot_be_written_is_named_and_done_without(indexed, tmp_path, caplog):
    (tmp_path / "occupied").write_text("a file where a folder should be")
    folder = tmp_path / "occupied" / "cache"
    dataset = build(indexed, cache_folder=folder)
    assert np.array_equal(texts(dataset), texts(build(indexed)))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and str(folder) in warnings[0] and "data.data_cache_path" in warnings[0]


def test_many_builders_at_once_never_see_a_half_file(indexed, tmp_path, caplog):
    expected = texts(build(indexed))
    results, errors = [], []
    gate = threading.Barrier(8)

    def run():
        try:
            gate.wait(10)
            for _ in range(5):
                results.append(texts(build(indexed, cache_folder=tmp_path / "cache")))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and len(results) == 40
    assert all(np.array_equal(expected, result) for result in results)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_pickled_dataset_finds_its_tables_again(indexed, tmp_path, builds):
    dataset = build(
        indexed,
        num_samples=120,
        defined_sizes=[40],
        cache_folder=tmp_path / "cache",
        fields=SampleFields(EOD, eod_mask_loss=True),
    )
    count = len(builds)
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(builds) == count and copy.index_sizes == dataset.index_sizes
    for i in (0, 50, len(dataset) - 1):
        assert all(torch.equal(value, dataset[i][key]) for key, value in copy[i].items())


# -------------------------------------------------------------------------------------------------------- mock


def test_mock_sequences_count_upwards_and_end():
    tokens = MockTokens(50, 49)
    length = int(tokens.sequence_lengths[0])
    assert tokens.get(0).tolist() == [*(k % 50 for k in range(1, length)), 49]
    assert tokens.get(0, 3, 4).tolist() == [4, 5, 6, 7]
    assert tokens.get(0, length - 1).tolist() == [49]
    with pytest.raises(IndexError):
        tokens.get(0, 0, length + 1)


def test_mock_lengths_are_megatrons():
    lengths = MockTokens(50, 49).sequence_lengths
    assert len(lengths) == 100_000 and lengths.dtype == np.int32
    assert np.array_equal(lengths, np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32))


def test_mock_data_is_a_dataset_without_files():
    options = {"num_samples": 20, "seq_length": 32, "seed": 3, "sequences": range(50)}
    one, two = MockGPTDataset(50, 49, **options), MockGPTDataset(50, 49, **options)
    assert np.array_equal(texts(one, 20), texts(two, 20))
    sample = one[0]
    steps = (sample["labels"] == (sample["tokens"] + 1) % 50).float().mean()
    assert steps > 0.8
