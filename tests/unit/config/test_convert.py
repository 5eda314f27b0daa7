from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from megalite.config.convert import convert
from megalite.config.yaml_reader import PlainText, Setting
from megalite.utils.errors import ConfigError

Style = Literal["linear", "WSD"]


def read(value, declared):
    return convert(Setting(value, "run.yaml:7"), declared, "section.key")


@pytest.mark.parametrize(
    ("value", "declared", "expected"),
    [
        *((word, bool, True) for word in ("true", "True", "YES", "on", "1", True)),
        *((word, bool, False) for word in ("false", "FALSE", "No", "off", "0", False)),
        ("12", int, 12),
        ("-3", int, -3),
        ("1_000", int, 1000),
        ("1.0", int, 1),
        ("1e3", int, 1000),
        ("1.5e1", int, 15),
        (2.0, int, 2),
        ("9223372036854775807", int, 2**63 - 1),
        ("3e-4", float, 3e-4),
        ("1E4", float, 1e4),
        (".5", float, 0.5),
        ("5.", float, 5.0),
        ("7", float, 7.0),
        (3, float, 3.0),
        ("no", str, "no"),
        ("10:30", str, "10:30"),
        ("3e-4", str, "3e-4"),
        ("runs/a", Path, Path("runs/a")),
        ("WSD", Style, "WSD"),
        ("a,b", list[str], ["a", "b"]),
        ("0, 2", list[int], [0, 2]),
        (PlainText("[0, 2]"), list[int], [0, 2]),
        (PlainText("3"), list[int], [3]),
        ([PlainText("0"), "2"], list[int], [0, 2]),
        (["a,b"], list[str], ["a,b"]),
    ],
)
def test_value_takes_the_declared_type(value, declared, expected):
    """CFG-13."""
    result = read(value, declared)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        *((text, int) for text in ("10:30", "0x10", "010", "-07", "1.5", "1__0", "true", "", "1e-3", "1e999999999")),
        *((value, int) for value in (True, 1.5, "9223372036854775808", "9" * 5000, [1], "\u0663", float("inf"))),
        *((text, float) for text in ("inf", "-.inf", "nan", ".NaN", "1e400", "0x1p3", "1,5", "ten", "")),
        *((value, float) for value in (True, float("nan"), 10**400, [1.0])),
        *((value, bool) for value in ("y", "2", "", "truee", 1, 1.0)),
        *((value, str) for value in (3, True, ["a"], {})),
        *((value, Path) for value in (3, "", ["a"], PlainText("off"), PlainText("No"), PlainText("false"))),
        *((value, Style) for value in ("wsd", "cubic", 3)),
        *((value, list[int]) for value in ("0,,1", "a", "1.5", [[1]], 3, PlainText("[0"), PlainText("{}"))),
        ([PlainText("null")], list[str]),
    ],
)
def test_value_that_does_not_fit_is_refused(value, declared):
    with pytest.raises(ConfigError, match=r"^run\.yaml:7: "):
        read(value, declared)


@pytest.mark.parametrize("text", ["null", "Null", "NULL", "~", ""])
@pytest.mark.parametrize("declared", [int, float, bool, str, Path, Style, list[int]])
def test_null_is_none_where_the_type_allows_it(text, declared):
    assert read(PlainText(text), declared | None) is None
    with pytest.raises(ConfigError, match="cannot be left empty"):
        read(PlainText(text), declared)


def test_quoted_null_is_text():
    assert read("null", str | None) == "null"
    assert read("off", Path | None) == Path("off")


def test_home_is_expanded_and_nothing_else(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read("~/runs/$USER", Path) == Path("/home/me/runs/$USER")
    with pytest.raises(ConfigError, match="home folder"):
        read("~no_such_user_here/runs", Path)


def test_message_names_key_value_wanted_type_and_nearest_choice():
    with pytest.raises(ConfigError) as caught:
        read("wsd", Style)
    assert str(caught.value) == (
        "run.yaml:7: section.key is 'wsd', but must be one of linear, WSD (did you mean 'WSD'?)"
    )


def test_long_value_is_shortened_in_the_message():
    with pytest.raises(ConfigError) as caught:
        read("x" * 5000, int)
    assert len(str(caught.value)) < 250
