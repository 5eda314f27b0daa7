"""Local work whose failure every rank of a group learns of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalite.utils.dist import Group, agree_any, is_failure
from megalite.utils.errors import MegaliteError, PeerError

T = TypeVar("T")


def agreed(group: Group, what: str, body: Callable[[], T]) -> T:
    """Return what the local ``body`` returns, once it succeeded on all ranks. Collective over the group.

    The body must not communicate. An explained error of one rank is raised on every rank with the same class and text;
    any other becomes a PeerError on the ranks that did not fail.
    """
    error: BaseException | None = None
    result: T | None = None
    try:
        result = body()
    except BaseException as caught:
        if not is_failure(caught):
            raise
        error = caught
    # Success costs one number; texts are exchanged only where there are some.
    if agree_any(error is not None, group):
        _raise_first(group, what, error)
    return result  # type: ignore[return-value]


def _raise_first(group: Group, what: str, error: BaseException | None) -> None:
    explained = isinstance(error, MegaliteError) and not isinstance(error, PeerError)
    report = None if error is None else (explained, type(error) if explained else type(error).__name__, str(error))
    reports = group.all_gather_object(report)
    for found in reports:
        if found is not None and found[0]:
            raise found[1](found[2])
    if error is not None:
        raise error
    for position, found in enumerate(reports):
        if found is not None:
            raise PeerError(f"{what} failed on rank {group.ranks[position]}: {found[1]}: {found[2]}")
