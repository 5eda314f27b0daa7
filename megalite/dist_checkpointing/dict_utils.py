"""Walks over nested dicts and lists; everything else, tuples included, is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str | int, ...]

_GONE = object()


def iter_leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of ``tree`` in order."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from iter_leaves(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from iter_leaves(value, (*path, index))
    else:
        yield path, tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` in which every leaf is replaced by ``function(leaf)``."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    return function(tree)


def without_leaves(tree: dict, remove: Callable[[Any], bool]) -> dict:
    """Return a copy of ``tree`` without the leaves to remove.

    A container that becomes empty by that disappears too, one that was empty stays; lists close the gaps.
    """
    kept = _strip(tree, remove)
    return {} if kept is _GONE else kept


def vanishes(tree: Any, remove: Callable[[Any], bool]) -> bool:
    """Return whether nothing is left of ``tree`` when the leaves to remove are taken out."""
    return _strip(tree, remove) is _GONE


def _strip(tree: Any, remove: Callable[[Any], bool]) -> Any:
    if isinstance(tree, dict):
        kept = {key: value for key, value in ((k, _strip(v, remove)) for k, v in tree.items()) if value is not _GONE}
    elif isinstance(tree, list):
        kept = [value for value in (_strip(v, remove) for v in tree) if value is not _GONE]
    else:
        return _GONE if remove(tree) else tree
    return _GONE if tree and not kept else kept


def dotted(path: Path) -> str:
    """Return a path as text for messages: ``optimizer.param_groups.0.params``."""
    return ".".join(str(part) for part in path)
