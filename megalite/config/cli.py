"""What a command line asks for: a text to print, or a run with a configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.help import USAGE, help_text
from megalite.config.loader import COMMAND_LINE, UnresolvedConfig, dump_config, load_config, split_override
from megalite.config.schema import Config
from megalite.utils.errors import ConfigError

# An override may be written without the dashes; a path that looks like one can be given as ./a=b.yaml.
_OVERRIDE = re.compile(r"--|[A-Za-z_][\w.-]*=")


@dataclass(frozen=True)
class CommandLine:
    """Exactly one of the two is set: a text that the user asked for, or the configuration of a run."""

    text: str | None = None
    config: Config | UnresolvedConfig | None = None


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Interpret the arguments after the program's name. Raises ConfigError for those that cannot be followed."""
    arguments = list(argv)
    for flag in ("--help", "-h"):
        if flag in arguments:
            following = arguments[arguments.index(flag) + 1 :]
            return CommandLine(text=help_text(following[0] if following else None))
    print_config = "--print-config" in arguments
    arguments = [argument for argument in arguments if argument != "--print-config"]
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    paths = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    for override in overrides:
        # Before the paths: in '--training.seed 5' the 5 would be taken for a second file.
        split_override(override)
    _check_paths(paths, overrides)
    config = load_config(Path(paths[0]) if paths else None, overrides)
    if not print_config:
        return CommandLine(config=config)
    if isinstance(config, UnresolvedConfig):
        raise ConfigError(
            f"{COMMAND_LINE}: --print-config does not show what checkpoint.use_checkpoint_args takes from a "
            "checkpoint; switch that off, or read config.yaml beside a step that the run has saved"
        )
    return CommandLine(text=dump_config(config))


def _check_paths(paths: list[str], overrides: list[str]) -> None:
    if not paths and not overrides:
        raise ConfigError(f"{COMMAND_LINE}: no configuration is given; name a YAML file\n\n{USAGE}")
    for path in paths:
        if path.startswith("-"):
            raise ConfigError(f"{COMMAND_LINE}: unknown option {path!r}; write --section.key=value, or see --help")
    if len(paths) > 1:
        raise ConfigError(
            f"{COMMAND_LINE}: {' and '.join(map(repr, paths))} are given, but a run has one configuration file; "
            "settings on top of it are written --section.key=value"
        )
