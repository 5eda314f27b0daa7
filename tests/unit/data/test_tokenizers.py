"""Text to ids and back."""

from __future__ import annotations

import pytest

from megalite.data.tokenizers import ByteTokenizer, build_tokenizer
from megalite.utils.errors import ConfigError, DataError


def test_bytes_there_and_back():
    tokenizer = build_tokenizer("ByteTokenizer")
    text = "a\r\n\u00e9\u4e2d\U0001f600"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode()) and tokenizer.decode(ids) == text
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("ByteTokenizer", 257, 256)
    assert tokenizer.decode([104, 105, ByteTokenizer.eod]) == "hi"
    assert tokenizer.decode([0xE4, 0xB8]) == "\ufffd"


def test_null_tokenizer_reads_numbers():
    tokenizer = build_tokenizer("NullTokenizer", 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 1 99\n3 ").tolist() == [1, 99, 3]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([1, 2]) == "1 2"


@pytest.mark.parametrize("text, message", [("1 x", "'x' is not"), ("101", "id 101 is outside"), ("-1", "id -1 is")])
def test_null_tokenizer_names_what_is_not_an_id(text, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer("NullTokenizer", 100).encode(text)
    with pytest.raises(DataError):
        build_tokenizer("NullTokenizer", 100).encode("9" * 30)


@pytest.mark.parametrize("arguments", [("NullTokenizer",), ("NullTokenizer", 0), ("Other",)])
def test_unknown_or_incomplete_types_are_refused(arguments):
    with pytest.raises(ConfigError):
        build_tokenizer(*arguments)


def test_tokenizers_without_files_describe_themselves():
    expected = {"name": "NullTokenizer", "vocab_size": 101, "eod": 100, "sha256": None}
    assert build_tokenizer("NullTokenizer", 100).describe() == expected
    assert build_tokenizer("ByteTokenizer").describe()["eod"] == 256
    assert build_tokenizer("ByteTokenizer").asset_files() == []
