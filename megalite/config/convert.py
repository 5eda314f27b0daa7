"""Values are converted by the declared type of their setting, never by what they look like."""

from __future__ import annotations

import difflib
import math
import re
import types
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

from megalite.config.yaml_reader import PlainText, Setting, parse_yaml_value
from megalite.utils.errors import ConfigError

_BOOLS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
# Words that switch something off: as the name of a folder they are more likely a mistake.
_NOT_A_PATH = ("no", "off", "false", "none")

_DIGITS = r"\d+(_\d+)*"
_INTEGER = re.compile(rf"[+-]?{_DIGITS}", re.ASCII)
_REAL = re.compile(rf"[+-]?({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})([eE][+-]?\d+)?", re.ASCII)
_LARGEST_INT = 2**63 - 1


class _Unfit(Exception):
    """The value does not fit; the text, which may be empty, says more than the wanted type does."""


def convert(setting: Setting, declared: Any, key: str) -> Any:
    """Return the value of ``setting`` in the type ``declared``, or raise ConfigError naming ``key`` and the place."""
    try:
        return _convert(setting.value, declared, setting.where)
    except _Unfit as error:
        more = f" ({error})" if str(error) else ""
        raise ConfigError(
            f"{setting.where}: {key} is {_shown(setting.value)}, but must be {describe_type(declared)}{more}"
        ) from None


def describe_type(declared: Any) -> str:
    """Say in words what a setting takes."""
    inner, is_optional = split_optional(declared)
    if get_origin(inner) is Literal:
        text = "one of " + ", ".join(get_args(inner))
    elif get_origin(inner) is list:
        text = {int: "a list of whole numbers", str: "a list of texts"}[get_args(inner)[0]]
    else:
        text = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}[inner]
    return f"{text} or null" if is_optional else text


def split_optional(declared: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether None was part of it."""
    if get_origin(declared) not in (Union, types.UnionType):
        return declared, False
    (inner,) = (option for option in get_args(declared) if option is not type(None))
    return inner, True


def _convert(value: Any, declared: Any, where: str) -> Any:
    inner, is_optional = split_optional(declared)
    if value is None or (isinstance(value, PlainText) and value.is_null):
        if is_optional:
            return None
        raise _Unfit("this setting cannot be left empty; remove the line to get the default")
    if get_origin(inner) is Literal:
        return _to_choice(value, get_args(inner))
    if get_origin(inner) is list:
        return _to_list(value, get_args(inner)[0], where)
    return _CONVERTERS[inner](value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()]
    raise _Unfit("also read: yes, no, on, off, 1, 0")


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _Unfit
    if isinstance(value, float):
        if not value.is_integer():
            raise _Unfit
        value = int(value)
    if isinstance(value, str):
        value = _int_of_text(value.strip())
    if abs(value) > _LARGEST_INT:
        raise _Unfit("it does not fit in 64 bits")
    return value


def _int_of_text(text: str) -> int:
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.startswith("0"):
            raise _Unfit("a leading 0 could mean an octal number; remove it")
        if len(digits) > 40:
            raise _Unfit("it does not fit in 64 bits")
        return int(text)
    if not _REAL.fullmatch(text):
        raise _Unfit("in decimal digits, such as 12 or 1_000")
    number = Decimal(text.replace("_", ""))
    # The exponent first: writing out 1e999999999 would take the memory of the machine.
    if number.adjusted() > 20:
        raise _Unfit("it does not fit in 64 bits")
    if number.adjusted() < -20 and number != 0 or number != number.to_integral_value():
        raise _Unfit
    return int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _Unfit
    if isinstance(value, str):
        text = value.strip()
        if not _REAL.fullmatch(text):
            not_finite = text.lower().lstrip("+-.") in ("inf", "infinity", "nan")
            raise _Unfit("it must be finite" if not_finite else "such as 0.1 or 3e-4")
        value = text.replace("_", "")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Unfit("it must be finite")
    return number


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unfit
    return str(value)


def _to_path(value: Any) -> Path:
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str):
        raise _Unfit
    if value == "":
        raise _Unfit("it is empty")
    if isinstance(value, PlainText) and value.lower() in _NOT_A_PATH:
        raise _Unfit(f"write null to leave it out, or ./{value} for a file of that name")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise _Unfit("the home folder in it is not known") from error


def _to_choice(value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise _Unfit
    if value in choices:
        return str(value)
    by_lower_case = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), by_lower_case, n=1)
    raise _Unfit(f"did you mean {by_lower_case[close[0]]!r}?" if close else "")


def _to_list(value: Any, declared: Any, where: str) -> list[Any]:
    if isinstance(value, PlainText) and value.startswith("["):
        value = parse_yaml_value(value, where)
    elif isinstance(value, str):
        items = [item.strip() for item in value.split(",")]
        if "" in items:
            raise _Unfit("an item between commas is empty")
        value = [PlainText(item) for item in items] if isinstance(value, PlainText) else items
    if not isinstance(value, (list, tuple)):
        raise _Unfit
    return [_convert(item, declared, where) for item in value]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_CONVERTERS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_text, Path: _to_path}
