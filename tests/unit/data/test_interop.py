"""The same bytes, tables and samples as megatron-core, where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.config.schema import DataConfig
from megalite.data.blend_indices import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    normalize,
)
from megalite.data.build import build_datasets
from megalite.data.gpt_dataset import GPTDataset, SampleFields, split_ranges
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megalite.data.mock import MockTokens
from megalite.data.tokenizers import ByteTokenizer

pytestmark = pytest.mark.interop

EOD = 256
CASES = 24


class _Tokenizer:
    vocab_size, eod, pad = 257, EOD, -1
    bos = cls = sep = mask = None
    unique_identifiers = {"class": "test"}


@pytest.fixture
def mcore(monkeypatch):
    """The part of megatron-core that makes datasets. Its blends ask for a rank also where there is none."""
    datasets = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *a: 0)
    return datasets


def config_of(mcore, **options):
    settings = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": True,
        "create_attention_mask": False,
        "tokenizer": _Tokenizer(),
    }
    return mcore.GPTDatasetConfig(**{**settings, **options})


def write(prefix, random, documents=None):
    """Write a random corpus with our writer; return it as megatron-core's class and as ours."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents or random.randint(5, 60)):
            writer.add_document([*random.randint(0, 256, random.randint(0, 40)), EOD])
        writer.finalize()
    return Theirs(str(prefix)), IndexedDataset(prefix)


def assert_equal_samples(ours, theirs):
    assert len(ours) == len(theirs)
    for i in range(0, len(ours), max(1, len(ours) // 20)):
        sample, expected = ours[i], theirs[i]
        for key in expected:
            assert np.array_equal(np.asarray(sample[key]), np.asarray(expected[key])), (i, key)


def test_files_are_equal(mcore, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.RandomState(0)
    for case in range(CASES):
        documents = [random.randint(0, 257, random.randint(0, 40)) for _ in range(random.randint(1, 50))]
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
        with IndexedDatasetWriter(tmp_path / "ours", np.uint16) as writer:
            for document in documents:
                builder.add_document(torch.tensor(document), [len(document)])
                writer.add_document(document)
            writer.finalize()
        builder.finalize(str(tmp_path / "theirs.idx"))
        for suffix in ("bin", "idx"):
            theirs, ours = (tmp_path / f"{name}.{suffix}" for name in ("theirs", "ours"))
            assert theirs.read_bytes() == ours.read_bytes(), case


def test_tables_and_samples_are_equal(mcore, tmp_path):
    from megatron.core.datasets.utils import Split

    random = np.random.RandomState(1)
    seen = set()
    for case in range(2 * CASES):
        low, indexed = write(tmp_path / f"c{case}", random)
        sequences = np.arange(random.randint(0, 4), len(indexed), dtype=np.int32)
        seq_length = int(random.randint(2, 25))
        per_epoch = int(indexed.sequence_lengths[sequences].sum() - 1) // seq_length
        if per_epoch < 1:
            continue
        wanted = [None, 1, per_epoch, 3 * per_epoch, int(2.4 * per_epoch) + 1, random.randint(1, 9 * per_epoch)][
            case % 6
        ]
        wanted = None if wanted is None else int(wanted)
        config = config_of(mcore, random_seed=case + 1, sequence_length=seq_length, split="1,0,0", blend=(["x"], None))
        theirs = mcore.GPTDataset(low, str(tmp_path / f"c{case}"), sequences, wanted, Split.train, config)
        options = {"num_samples": wanted, "seq_length": seq_length, "seed": case + 1}
        ours = GPTDataset(indexed, sequences, fields=SampleFields(EOD, eod_mask_loss=True), **options)
        document_index, sample_index, shuffle_index = ours.tables
        for table, expected in (
            (document_index, theirs.document_index),
            (sample_index, theirs.sample_index),
            (shuffle_index, theirs.shuffle_index),
        ):
            assert table.dtype == expected.dtype and np.array_equal(table, expected), case
        assert_equal_samples(ours, theirs)
        seen.add(case)
    assert len(seen) >= 20


def test_blend_tables_are_equal(mcore):
    from megatron.core.datasets import helpers_cpp

    random = np.random.RandomState(2)
    for case in range(2 * CASES):
        spread = [0.1, 1.0, 4.0, 8.0][case % 4]
        weights = normalize(10.0 ** -random.uniform(0, spread, random.randint(1, 40)))
        size = int(10 ** random.uniform(0, 5))
        source, place = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers_cpp.build_blending_indices(source, place, weights, len(weights), size, False)
        ours = build_blending_indices(weights, size)
        assert np.array_equal(ours.dataset_index, source), case
        assert np.array_equal(ours.dataset_sample_index, place), case
        sizes = random.randint(1, [3, 50, 4000][case % 3], random.randint(1, 12))
        source, place = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
        helpers_cpp.build_exhaustive_blending_indices(source, place, sizes.astype(np.int64), len(sizes))
        ours = build_exhaustive_blending_indices(sizes.tolist())
        assert np.array_equal(ours.dataset_index, source), case
        assert np.array_equal(ours.dataset_sample_index, place), case


@pytest.mark.parametrize("per_split", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_blends_are_equal_from_the_settings_to_the_samples(mcore, tmp_path, per_split, has_weights):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.utils import get_blend_from_list

    random = np.random.RandomState(3 + per_split + 2 * has_weights)
    for case in range(CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        count = random.randint(2, 5)
        prefixes = [str(folder / f"p{number}") for number in range(count)]
        for prefix in prefixes:
            write(prefix, random, documents=random.randint(60, 120))
        weights = [repr(float(weight)) for weight in random.uniform(0.05, 5, count)]
        entries = [text for pair in zip(weights, prefixes, strict=True) for text in pair] if has_weights else prefixes
        if not has_weights and count % 2 == 0:
            assert get_blend_from_list(entries)[1] is None
        # Without weights Megatron gives no more than an epoch, and here one is not exceeded either.
        counts = [int(random.randint(1, 400 if has_weights else 12)) for _ in range(3)]
        options = {"random_seed": case + 1, "sequence_length": 16, "path_to_cache": str(folder / "theirs")}
        surplus = float(random.choice([0.005, 0.1, 0.5]))
        options["mid_level_dataset_surplus"] = surplus
        if per_split:
            lists = [entries, prefixes[:1], entries[::-1] if not has_weights else entries]
            options["blend_per_split"] = [get_blend_from_list(listed) for listed in lists]
            ours_of = dict(zip(("train_data_path", "valid_data_path", "test_data_path"), lists, strict=True))
        else:
            options |= {"blend": get_blend_from_list(entries), "split": "80,10,10"}
            ours_of = {"data_path": entries, "split": "80,10,10"}
        theirs = BlendedMegatronDatasetBuilder(
            mcore.GPTDataset, counts, lambda: True, config_of(mcore, **options)
        ).build()
        data = DataConfig(
            **ours_of, mid_level_dataset_surplus=surplus, data_cache_path=folder / "ours", eod_mask_loss=True
        )
        ours = build_datasets(
            data,
            num_samples=dict(zip(("train", "valid", "test"), counts, strict=True)),
            seq_length=16,
            seed=case + 1,
            tokenizer=ByteTokenizer(),
        )
        for dataset, expected in zip(ours.by_name.values(), theirs, strict=True):
            assert_equal_samples(dataset, expected)
            if hasattr(expected, "dataset_index"):
                assert np.array_equal(dataset.tables[0], expected.dataset_index), case
                assert np.array_equal(dataset.tables[1], expected.dataset_sample_index), case


def test_ends_of_documents_do_the_same(mcore, tmp_path):
    from megatron.core.datasets.utils import Split

    random = np.random.RandomState(4)
    for case in range(CASES):
        low, indexed = write(tmp_path / f"c{case}", random, documents=40)
        on = {
            name: bool(random.rand() < 0.7) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        }
        config = config_of(
            mcore,
            random_seed=1,
            sequence_length=20,
            split="1,0,0",
            blend=(["x"], None),
            **{**on, "create_attention_mask": True},
        )
        theirs = mcore.GPTDataset(
            low, str(tmp_path / f"c{case}"), np.arange(40, dtype=np.int32), 30, Split.train, config
        )
        ours = GPTDataset(
            indexed, range(40), num_samples=30, seq_length=20, seed=1, fields=SampleFields(eod_id=EOD, **on)
        )
        for i in range(0, len(ours), 3):
            sample, expected = ours[i], theirs[i]
            ids = sample.get("document_ids", torch.zeros(20))
            visible = torch.ones(20, 20).tril().bool() & (ids[:, None] == ids[None, :])
            assert torch.equal(~visible, expected["attention_mask"][0])
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(sample[key], expected[key]), (case, key)


def test_splits_are_equal(mcore):
    from megatron.core.datasets import blended_megatron_dataset_config as config

    random = np.random.RandomState(5)
    splits = ["969, 30, 1", "1,1,1", "0.7,0,0.3", "98,2"]
    splits += [",".join(f"{weight:.3g}" for weight in random.uniform(0.01, 1000, 3)) for _ in range(CASES)]
    for split in splits:
        matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
        for count in (1, 5, 50, 999, 10**9 + 7):
            expected = [None if row is None else tuple(round(edge * float(count)) for edge in row) for row in matrix]
            for row, ours in zip(expected, split_ranges(split, count), strict=True):
                assert len(ours) == 0 if row is None else row == (ours.start, ours.stop), (split, count)


def test_mock_data_is_equal(mcore):
    low, ours = mcore.MockGPTLowLevelDataset(_Tokenizer()), MockTokens(257, EOD)
    assert np.array_equal(low.sequence_lengths, ours.sequence_lengths)
    assert all(np.array_equal(low.get(i), ours.get(i)) for i in range(0, 1000, 37))
