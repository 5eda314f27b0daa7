"""The one way in which a section or a cross check refuses a setting."""

from __future__ import annotations

from megalite.utils.errors import ConfigError


class SettingError(ConfigError):
    """A value that was read, but that cannot be used. ``keys`` lets the loader name the lines that set it."""

    def __init__(self, message: str, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.message = message
        self.keys = keys


def require(condition: bool, message: str, *keys: str) -> None:
    """Raise SettingError with ``message`` unless ``condition``; ``keys`` are the ``section.key`` names involved."""
    if not condition:
        raise SettingError(message, keys)


def require_at_least(key: str, value: float | None, minimum: float) -> None:
    """None passes: it means that the setting was left out."""
    if value is not None:
        require(value >= minimum, f"{key} is {value}, but must be at least {minimum}; give a larger number", key)


def require_above(key: str, value: float | None, bound: float) -> None:
    """None passes: it means that the setting was left out."""
    if value is not None:
        require(value > bound, f"{key} is {value}, but must be greater than {bound}; give a larger number", key)


def require_probability(key: str, value: float | None) -> None:
    """None passes: it means that the setting was left out."""
    if value is not None:
        require(
            0 <= value < 1, f"{key} is {value}, but must be at least 0 and below 1; give a number in that range", key
        )


def require_at_most_one(section: str, names: tuple[str, ...], are_set: tuple[bool, ...], why: str) -> None:
    """Refuse two or more settings of a section that say the same thing in different ways."""
    keys = [f"{section}.{name}" for name, is_set in zip(names, are_set, strict=True) if is_set]
    require(len(keys) < 2, f"{' and '.join(keys)} are both set, but {why}; keep one of them", *keys)
