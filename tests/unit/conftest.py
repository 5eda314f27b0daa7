from __future__ import annotations

import logging

import pytest


@pytest.fixture
def megalite_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """``caplog`` that sees INFO of the package, also after a run of the same process has set its own console up."""
    monkeypatch.setattr(logging.getLogger("megalite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="megalite")
    return caplog
