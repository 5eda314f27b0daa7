"""The list form of a data source: prefixes of token files, with or without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.checks import require


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files; ``weights`` as they were given, None when their lengths decide."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert self.weights is None or len(self.weights) == len(self.prefixes)


def parse_blend(entries: Sequence[str], key: str) -> Blend:
    """Read a list of prefixes, or of weight, prefix, weight, prefix; raises SettingError that names ``key``.

    Megatron's rule: an odd number of entries are prefixes; of an even number the first, third, ... are weights unless
    none of them is a number.
    """
    entries = [entry.strip() for entry in entries]
    require(len(entries) > 0, f"{key} is an empty list; give one prefix at least, without .bin or .idx", key)
    require("" not in entries, f"{key} is {entries}, with an entry that is empty; give prefixes, without .bin", key)
    if len(entries) % 2:
        return Blend(tuple(entries))
    weights = [_number(entry) for entry in entries[::2]]
    if all(weight is None for weight in weights):
        return Blend(tuple(entries))
    no_number = [entry for entry, weight in zip(entries[::2], weights, strict=True) if weight is None]
    require(
        not no_number,
        f"{key} is {entries}, in which {no_number} stand where weights are expected, and others there are numbers; "
        "write weight, prefix, weight, prefix, or prefixes only",
        key,
    )
    for entry, weight in zip(entries[::2], weights, strict=True):
        require(
            0 < weight < math.inf,
            f"{key} has the weight {entry}, but a weight must be a number above 0; correct it, or leave its prefix out",
            key,
        )
    return Blend(tuple(entries[1::2]), tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
