"""From the settings of the data section to the prefixes and weights of each split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from megalite.config.blend import Blend, parse_blend
from megalite.config.schema import DataConfig
from megalite.data.gpt_dataset import SPLIT_NAMES
from megalite.utils.errors import ConfigError


@dataclass(frozen=True)
class DataSources:
    """What each set reads: "train", "valid", "test", or "valid/NAME" for several validation sets.

    With ``split`` all of them share the same files, which are cut by its weights; without, each has its own.
    """

    blends: dict[str, Blend]
    split: str | None


def split_of(name: str) -> str:
    """Return the split that a set belongs to: "valid" for "valid/NAME"."""
    return name.partition("/")[0]


def resolve_sources(data: DataConfig) -> DataSources:
    """Return what ``data`` names, files of entries read; raises ConfigError for those that cannot be used."""
    assert not data.mock_data, "generated tokens have no sources"
    if data.data_path is not None or data.data_args_path is not None:
        if data.data_args_path is None:
            blend = parse_blend(data.data_path or [], "data.data_path")
        else:
            blend = parse_blend(_read(data.data_args_path, "data_args_path").split(), _in("data_args_path", data))
        return DataSources(dict.fromkeys(SPLIT_NAMES, blend), data.split_text)
    entries = _per_split_entries(data)
    blends: dict[str, Blend] = {}
    for name, (listed, key) in entries.items():
        blend = parse_blend(listed, key)
        if name == "valid" and data.multiple_validation_sets:
            blends.update(_validation_sets(blend, key))
        else:
            # As in Megatron: a single source is no blend here, whether it has a weight or not.
            blends[name] = Blend(blend.prefixes) if len(blend.prefixes) == 1 else blend
    return DataSources(blends, None)


def _per_split_entries(data: DataConfig) -> dict[str, tuple[Sequence[str], str]]:
    """Return for each split that is given its entries, and the key to name in errors."""
    if data.per_split_data_args_path is None:
        given = {name: getattr(data, f"{name}_data_path") for name in SPLIT_NAMES}
        return {name: (listed, f"data.{name}_data_path") for name, listed in given.items() if listed is not None}
    key = _in("per_split_data_args_path", data)
    example = 'write {"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}'
    try:
        content = json.loads(_read(data.per_split_data_args_path, "per_split_data_args_path"))
    except ValueError as error:
        raise ConfigError(f"{key} is not JSON: {error}; {example}") from error
    if not isinstance(content, dict) or not set(content) <= set(SPLIT_NAMES) or content.get("train") is None:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{key} holds {found}, not lists named 'train', 'valid' and 'test'; {example}")
    entries: dict[str, tuple[Sequence[str], str]] = {}
    for name, listed in content.items():
        if listed is None:
            continue
        # A boolean is an integer to Python, but no weight.
        if not isinstance(listed, list) or any(type(entry) not in (str, int, float) for entry in listed):
            raise ConfigError(f"{key}: {name!r} is {str(listed)[:80]}, not a list of texts and numbers; {example}")
        entries[name] = ([str(entry) for entry in listed], f"{key}: {name!r}")
    return entries


def _validation_sets(blend: Blend, key: str) -> dict[str, Blend]:
    if blend.weights is not None:
        raise ConfigError(
            f"{key} has weights {list(blend.weights)}, but data.multiple_validation_sets makes a set of its own of "
            "each prefix; leave the weights out, or switch it off to get one blend"
        )
    names = validation_set_names(blend.prefixes)
    if len(set(names)) < len(names):
        again = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{key} names {again} twice, but each validation set needs a name of its own; remove one")
    return {f"valid/{name}": Blend((prefix,)) for name, prefix in zip(names, blend.prefixes, strict=True)}


def validation_set_names(prefixes: Sequence[str]) -> list[str]:
    """Return the last parts of the prefixes, as many as it takes to tell all of them apart."""
    parts = [PurePath(prefix).parts for prefix in prefixes]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(part.strip("/") for part in path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def _in(name: str, data: DataConfig) -> str:
    return f"data.{name} {getattr(data, name)}"


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"data.{name} {path} cannot be read: {reason}; give a readable text file") from error
