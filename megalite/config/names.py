"""The sections and keys that exist, and the nearest right name for one that does not."""

from __future__ import annotations

import dataclasses
import difflib
from functools import cache
from typing import Any, get_type_hints

from megalite.config.schema import Config
from megalite.utils.errors import ConfigError


@cache
def section_classes() -> dict[str, type]:
    """The dataclass of each section, in the order of the schema."""
    return get_type_hints(Config)


@cache
def field_types(section: str) -> dict[str, Any]:
    """The declared type of each key of ``section``, in the order of the schema."""
    return get_type_hints(section_classes()[section])


@cache
def required_fields(section: str) -> tuple[str, ...]:
    """The keys of ``section`` that have no default."""
    return tuple(
        field.name
        for field in dataclasses.fields(section_classes()[section])
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def check_section_name(section: str, where: str) -> None:
    """Raise ConfigError with the nearest right name unless ``section`` exists."""
    if section in section_classes():
        return
    name = _normalized(section)
    first, _, rest = name.partition(".")
    home = _section_of(name)
    if first in section_classes() and rest:
        advice = f"write {rest!r} inside section {first!r}"
    elif home is not None:
        advice = f"{name!r} belongs in section {home!r}"
    else:
        close = difflib.get_close_matches(name, section_classes(), n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"the sections are {', '.join(section_classes())}"
    raise ConfigError(f"{where}: unknown section {section!r} ({advice})")


def check_key_name(section: str, key: str, where: str) -> None:
    """Raise ConfigError with the nearest right name unless ``section.key`` exists."""
    if key in field_types(section):
        return
    name = _normalized(key)
    home = _section_of(name)
    if name in field_types(section):
        advice = f"did you mean {name!r}?"
    elif home is not None:
        advice = f"{name!r} belongs in section {home!r}"
    else:
        advice = _nearest(section, name)
    raise ConfigError(f"{where}: unknown key '{section}.{key}' ({advice})")


def _nearest(section: str, name: str) -> str:
    close = difflib.get_close_matches(name, field_types(section), n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    elsewhere = [key for other in section_classes() for key in field_types(other)]
    close = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    if close:
        return f"did you mean '{_section_of(close[0])}.{close[0]}'?"
    return f"--help {section} lists the keys of this section"


def _normalized(name: str) -> str:
    """Undo the spelling of a command-line flag."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def _section_of(key: str) -> str | None:
    return next((section for section in section_classes() if key in field_types(section)), None)
