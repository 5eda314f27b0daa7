"""Lists of prefixes and of weights with prefixes."""

from __future__ import annotations

import pytest

from megalite.config.blend import Blend, parse_blend
from megalite.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["a"], Blend(("a",))),
        (["a", "b", "c"], Blend(("a", "b", "c"))),
        (["a", "b"], Blend(("a", "b"))),
        (["0.3", "a"], Blend(("a",), (0.3,))),
        (["30", " a ", "7e1", "b"], Blend(("a", "b"), (30.0, 70.0))),
        # An odd number of entries is never read as weights.
        (["1", "2", "3"], Blend(("1", "2", "3"))),
        (["a", "1", "b", "2"], Blend(("a", "1", "b", "2"))),
    ],
)
def test_an_even_number_of_entries_with_numbers_is_weights(entries, expected):
    assert parse_blend(entries, "data.data_path") == expected


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "data.data_path is an empty list; give one prefix"),
        (["a", " "], "with an entry that is empty; give"),
        (["0.3", "a", "x", "b"], r"in which \['x'\] stand where weights are expected.*; write weight, prefix"),
        (["0", "a", "1", "b"], "has the weight 0, but .* above 0; correct it"),
        (["-1", "a"], "has the weight -1"),
        (["nan", "a"], "has the weight nan"),
        (["inf", "a"], "has the weight inf"),
    ],
)
def test_a_list_that_is_neither_is_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        parse_blend(entries, "data.data_path")
