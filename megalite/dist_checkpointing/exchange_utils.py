"""Local work whose failure every rank of a group learns of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalite.utils.dist import Group, failing_together, raise_on_all
from megalite.utils.errors import MegaliteError

T = TypeVar("T")


def agreed(group: Group, what: str, body: Callable[[], T]) -> T:
    """Return what the local ``body`` returns, once it succeeded on all ranks. Collective over the group.

    An explained error of one rank is raised on every rank with the same class and text; any other becomes a PeerError
    on the ranks that did not fail.
    """
    explained: MegaliteError | None = None
    result: T | None = None
    with failing_together(group, what):
        try:
            result = body()
        except MegaliteError as error:
            explained = error
    raise_on_all(explained, group)
    return result  # type: ignore[return-value]
