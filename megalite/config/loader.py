"""From a YAML file and overrides to a checked ``Config``, and back to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from megalite.config.checks import SettingError
from megalite.config.convert import convert
from megalite.config.derive import check_config
from megalite.config.names import check_key_name, check_section_name, field_types, required_fields, section_classes
from megalite.config.schema import Config
from megalite.config.yaml_reader import PlainText, Setting, kind_of, read_yaml_file
from megalite.utils.errors import ConfigError

COMMAND_LINE = "command line"

_Settings = dict[str, dict[str, Setting]]


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Return the configuration in ``path`` with ``overrides`` (``--section.key=value``) on top.

    Of several overrides of one key the last one counts. Raises ConfigError, which names the file and line, or the
    command line, and the nearest right name of what is unknown.
    """
    settings = _empty_settings()
    if path is not None:
        for section, entry in read_yaml_file(path).items():
            settings[_checked_section(section, entry)].update(_checked_entries(section, entry))
    for text in overrides:
        section, key, setting = _parse_override(text)
        settings[section][key] = setting
    return _build(settings, str(path) if path is not None else COMMAND_LINE)


def config_from_dict(values: Mapping[str, Any], source: str = "configuration") -> Config:
    """Return the configuration that ``config_to_dict`` made ``values`` of; ``source`` names it in errors."""
    settings = _empty_settings()
    for section, entries in values.items():
        if isinstance(entries, Mapping):
            entries = {key: Setting(value, source) for key, value in entries.items()}
        entry = Setting(entries, source)
        settings[_checked_section(section, entry)].update(_checked_entries(section, entry))
    return _build(settings, source)


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return every setting as plain values (None, bool, int, float, str, list), by section."""
    return {
        section: {key: _plain(getattr(getattr(config, section), key)) for key in field_types(section)}
        for section in section_classes()
    }


def dump_config(config: Config) -> str:
    """Return YAML with every setting, which ``load_config`` reads back to an equal configuration."""
    # No line breaks inside values, so that each setting is one line to grep and to compare.
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _empty_settings() -> _Settings:
    return {section: {} for section in section_classes()}


def _checked_section(section: Any, entry: Setting) -> str:
    check_section_name(str(section), entry.where)
    return section


def _checked_entries(section: str, entry: Setting) -> dict[str, Setting]:
    value = entry.value
    if value is None or (isinstance(value, PlainText) and value.is_null):
        # A section whose settings are all commented out.
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{entry.where}: section {section!r} is {kind_of(value)}, but must be a mapping; write 'key: value' lines, "
            "indented below it"
        )
    for key, setting in value.items():
        check_key_name(section, str(key), setting.where)
    return dict(value)


def split_override(text: str) -> tuple[str, str]:
    """Return the name and the value in ``--section.key=value``. Raises ConfigError if there is no value."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: {text!r} has no value; write --section.key=value")
    return name, value


def _parse_override(text: str) -> tuple[str, str, Setting]:
    name, value = split_override(text)
    section, dot, key = name.partition(".")
    check_section_name(section, COMMAND_LINE)
    if not dot:
        raise ConfigError(f"{COMMAND_LINE}: {text!r} names a section, but no key; write --{section}.key=value")
    check_key_name(section, key, COMMAND_LINE)
    return section, key, Setting(PlainText(value), COMMAND_LINE)


def _build(settings: _Settings, source: str) -> Config:
    values = {section: _converted(section, given) for section, given in settings.items()}
    # After the conversion: a wrong line in the file is easier to understand than a missing one.
    _check_required(settings, source)
    try:
        config = Config(**{section: cls(**values[section]) for section, cls in section_classes().items()})
        check_config(config)
    except SettingError as error:
        raise ConfigError(f"{_places(error.keys, settings, source)}: {error.message}") from error
    return config


def _converted(section: str, given: dict[str, Setting]) -> dict[str, Any]:
    types = field_types(section)
    return {key: convert(setting, types[key], f"{section}.{key}") for key, setting in given.items()}


def _check_required(settings: _Settings, source: str) -> None:
    missing = [
        f"{section}.{key}" for section in settings for key in required_fields(section) if key not in settings[section]
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{source}: {', '.join(missing)} {verb} not given and without a default; add a value")


def _places(keys: Sequence[str], settings: _Settings, source: str) -> str:
    """Say where the settings that an error is about were given; one that was left out has no place."""
    places = []
    for section, _, key in (name.partition(".") for name in keys):
        setting = settings[section].get(key)
        if setting is not None and setting.where not in places:
            places.append(setting.where)
    return ", ".join(places) or source


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
