"""The text of ``--help``, made from the schema: the text under a field is its documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megalite.config.convert import split_optional
from megalite.config.names import check_key_name, check_section_name, field_types, section_classes

USAGE = """\
usage: torchrun [torchrun options] train.py CONFIG.yaml [--section.key=value ...]

  CONFIG.yaml            settings, a mapping of sections; may be left out if overrides give all that is required
  --section.key=value    set one key on top of the file; null leaves a setting out, a list is separated by commas
  --print-config         print all settings as YAML, with overrides and defaults, and stop
  --help [SECTION]       describe all settings, those of one section, or one section.key, and stop
"""

_WIDTH = 100


def help_text(topic: str | None = None) -> str:
    """Return usage and all settings, or those of a section, or a single ``section.key``.

    Raises ConfigError for a topic that does not exist.
    """
    if topic is None:
        names = textwrap.fill("sections: " + ", ".join(section_classes()), _WIDTH)
        return "\n".join([USAGE, names, "", *(_section_text(section) for section in section_classes())])
    section, _, key = topic.removeprefix("--").partition(".")
    check_section_name(section, "--help")
    if not key:
        return _section_text(section)
    check_key_name(section, key, "--help")
    return _field_text(section, key)


def field_docs(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, as one paragraph. Fields without a text are not in it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and is_text:
            docs[statement.target.id] = _plain_text(following.value.value)
    return docs


def _section_text(section: str) -> str:
    paragraphs = inspect.getdoc(section_classes()[section]).split("\n\n")
    lines = [f"{section}:"]
    for paragraph in paragraphs:
        lines += [*_indented(_plain_text(paragraph), 2), ""]
    return "\n".join([*lines, *(_field_text(section, key) for key in field_types(section))])


def _field_text(section: str, key: str) -> str:
    cls = section_classes()[section]
    (field,) = (field for field in dataclasses.fields(cls) if field.name == key)
    head = f"{section}.{key}: {_type_text(field_types(section)[key])} ({_default_text(field)})"
    head = textwrap.fill(head, _WIDTH + 10, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([head, *_indented(field_docs(cls)[key], 6), ""])


def _type_text(declared: Any) -> str:
    inner, is_optional = split_optional(declared)
    if get_origin(inner) is Literal:
        text = " | ".join(get_args(inner))
    elif get_origin(inner) is list:
        text = f"list of {get_args(inner)[0].__name__}"
    else:
        text = "path" if inner is Path else inner.__name__
    return f"{text} | null" if is_optional else text


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"default {field.default_factory()}"
    if field.default is dataclasses.MISSING:
        return "required"
    words = {None: "null", True: "true", False: "false"}
    # By identity of type: 0 and 1 are equal to False and True.
    is_word = field.default is None or isinstance(field.default, bool)
    return f"default {words[field.default] if is_word else field.default}"


def _plain_text(text: str) -> str:
    return " ".join(text.replace("``", "'").split())


def _indented(text: str, columns: int) -> list[str]:
    margin = " " * columns
    wrapper = textwrap.TextWrapper(_WIDTH, margin, margin, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
