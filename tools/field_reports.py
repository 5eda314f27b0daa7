"""List the reports in tests/field_reports.yaml that no test bears the id of; status 1 if there are any.

python tools/field_reports.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parent.parent / "tests"


def reports_without_test() -> dict[str, str]:
    """Return id -> report of those whose id is in no test file, as DAT-01 or dat_01."""
    reports = yaml.safe_load((TESTS / "field_reports.yaml").read_text(encoding="utf-8"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    found = {f"{kind.upper()}-{number}" for kind, number in re.findall(r"([A-Za-z]{3})[-_](\d\d)(?!\d)", text)}
    return {name: report for name, report in reports.items() if name not in found}


def main() -> int:
    missing = reports_without_test()
    for name, report in missing.items():
        print(f"{name}: {report}")
    print(f"{len(missing)} reports without a test", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
