"""Blends: who gives which sample, how many a source is asked for, and the extension of a run."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from megalite.data import blended
from megalite.data.blend_indices import build_blending_indices, build_exhaustive_blending_indices, normalize
from megalite.data.blended import BlendSource, build_blended, fitting_sizes, plan_segment
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.samplers import BatchLoader
from megalite.utils.errors import ConfigError, DataError

SEQ_LENGTH = 8


class Tokens:
    """Sequences whose tokens tell their source."""

    def __init__(self, source: int, num_sequences: int) -> None:
        self.name, self.base = f"source {source}", 1000 * source
        self.sequence_lengths = np.random.RandomState(source).randint(3, 12, num_sequences).astype(np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index, offset=0, length=None):
        tokens = self.base + index + np.zeros(self.sequence_lengths[index], dtype=np.int64)
        return tokens[offset:] if length is None else tokens[offset : offset + length]


def sources(*sizes: int, cache=None) -> list[BlendSource]:
    def source(number: int, size: int) -> BlendSource:
        tokens = Tokens(number, size)
        options = {"seq_length": SEQ_LENGTH, "seed": 3, "cache_folder": cache}

        def build(count, defined):
            return GPTDataset(tokens, range(size), num_samples=count, defined_sizes=defined, **options)

        return BlendSource(build, GPTDataset(tokens, range(size), num_samples=None, **options).samples_per_epoch)

    return [source(number, size) for number, size in enumerate(sizes)]


def build(sizes=(40, 10, 20), weights=(3.0, 1.0, 2.0), num_samples=60, cache=None, **options):
    return build_blended(
        sources(*sizes, cache=cache),
        weights,
        num_samples=num_samples,
        cache_folder=cache,
        **{"surplus": 0.005, **options},
    )


def texts(dataset, count=None):
    return np.stack([dataset.read_text(i) for i in range(count or len(dataset))])


def test_samples_come_from_the_sources_in_the_order_of_the_table():
    blend = build()
    shares = normalize([3.0, 1.0, 2.0])
    table = build_blending_indices(normalize(shares), len(blend))
    assert len(blend) == sum(math.ceil(60 * share) for share in shares) and len(blend) >= 60
    for i in range(len(blend)):
        source, place = int(table.dataset_index[i]), int(table.dataset_sample_index[i])
        assert blend.locate(i) == (source, place)
        sample, own = blend[i], blend.datasets[source][place]
        assert sample.pop("dataset_id").item() == source
        assert sample.keys() == own.keys() and all(torch.equal(sample[key], own[key]) for key in own)
        assert int(sample["tokens"][0]) // 1000 == source
    assert blend[0]["dataset_id"].dtype == torch.int64
    for index in (-1, len(blend)):
        with pytest.raises(IndexError):
            blend[index]


def test_a_source_is_prepared_for_its_share_and_the_surplus():
    rule, requests = plan_segment([1.0, 2.0, 7.0], 1000, [50, 60, 70], 0.005)
    assert requests == [math.ceil(100 * 1.005), math.ceil(200 * 1.005), math.ceil(700 * 1.005)]
    assert rule.size == 1000 and rule.weights == (0.1, 0.2, 0.7)
    assert plan_segment([1.0, 2.0, 7.0], 1000, [50, 60, 70], 0.5)[1] == [150, 300, 1050]
    # Every share is rounded up, so that a blend may have some samples more than it was asked for.
    assert plan_segment([1.0, 1.0, 1.0], 100, [50, 60, 70], 0.0)[0].size == 102


def test_weights_are_normalised_twice_as_in_megatron():
    weights = [9.0, 9.0, 2.0, 7.0, 8.0]
    once = normalize(weights)
    assert normalize(once) != once
    assert plan_segment(weights, 100, [50] * 5, 0.0)[0].weights == tuple(normalize(once))


def test_without_weights_the_lengths_decide():
    lengths = [source.samples_per_epoch for source in sources(40, 10, 20)]
    rule, requests = plan_segment(None, 20, lengths, 0.005)
    assert (rule.weights, rule.size, requests) == (tuple(normalize(lengths)), 20, lengths)
    blend = build(weights=None, num_samples=20)
    assert len(blend) == 20 and blend.index_sizes == {"blend": [20], "sources": [[n] for n in lengths]}


def test_without_weights_and_number_all_samples_come_once():
    lengths = [source.samples_per_epoch for source in sources(40, 10, 20)]
    blend = build(weights=None, num_samples=None)
    table = build_exhaustive_blending_indices(lengths)
    assert len(blend) == sum(lengths) and blend.index_sizes["blend"] == [None]
    assert [blend.locate(i) for i in range(len(blend))] == list(
        zip(table.dataset_index.tolist(), table.dataset_sample_index.tolist(), strict=True)
    )
    again = build(weights=None, num_samples=None, defined_sizes=blend.index_sizes)
    assert np.array_equal(texts(blend), texts(again))
    with pytest.raises(ConfigError, match="has weights but no number of samples"):
        build(num_samples=None)


def test_without_weights_more_than_an_epoch_goes_on_by_length():
    lengths = [source.samples_per_epoch for source in sources(40, 10, 20)]
    blend = build(weights=None, num_samples=5 * sum(lengths))
    assert len(blend) >= 5 * sum(lengths)
    drawn = np.bincount([blend.locate(i)[0] for i in range(len(blend))])
    assert np.allclose(drawn / len(blend), np.array(lengths) / sum(lengths), atol=0.02)


@pytest.mark.parametrize("weights", [[0.001, 0.999], [1e-9, 1.0], [1.0, 1.0], None])
@pytest.mark.parametrize("num_samples", [1, 7, 400])
def test_tok_09_no_source_runs_out(weights, num_samples):
    """TOK-09: extreme weights over tiny sources, without surplus."""
    blend = build((3, 2), weights, num_samples, surplus=0.0)
    assert len(blend) >= num_samples
    for i in range(len(blend)):
        assert int(blend[i]["tokens"][0]) // 1000 == blend.locate(i)[0]


def test_tok_09_a_source_that_is_overdrawn_gets_more_epochs(monkeypatch):
    """TOK-09: a table that draws more from a source than its share and surplus."""
    table = blended.BlendIndices(np.ones(300, np.int16), np.arange(300))
    monkeypatch.setattr(blended, "build_blending_indices", lambda weights, size: table)
    blend = build((30, 3), (299.0, 1.0), 300)
    assert len(blend) == 300 and blend.index_sizes["sources"][1] == [300]
    assert texts(blend).shape == (300, SEQ_LENGTH + 1)


def test_a_longer_run_keeps_what_was_defined_and_appends():
    first = build(num_samples=60)
    longer = build(num_samples=300, defined_sizes=first.index_sizes)
    assert len(longer) >= 300 and longer.index_sizes["blend"] == [60, 300 - len(first)]
    assert np.array_equal(texts(first), texts(longer, len(first)))
    # Without the sizes of the checkpoint the sources are shuffled for another length: what the extension prevents.
    assert not np.array_equal(texts(first), texts(build(num_samples=300), len(first)))
    again = build(num_samples=900, defined_sizes=longer.index_sizes)
    assert again.index_sizes["blend"][:2] == longer.index_sizes["blend"]
    assert np.array_equal(texts(longer), texts(again, len(longer)))


def test_in_an_appended_segment_each_source_goes_on():
    first = build(num_samples=60)
    longer = build(num_samples=300, defined_sizes=first.index_sizes)
    places: dict[int, list[int]] = {}
    for i in range(len(longer)):
        source, place = longer.locate(i)
        places.setdefault(source, []).append(place)
    assert all(drawn == list(range(len(drawn))) for drawn in places.values())


def test_a_shorter_run_keeps_the_order():
    first = build(num_samples=100)
    shorter = build(num_samples=5, defined_sizes=first.index_sizes)
    assert shorter.index_sizes == first.index_sizes and np.array_equal(texts(first), texts(shorter))


def test_a_source_keeps_its_sizes_when_the_surplus_changes():
    first = build(num_samples=60)
    again = build(num_samples=60, defined_sizes=first.index_sizes, surplus=3.0)
    assert again.index_sizes == first.index_sizes and np.array_equal(texts(first), texts(again))


@pytest.mark.parametrize(
    "wrong",
    [
        {"blend": [60], "sources": [[1], [1], 5]},
        {"blend": [0], "sources": [[1]] * 3},
        {"blend": [60, None], "sources": [[1]] * 3},
        {"blend": [], "sources": [[1]] * 3},
        {"blend": [True], "sources": [[1]] * 3},
        {"sources": [[1]] * 3},
    ],
)
def test_damaged_index_sizes_are_refused(wrong):
    with pytest.raises(DataError, match=r"index sizes of the train data in the checkpoint are .* undamaged"):
        build(defined_sizes=wrong)


@pytest.mark.parametrize(
    ("stored", "now", "message"),
    [
        ([60], 3, "is a single source, this run's is a blend of 3 sources"),
        ({"blend": [60], "sources": [[1], [1]]}, 3, "is a blend of 2 sources, this run's is a blend of 3 sources"),
        ({"blend": [60], "sources": [[1], [1]]}, None, "is a blend of 2 sources, this run's is a single source"),
    ],
)
def test_sizes_of_other_data_are_not_used_and_it_is_said(caplog, stored, now, message):
    assert fitting_sizes(stored, now, "valid") is None
    assert len(caplog.records) == 1 and message in caplog.text and "new order" in caplog.text


def test_sizes_of_the_same_kind_are_used():
    assert fitting_sizes([60, 5], None, "train") == [60, 5]
    assert fitting_sizes(None, 3, "train") is None
    sizes = build().index_sizes
    assert fitting_sizes(sizes, 3, "train") is sizes


def test_the_cache_is_used_and_gives_the_same(tmp_path, monkeypatch):
    expected = texts(build())
    assert np.array_equal(expected, texts(build(cache=tmp_path)))
    names = {path.name.split("-", 1)[1] for path in tmp_path.glob("*BlendedDataset*")}
    assert names == {
        f"BlendedDataset-train-{part}" for part in ("dataset_index.npy", "dataset_sample_index.npy", "description.txt")
    }
    monkeypatch.setattr(blended, "build_blending_indices", lambda *a: pytest.fail("the cache was not used"))
    cached = build(cache=tmp_path)
    assert np.array_equal(expected, texts(cached))
    assert all(isinstance(table, np.memmap) for table in cached.tables) and len(cached.tables) == 2 + 3 * 3


@pytest.mark.parametrize("change", [{"weights": (3.0, 1.0, 2.1)}, {"num_samples": 61}, {"weights": None}])
def test_another_blend_is_another_cache_entry(tmp_path, change):
    build(cache=tmp_path, num_samples=60)
    before = len(list(tmp_path.glob("*dataset_index.npy")))
    assert np.array_equal(texts(build(cache=tmp_path, **change)), texts(build(**change)))
    assert len(list(tmp_path.glob("*dataset_index.npy"))) == before + 1


def test_damage_to_a_table_is_found(tmp_path, caplog):
    expected = texts(build(cache=tmp_path))
    (path,) = tmp_path.glob("*-dataset_index.npy")
    path.write_bytes(path.read_bytes()[:-4])
    assert np.array_equal(expected, texts(build(cache=tmp_path)))
    assert path.name in caplog.text


def test_a_pickled_blend_finds_its_tables_again(tmp_path, monkeypatch):
    from tests.unit.data.test_build import build_files  # files, as sources have to be opened anew

    blend = build_files(tmp_path, index_sizes={"train": {"blend": [20], "sources": [[30], [30]]}})
    monkeypatch.setattr(blended, "build_blending_indices", lambda *a: pytest.fail("the cache was not used"))
    copy = pickle.loads(pickle.dumps(blend))
    assert copy.index_sizes == blend.index_sizes and len(copy.index_sizes["blend"]) == 2
    for i in range(len(blend)):
        assert all(torch.equal(value, blend[i][key]) for key, value in copy[i].items())


def test_the_definition_tells_what_changes_the_order():
    base = build().definition
    assert base == build(num_samples=90).definition
    assert base != build(weights=(3.0, 1.0, 2.1)).definition
    assert base != build((40, 10, 21)).definition


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_workers_and_ranks_do_not_change_the_order_of_a_blend(workers, dp):
    blend = build(num_samples=48)
    expected = [blend.read_text(i)[:-1].tolist() for i in range(24)]
    loaders = [
        BatchLoader(blend, micro_batch_size=2, dp_rank=rank, dp_size=dp, num_workers=workers, consumed_samples=8)
        for rank in range(dp)
    ]
    drawn = []
    for _ in range(16 // (2 * dp)):
        for loader in loaders:
            batch = next(loader)
            assert batch["dataset_id"].tolist() == [tokens[0] // 1000 for tokens in batch["tokens"].tolist()]
            drawn += batch["tokens"].tolist()
    assert drawn == expected[8:]


def test_too_many_sources_are_refused():
    with pytest.raises(ConfigError, match=r"has 40000 sources, the tables number at most 32766"):
        build_blended([sources(3)[0]] * 40000, None, num_samples=5, surplus=0.0)
