"""Tokenizers that read a file: their end of document, their identity, and what is said when something is missing."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest

from megalite.config.schema import DataConfig
from megalite.data.content import check_tokenizer
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.meta import DatasetMeta
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizers import build_tokenizer, resolve_tokenizer
from megalite.utils.errors import ConfigError, DataError

TEXT = "the cat sat on the mat. the dog ate the cat's hat. \u00e9t\u00e9"


@pytest.fixture
def hf_folder(tmp_path):
    """A folder with a byte-pair tokenizer of 300 ids whose <end> has id 0."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    folder = tmp_path / "hf"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def sp_model(tmp_path):
    """A function that trains a model of sentencepiece, with or without an end piece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join([TEXT] * 20))

    def train(name="m", **options):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text.txt"),
            model_prefix=str(tmp_path / name),
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        return tmp_path / f"{name}.model"

    return train


def hf(model, eod="<end>"):
    return build_tokenizer("HFTokenizer", model=model, eod=eod)


def sp(model, eod=None):
    return build_tokenizer("SentencePieceTokenizer", model=model, eod=eod)


def test_hf_text_there_and_back(hf_folder):
    tokenizer = hf(hf_folder)
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int64 and len(ids) < len(TEXT.encode()) and tokenizer.decode([*ids, tokenizer.eod]) == TEXT
    assert (tokenizer.name, tokenizer.eod) == ("HFTokenizer", 0)
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    assert tokenizer.vocab_size == library.get_vocab_size() and ids.tolist() == library.encode(TEXT).ids
    # The file itself may be named as well as its folder.
    assert hf(hf_folder / "tokenizer.json").describe() == tokenizer.describe()


@pytest.mark.parametrize("token", ["<end>", {"content": "<end>", "lstrip": False}])
def test_tok_04_the_end_is_the_tokenizers_own(hf_folder, token):
    """TOK-04: the token that the tokenizer's settings name, not one that is usual elsewhere."""
    (hf_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    tokenizer = hf(hf_folder, eod=None)
    assert tokenizer.eod == 0
    assert tokenizer.asset_files() == [hf_folder / "tokenizer.json", hf_folder / "tokenizer_config.json"]
    assert hf(hf_folder, eod="a").eod == tokenizer.encode("a")[0]


def test_tok_03_without_an_end_it_stops_before_work_starts(hf_folder, sp_model, tmp_path):
    """TOK-03: a tokenizer that names no end of document, and --append-eod."""
    model = sp_model(eos_id=-1)
    for kind, path in (("HFTokenizer", hf_folder), ("SentencePieceTokenizer", model)):
        options = {"tokenizer_type": kind, "tokenizer_model": path, "output_prefix": tmp_path / "out"}
        with pytest.raises(ConfigError, match=r"Set data\.tokenizer_eod \(--tokenizer-eod"):
            preprocess(PreprocessOptions(inputs=(tmp_path / "text.txt",), **options))
        assert list(tmp_path.glob("out*")) == []
        with pytest.raises(ConfigError, match="'<nothing>' is to end documents, but .* has no token of that text"):
            build_tokenizer(kind, model=path, eod="<nothing>")


def test_sentencepiece_text_there_and_back(sp_model):
    model = sp_model()
    tokenizer = sp(model)
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(model))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("SentencePieceTokenizer", library.vocab_size(), 2)
    ids = tokenizer.encode("the cat sat")
    assert ids.dtype == np.int64 and tokenizer.decode([*ids, tokenizer.eod]) == "the cat sat"
    assert sp(model, eod="<s>").eod == 1
    assert tokenizer.asset_files() == [model]


def test_tok_04_data_knows_the_file_of_its_tokenizer(hf_folder, tmp_path):
    """TOK-04: the tokenizer is stored beside the data and compared at the start of a run."""
    (tmp_path / "a.txt").write_text(TEXT)
    options = {"tokenizer_type": "HFTokenizer", "tokenizer_model": hf_folder, "tokenizer_eod": "<end>"}
    preprocess(PreprocessOptions(inputs=(tmp_path / "a.txt",), output_prefix=tmp_path / "out", **options))
    data = IndexedDataset(tmp_path / "out")
    tokenizer, meta = hf(hf_folder), data.meta()
    assert data.get(0).tolist() == [*tokenizer.encode(TEXT), 0]
    expected = hashlib.sha256((hf_folder / "tokenizer.json").read_bytes()).hexdigest()
    assert meta.tokenizer_sha256 == tokenizer.describe()["sha256"] == expected
    check_tokenizer(meta, tokenizer, tmp_path / "out.meta.json")
    changed = json.loads((hf_folder / "tokenizer.json").read_text())
    (hf_folder / "tokenizer.json").write_text(json.dumps(changed, indent=1))
    with pytest.raises(DataError, match=rf"made with a tokenizer file with sha256 {expected}, the HFTokenizer of this"):
        check_tokenizer(meta, hf(hf_folder), tmp_path / "out.meta.json")
    with pytest.raises(DataError, match=r"documents end with token 0, HFTokenizer of this run ends them with"):
        check_tokenizer(meta, hf(hf_folder, eod="a"), tmp_path / "out.meta.json")


def test_tok_04_data_of_another_vocabulary_is_refused(tmp_path):
    """TOK-04: the same name and end, another size."""
    meta = DatasetMeta(5, 10, "ByteTokenizer", 300, 256)
    with pytest.raises(DataError, match="made with a vocabulary of 300, the ByteTokenizer of this run has 257"):
        check_tokenizer(meta, build_tokenizer("ByteTokenizer"), tmp_path)


def test_workers_encode_as_one_process_does(hf_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(50)))
    options = {"tokenizer_type": "HFTokenizer", "tokenizer_model": hf_folder, "tokenizer_eod": "<end>"}
    for workers in (1, 2):
        prefix = tmp_path / f"out{workers}"
        preprocess(PreprocessOptions(inputs=(tmp_path / "a.jsonl",), output_prefix=prefix, workers=workers, **options))
    assert (tmp_path / "out1.bin").read_bytes() == (tmp_path / "out2.bin").read_bytes()


@pytest.mark.parametrize(
    ("kind", "package"), [("HFTokenizer", "tokenizers"), ("SentencePieceTokenizer", "sentencepiece")]
)
def test_files_that_cannot_be_used_are_named(tmp_path, kind, package):
    with pytest.raises(DataError, match=r"tokenizer file .*none cannot be read: No such file"):
        build_tokenizer(kind, model=tmp_path / "none")
    pytest.importorskip(package)
    (tmp_path / "bad").write_bytes(b"{}")
    with pytest.raises(DataError, match=r"bad is not a "):
        build_tokenizer(kind, model=tmp_path / "bad", eod="x")


def test_settings_that_are_no_json_are_named(hf_folder):
    (hf_folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not a JSON object"):
        hf(hf_folder, eod=None)


@pytest.mark.parametrize(
    ("kind", "package"), [("HFTokenizer", "tokenizers"), ("SentencePieceTokenizer", "sentencepiece")]
)
def test_a_package_that_is_not_installed_is_one_error_with_the_command(tmp_path, monkeypatch, kind, package):
    (tmp_path / "model").write_bytes(b"{}")
    # None makes the import fail as if the package were not there.
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{kind} needs the package {package}.*pip install 'megalite\[tokenizers\]'"):
        build_tokenizer(kind, model=tmp_path / "model")
    with pytest.raises(ConfigError, match="reads a file, but none is given"):
        build_tokenizer(kind)


def test_the_run_takes_its_ids_from_the_model_or_the_tokenizer(hf_folder):
    assert resolve_tokenizer(DataConfig(mock_data=True), None)[1] == 257
    assert resolve_tokenizer(DataConfig(mock_data=True), 300)[1] == 300
    tokenizer, ids = resolve_tokenizer(DataConfig(mock_data=True, tokenizer_type="NullTokenizer"), 100)
    assert (ids, tokenizer.vocab_size, tokenizer.eod) == (100, 100, 99)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 200, fewer than the 257 ids of ByteTokenizer"):
        resolve_tokenizer(DataConfig(mock_data=True), 200)
    files = {"tokenizer_type": "HFTokenizer", "tokenizer_model": hf_folder, "tokenizer_eod": "<end>"}
    assert resolve_tokenizer(DataConfig(mock_data=True, **files), None)[1] == hf(hf_folder).vocab_size
