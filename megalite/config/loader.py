"""From a YAML file and overrides to a checked ``Config``, and back to text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from megalite.config.checks import SettingError
from megalite.config.convert import convert
from megalite.config.derive import check_config
from megalite.config.names import check_key_name, check_section_name, field_types, required_fields, section_classes
from megalite.config.schema import CheckpointConfig, Config, LoggingConfig, ParallelConfig, TrainingConfig
from megalite.config.yaml_reader import PlainText, Setting, kind_of, read_yaml_file
from megalite.utils.errors import ConfigError

COMMAND_LINE = "command line"

_Settings = dict[str, dict[str, Setting]]


@dataclass(frozen=True)
class UnresolvedConfig:
    """A configuration whose section ``model`` is completed from a checkpoint (``checkpoint.use_checkpoint_args``).

    All other sections are there and have checked themselves: a run gets as far as to its checkpoint with them.
    """

    settings: _Settings
    source: str
    checkpoint: CheckpointConfig
    parallel: ParallelConfig
    training: TrainingConfig
    logging: LoggingConfig

    def resolve(self, model: Mapping[str, Sequence[Any]], source: str) -> Config:
        """Return the whole configuration.

        ``model`` has, for each key that ``source`` knows, the value that is taken if the user gave none, and then other
        values that say the same. Raises ConfigError naming both for each given setting that is none of them.
        """
        given = {key: value for key, value in _converted("model", self.settings["model"]).items() if value is not None}
        section = {key: self.settings["model"][key] for key in given}
        different = []
        for key, values in model.items():
            accepted = [convert(Setting(value, source), field_types("model")[key], f"model.{key}") for value in values]
            if key not in given:
                section[key] = Setting(values[0], source)
            elif given[key] not in accepted:
                different.append(f"{section[key].where}: model.{key} is {given[key]}, in {source} it is {accepted[0]}")
        if different:
            raise ConfigError(
                f"{'; '.join(different)}. With checkpoint.use_checkpoint_args the model is the checkpoint's: leave "
                "these out, or switch it off"
            )
        return _whole({**self.settings, "model": section}, self.source)


def load_config(path: Path | None, overrides: Sequence[str]) -> Config | UnresolvedConfig:
    """Return the configuration in ``path`` with ``overrides`` (``--section.key=value``) on top.

    Of several overrides of one key the last one counts. With ``checkpoint.use_checkpoint_args`` it lacks what the
    checkpoint says. Raises ConfigError, which names the file and line, or the
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


def config_from_dict(values: Mapping[str, Any], source: str = "configuration") -> Config | UnresolvedConfig:
    """Return the configuration that ``config_to_dict`` made ``values`` of; ``source`` names it in errors.

    With ``checkpoint.use_checkpoint_args`` it is one that is not resolved, as with ``load_config``.
    """
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


def _build(settings: _Settings, source: str) -> Config | UnresolvedConfig:
    flag = settings["checkpoint"].get("use_checkpoint_args")
    if flag is None or not convert(flag, bool, "checkpoint.use_checkpoint_args"):
        return _whole(settings, source)
    others = {section: given for section, given in settings.items() if section != "model"}
    sections = _sections(others, source)
    # So that a wrong line is an error now, and not when a checkpoint was found and read.
    _converted("model", settings["model"])
    return UnresolvedConfig(
        settings, source, **{name: sections[name] for name in ("checkpoint", "parallel", "training", "logging")}
    )


def _whole(settings: _Settings, source: str) -> Config:
    sections = _sections(settings, source)
    with _placed(settings, source):
        config = Config(**sections)
        check_config(config)
    return config


def _sections(settings: _Settings, source: str) -> dict[str, Any]:
    values = {section: _converted(section, given) for section, given in settings.items()}
    # After the conversion: a wrong line in the file is easier to understand than a missing one.
    _check_required(settings, source)
    with _placed(settings, source):
        return {section: section_classes()[section](**values[section]) for section in settings}


@contextlib.contextmanager
def _placed(settings: _Settings, source: str) -> Iterator[None]:
    """Say of a setting that is refused within the body where it was given."""
    try:
        yield
    except SettingError as error:
        raise ConfigError(f"{_places(error.keys, settings, source)}: {error.message}") from error


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
        setting = settings.get(section, {}).get(key)
        if setting is not None and setting.where not in places:
            places.append(setting.where)
    return ", ".join(places) or source


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
