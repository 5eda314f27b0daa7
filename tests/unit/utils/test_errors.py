from __future__ import annotations

import pytest

from megalite.utils import errors


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("MegaliteError", 1),
        ("ConfigError", 2),
        ("DataError", 3),
        ("CheckpointError", 3),
        ("TopologyMismatchError", 3),
        ("SaveError", 4),
        ("NumericsError", 1),
    ],
)
def test_the_class_decides_the_exit_status(name: str, status: int) -> None:
    error = getattr(errors, name)("text")
    assert error.exit_status == status
    assert isinstance(error, errors.MegaliteError) and str(error) == "text"


def test_a_peers_failure_carries_its_status() -> None:
    assert errors.PeerError("text").exit_status == 1
    assert errors.PeerError("text", 4).exit_status == 4
    assert errors.PeerError.exit_status == 1, "one instance must not change the class"
