"""What a user changed between the run that saved a checkpoint and the run that goes on with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WATCHED_SECTIONS = ("model", "optimizer", "precision", "rng", "data")
WATCHED_KEYS = {
    "training": (
        "seed",
        "global_batch_size",
        "rampup_batch_size",
        "step_batch_size_schedule",
        "calculate_per_token_loss",
    )
}
# How data is read, not what is read.
IGNORED_KEYS = {"data": ("num_workers", "mmap_bin_files", "data_cache_path")}


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "section.key old -> new" for every setting that has a say in what is learned and that is different.

    Where the ranks are, when to save and what to log are left out: they change nothing that is learned. A setting that
    the older version did not have is left out too.
    """
    lines = []
    for section in (*WATCHED_SECTIONS, *WATCHED_KEYS):
        old, new = saved.get(section, {}), now.get(section, {})
        for key in WATCHED_KEYS.get(section, new):
            if key in old and key not in IGNORED_KEYS.get(section, ()) and old[key] != new[key]:
                lines.append(f"{section}.{key} {old[key]} -> {new[key]}")
    return lines


def changed_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the sets whose definition is different, each with what is: the same settings may name other files."""
    return [
        f"{name} data ({', '.join(_differences(saved[name], now[name]))})"
        for name in now
        if name in saved and saved[name] != now[name]
    ]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in new:
        if old.get(key) != new[key]:
            is_short = all(isinstance(value, (int, float)) for value in (old.get(key), new[key]))
            yield f"{key} {old.get(key)} -> {new[key]}" if is_short else key
