"""YAML without its guesses: every scalar stays text, and each setting knows the line it came from.

YAML 1.1 reads ``3e-4`` as text, ``no`` as a boolean, ``10:30`` as 630 and ``010`` as 8. Here only ``convert``, which
knows the declared type of a setting, gives text a meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.utils.errors import ConfigError


class PlainText(str):
    """Text without quotes, which may stand for something else than itself."""

    @property
    def is_null(self) -> bool:
        return self in ("null", "Null", "NULL", "~", "")


@dataclass(frozen=True)
class Setting:
    """A value as it was given, and where: ``run.yaml:12`` or ``command line``."""

    value: Any
    where: str


_REFUSED_TOKENS = {
    yaml.TagToken: "a type tag; remove it, values are converted by the type of their setting",
    yaml.AnchorToken: "an anchor; write the value out where it is needed",
    yaml.AliasToken: "an alias; write the value out instead",
}


def read_yaml_file(path: Path) -> dict[str, Setting]:
    """Return the top-level entries of ``path``.

    Mappings become ``dict[str, Setting]``, sequences lists, and scalars ``str`` if quoted, else PlainText.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path of the configuration") from error
    try:
        # utf-8-sig: some editors put a byte order mark in front.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file in that encoding"
        ) from error
    node = _compose(text, str(path))
    if node is None:
        raise ConfigError(f"{path}: the file has no settings; give at least the sections model, training and optimizer")
    value = _to_value(node, str(path))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: the file is {kind_of(value)}, but must be a mapping of sections; "
            "write 'model:' and indent its settings below"
        )
    return value


def parse_yaml_value(text: str, where: str) -> Any:
    """Parse one value, such as the list ``[0, 1]``, that did not come from a file."""
    with _errors_explained(where, name_line=False):
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    return None if node is None else _to_value(node, where)


def kind_of(value: object) -> str:
    """Name what a value is, for error messages."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"the value {value!r}"


def _compose(text: str, source: str) -> yaml.Node | None:
    with _errors_explained(source):
        _refuse_tokens(text, source)
        documents = list(yaml.compose_all(text, Loader=yaml.BaseLoader))
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        raise ConfigError(f"{source}:{line}: a second document starts here; keep one document in a file")
    return documents[0] if documents else None


def _refuse_tokens(text: str, source: str) -> None:
    # On tokens and not on nodes, because a node no longer shows that it was an alias.
    for token in yaml.scan(text, Loader=yaml.BaseLoader):
        reason = _REFUSED_TOKENS.get(type(token))
        if reason is not None:
            raise ConfigError(f"{source}:{token.start_mark.line + 1}: this file uses {reason}")


@contextmanager
def _errors_explained(source: str, name_line: bool = True) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if name_line and mark is not None else source
        text = " ".join(part for part in (error.context, error.problem) if part)
        advice = "indent with spaces, not tabs" if "\\t" in text else "correct the YAML"
        raise ConfigError(f"{where}: not valid YAML ({text}); {advice}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{source}: not valid YAML (character #x{error.character:04x} at position {error.position} is not "
            "allowed); remove it"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{source}: not valid YAML (nested too deep); settings stand one level below a section"
        ) from error


def _to_value(node: yaml.Node, source: str) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return PlainText(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_to_value(item, source) for item in node.value]
    entries: dict[str, Setting] = {}
    for key_node, value_node in node.value:
        where = f"{source}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key is a list or a mapping, but must be a name; write 'name: value'")
        key = key_node.value
        if key == "<<":
            raise ConfigError(f"{where}: this file uses a merge key '<<'; write the settings out instead")
        if key in entries:
            raise ConfigError(f"{where}: key {key!r} is given again, first at {entries[key].where}; remove one of them")
        entries[key] = Setting(_to_value(value_node, source), where)
    return entries
