"""Situations of public reports that the data layer meets alone; each test bears the id of its report.

Trainers meet them in tests/distributed/test_field_reports.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megalite.config.schema import DataConfig
from megalite.data.build import build_datasets
from megalite.data.index_cache import load_array
from megalite.data.indexed_dataset import IndexedDatasetWriter
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.samplers import BatchLoader
from megalite.data.tokenizers import NullTokenizer, build_tokenizer
from megalite.utils.errors import ConfigError, DataError

SEQ_LENGTH = 5


def write(prefix: Path, first: int, documents: int = 8) -> str:
    """Write documents in which no token comes twice, so that a sample is known by its tokens."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            writer.add_document(np.arange(first + 10 * number, first + 10 * number + 10))
        writer.finalize()
    return str(prefix)


@pytest.fixture(params=["single", "blend"])
def paths(request, tmp_path):
    single = [write(tmp_path / "a", 0)]
    return single if request.param == "single" else ["0.3", *single, "0.7", write(tmp_path / "b", 100)]


def dataset_of(paths, num_samples=48, index_sizes=None, cache=None):
    """Return training data of three epochs and more."""
    data = DataConfig(data_path=paths, split="1", data_cache_path=cache)
    return build_datasets(
        data,
        num_samples={"train": num_samples},
        seq_length=SEQ_LENGTH,
        seed=7,
        tokenizer=NullTokenizer(300),
        index_sizes=index_sizes,
    ).train


def drawn(dataset, start, steps, micro=2, dp=1, workers=0):
    """Return the tokens of each global batch of 12 samples; each sample is drawn once, in order."""
    loaders = [
        BatchLoader(
            dataset, micro_batch_size=micro, dp_rank=rank, dp_size=dp, num_workers=workers, consumed_samples=start
        )
        for rank in range(dp)
    ]
    batches = []
    for step in range(steps):
        tokens, ordinals = [], []
        for _ in range(12 // (micro * dp)):
            for loader in loaders:
                batch = next(loader)
                tokens += batch["tokens"].tolist()
                ordinals += batch["sample_ordinals"].tolist()
        assert ordinals == list(range(start + 12 * step, start + 12 * step + 12))
        batches.append(tokens)
    return batches


@pytest.mark.parametrize("stop", [12, 24, 36])
def test_dat_01_03_04_16_a_resumed_loader_goes_on(paths, stop):
    """DAT-01, DAT-03, DAT-04, DAT-16: stopped in the middle and near the end of an epoch; later epochs are whole."""
    unbroken = dataset_of(paths)
    again = dataset_of(paths, index_sizes={"train": unbroken.index_sizes})
    assert drawn(again, stop, 4 - stop // 12) == drawn(unbroken, 0, 4)[stop // 12 :]


def test_dat_04_epochs_have_orders_of_their_own(paths):
    """DAT-04."""
    dataset = dataset_of(paths)
    first = (dataset if len(paths) == 1 else dataset.datasets[0]).tables[0]
    assert not np.array_equal(first[:8], first[8:16])


def test_dat_09_ranks_change_epoch_together(paths):
    """DAT-09: micro-batch 2, DP 3, epochs that they do not divide; no sample twice, and the end at the same step."""
    dataset = dataset_of(paths)
    assert drawn(dataset, 0, 4, dp=3) == drawn(dataset, 0, 4)
    for rank in range(3):
        last = BatchLoader(dataset, micro_batch_size=2, dp_rank=rank, dp_size=3, consumed_samples=len(dataset) - 5)
        with pytest.raises(DataError, match=f"has {len(dataset)} samples"):
            next(last)


@pytest.mark.parametrize(("micro", "dp", "workers"), [(1, 2, 0), (3, 4, 0), (2, 2, 2), (12, 1, 1)])
def test_dat_10_18_order_depends_on_neither_ranks_nor_workers(paths, micro, dp, workers):
    """DAT-10, DAT-18: the same global batches, and micro-batches that differ from each other."""
    dataset = dataset_of(paths)
    assert drawn(dataset, 0, 3, micro, dp, workers) == drawn(dataset, 0, 3)
    # Less than an epoch, in which no token comes twice.
    (batch,) = drawn(dataset_of(paths, num_samples=12), 0, 1, micro, dp, workers)
    assert len({tuple(tokens) for tokens in batch}) == 12


def test_iof_09_ranks_with_caches_of_their_own_have_one_order(paths, tmp_path):
    """IOF-09: nothing is expected of another rank's folder."""
    one, two = (dataset_of(paths, cache=tmp_path / name) for name in ("node0", "node1"))
    assert all(np.array_equal(one.read_text(i), two.read_text(i)) for i in range(len(one)))
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("node0", "node1")]
    assert names[0] == names[1] and len(names[0]) > 0


def _read_all(paths, cache, barrier, results):
    barrier.wait(30)
    dataset = dataset_of(paths, cache=cache)
    results.put([dataset.read_text(i).tolist() for i in range(len(dataset))])


def test_iof_10_jobs_that_start_at_once_share_a_cache(paths, tmp_path):
    """IOF-10: several processes and an empty folder."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    arguments = (paths, tmp_path / "cache", barrier, results)
    jobs = [context.Process(target=_read_all, args=arguments) for _ in range(4)]
    for job in jobs:
        job.start()
    read = [results.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join(30)
    expected = dataset_of(paths)
    assert all(each == [expected.read_text(i).tolist() for i in range(len(expected))] for each in read)
    assert not list((tmp_path / "cache").glob(".*"))


def test_tok_01_an_empty_first_document(tmp_path):
    """TOK-01: empty, white space, a line without the field, then text."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " \\n"}\n{"other": 1}\n{"text": "x"}\n')
    options = PreprocessOptions(inputs=(tmp_path / "a.jsonl",), output_prefix=tmp_path / "o", skip_bad_lines=True)
    counts = preprocess(options)
    assert (counts.documents, counts.empty_documents, counts.bad_lines) == (1, 2, 1)


class _Library:
    """What is used of tokenizers and of sentencepiece, without an end of document."""

    def get_vocab(self, **options):
        return {"a": 0}

    def vocab_size(self):
        return 1

    def eos_id(self):
        return -1

    def token_to_id(self, text):
        return {"a": 0}.get(text)

    def LoadFromSerializedProto(self, content):
        return True

    def piece_to_id(self, text):
        return 0

    def id_to_piece(self, number):
        return "a"


@pytest.mark.parametrize(
    ("kind", "package"), [("HFTokenizer", "tokenizers"), ("SentencePieceTokenizer", "sentencepiece")]
)
def test_tok_03_04_an_end_of_document_is_never_assumed(tmp_path, monkeypatch, kind, package):
    """TOK-03, TOK-04: no end token in the files is an error with the remedy; the one that is given is used."""
    library = SimpleNamespace(
        Tokenizer=SimpleNamespace(from_file=lambda path: _Library()), SentencePieceProcessor=_Library
    )
    monkeypatch.setitem(sys.modules, package, library)
    (tmp_path / "model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Set data\.tokenizer_eod \(--tokenizer-eod"):
        build_tokenizer(kind, model=tmp_path / "model")
    with pytest.raises(ConfigError, match="no token of that text"):
        build_tokenizer(kind, model=tmp_path / "model", eod="</s>")
    assert build_tokenizer(kind, model=tmp_path / "model", eod="a").eod == 0


def test_tok_15_paths_of_blends_and_lists_may_have_any_characters(tmp_path):
    """TOK-15: data, cache and list of entries."""
    folder = tmp_path / "b c%20 \u4e2d'\""
    folder.mkdir()
    prefixes = [write(folder / f"{name} x", 0) for name in "ab"]
    dataset = dataset_of(["1", prefixes[0], "2", prefixes[1]], cache=folder / "k%")
    assert len(dataset) >= 48 and (folder / "k%").is_dir()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return (os.open, (self.path, os.O_CREAT))


def test_sec_03_pickled_objects_in_the_index_cache_are_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC-03: a table of the cache that holds objects is named, not loaded, and built again."""
    array = np.array([_Touch(tmp_path / "touched")], dtype=object)
    np.save(tmp_path / "table.npy", array, allow_pickle=True)
    assert load_array(tmp_path / "table.npy", (1,), np.dtype(np.int64)) is None
    assert "is damaged and is built again" in caplog.text and not (tmp_path / "touched").exists()
    assert np.load(tmp_path / "table.npy", allow_pickle=True) is not None and (tmp_path / "touched").exists()
