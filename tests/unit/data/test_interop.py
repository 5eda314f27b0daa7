"""The same bytes and the same samples as megatron-core, where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.data.gpt_dataset import GPTDataset, split_ranges
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megalite.data.mock import MockTokens

pytestmark = pytest.mark.interop


class _Tokenizer:
    vocab_size, eod, pad = 257, 256, -1
    bos = cls = sep = mask = None
    unique_identifiers = {"class": "test"}


def test_files_and_samples_equal_megatrons(tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.utils import Split

    random = np.random.RandomState(0)
    for case, wanted in enumerate((None, 1, 30, 100, 333, 900)):
        theirs, ours = tmp_path / f"theirs{case}", tmp_path / f"ours{case}"
        documents = [random.randint(0, 257, random.randint(0, 40)) for _ in range(50)]
        builder = indexed_dataset.IndexedDatasetBuilder(f"{theirs}.bin", dtype=np.uint16)
        with IndexedDatasetWriter(ours, np.uint16) as writer:
            for document in documents:
                builder.add_document(torch.tensor(document), [len(document)])
                writer.add_document(document)
            writer.finalize()
        builder.finalize(f"{theirs}.idx")
        for suffix in ("bin", "idx"):
            assert (tmp_path / f"theirs{case}.{suffix}").read_bytes() == (
                tmp_path / f"ours{case}.{suffix}"
            ).read_bytes()
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=case,
            sequence_length=12,
            split="1,0,0",
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=True,
            create_attention_mask=False,
            blend=([str(theirs)], None),
        )
        low = indexed_dataset.IndexedDataset(str(theirs))
        indices = np.arange(50, dtype=np.int32)
        megatron = gpt_dataset.GPTDataset(low, str(theirs), indices, wanted, Split.train, config)
        options = {"num_samples": wanted, "seq_length": 12, "seed": case, "eod_id": 256, "eod_mask_loss": True}
        dataset = GPTDataset(IndexedDataset(ours), range(50), **options)
        assert len(dataset) == len(megatron)
        for i in range(0, len(dataset), 7):
            sample, expected = dataset[i], megatron[i]
            assert all(torch.equal(sample[key], expected[key]) for key in sample), (case, i)


def test_splits_and_mock_data_equal_megatrons():
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    for split in ("969, 30, 1", "1,1,1", "0.7,0,0.3", "98,2"):
        matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
        for count in (1, 5, 50, 999, 10**9 + 7):
            expected = [None if row is None else tuple(round(edge * float(count)) for edge in row) for row in matrix]
            for row, ours in zip(expected, split_ranges(split, count), strict=True):
                assert len(ours) == 0 if row is None else row == (ours.start, ours.stop)
    low, ours = gpt_dataset.MockGPTLowLevelDataset(_Tokenizer()), MockTokens(257, 256)
    assert np.array_equal(low.sequence_lengths, ours.sequence_lengths)
    assert all(np.array_equal(low.get(i), ours.get(i)) for i in range(0, 1000, 37))
