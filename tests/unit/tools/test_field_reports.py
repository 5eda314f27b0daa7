from __future__ import annotations

import runpy
from pathlib import Path


def test_every_report_has_a_test() -> None:
    script = Path(__file__).resolve().parents[3] / "tools" / "field_reports.py"
    assert runpy.run_path(str(script))["reports_without_test"]() == {}
