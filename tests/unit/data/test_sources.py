"""From settings to what each set reads."""

from __future__ import annotations

import json

import pytest

from megalite.config.blend import Blend
from megalite.config.schema import DataConfig
from megalite.data.sources import resolve_sources, split_of, validation_set_names
from megalite.utils.errors import ConfigError


def test_a_shared_path_is_cut_by_split():
    sources = resolve_sources(DataConfig(data_path=["1", "a", "2", "b"]))
    assert sources.split == "969,30,1"
    assert sources.blends == dict.fromkeys(("train", "valid", "test"), Blend(("a", "b"), (1.0, 2.0)))
    assert resolve_sources(DataConfig(data_path=["a"], split="1,1")).split == "1,1"


def test_entries_of_a_file_are_separated_by_white_space(tmp_path):
    (tmp_path / "f").write_text("1 a\n\t2   b\n")
    assert resolve_sources(DataConfig(data_args_path=tmp_path / "f")).blends["train"] == Blend(("a", "b"), (1.0, 2.0))


def test_paths_per_split_are_not_cut():
    sources = resolve_sources(DataConfig(train_data_path=["2", "a", "1", "b"], test_data_path=["5", "c"]))
    # A single source is no blend there, whether it has a weight or not.
    assert sources.split is None
    assert sources.blends == {"train": Blend(("a", "b"), (2.0, 1.0)), "test": Blend(("c",))}


def test_a_json_file_says_the_same_as_the_settings(tmp_path):
    lists = {"train": ["0.3", "a", 0.7, "b"], "valid": ["c", "d"], "test": None}
    (tmp_path / "f.json").write_text(json.dumps(lists))
    sources = resolve_sources(DataConfig(per_split_data_args_path=tmp_path / "f.json"))
    assert sources.blends == {"train": Blend(("a", "b"), (0.3, 0.7)), "valid": Blend(("c", "d"))}
    several = DataConfig(per_split_data_args_path=tmp_path / "f.json", multiple_validation_sets=True)
    assert list(resolve_sources(several).blends) == ["train", "valid/c", "valid/d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list, not lists named"),
        ('{"valid": ["a"]}', r"holds \['valid'\], not lists named 'train'"),
        ('{"train": ["a"], "eval": ["b"]}', r"holds \['eval', 'train'\]"),
        ('{"train": "a b"}', "'train' is a b, not a list"),
        ('{"train": [true, "a"]}', "not a list of texts and numbers"),
        ('{"train": []}', "'train' is an empty list"),
        ('{"train": ["1", "a", "x", "b"]}', "stand where weights are expected"),
    ],
)
def test_a_json_file_of_another_form_is_refused(tmp_path, text, message):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_sources(DataConfig(per_split_data_args_path=tmp_path / "f.json"))
    assert str(tmp_path / "f.json") in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize("key", ["data_args_path", "per_split_data_args_path"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"data\.{key} .*none cannot be read: No such file"):
        resolve_sources(DataConfig(**{key: tmp_path / "none"}))
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="latin cannot be read: it is not UTF-8"):
        resolve_sources(DataConfig(**{key: tmp_path / "latin"}))


def test_an_empty_file_of_entries_is_refused(tmp_path):
    (tmp_path / "f").write_text("\n")
    with pytest.raises(ConfigError, match=r"data\.data_args_path .*f is an empty list"):
        resolve_sources(DataConfig(data_args_path=tmp_path / "f"))


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["data/wiki", "data/code"], ["wiki", "code"]),
        (["data/wiki/valid", "data/code/valid"], ["wiki/valid", "code/valid"]),
        (["/x/a", "/y/a", "b"], ["x/a", "y/a", "b"]),
        (["only"], ["only"]),
    ],
)
def test_validation_sets_are_named_by_the_end_of_their_prefix(prefixes, names):
    assert validation_set_names(prefixes) == names


def test_validation_sets_have_no_weights_and_are_different():
    options = {"train_data_path": ["a"], "multiple_validation_sets": True}
    with pytest.raises(ConfigError, match=r"data\.valid_data_path has weights \[1\.0, 2\.0\].*leave the weights out"):
        resolve_sources(DataConfig(valid_data_path=["1", "a", "2", "b"], **options))
    with pytest.raises(ConfigError, match=r"names x/a twice.*; remove one"):
        resolve_sources(DataConfig(valid_data_path=["x/a", "x//a"], **options))
    assert list(resolve_sources(DataConfig(valid_data_path=["x/a"], **options)).blends) == ["train", "valid/a"]


def test_a_set_belongs_to_a_split():
    assert [split_of(name) for name in ("train", "valid/wiki/a")] == ["train", "valid"]
