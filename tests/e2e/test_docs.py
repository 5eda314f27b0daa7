"""Programs in the documentation run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.dist_checkpointing import load_common_state_dict, load_plain_tensors
from tests.helpers.rank_main import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_library_example_runs_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    section = (DOCS / "checkpoint.md").read_text().split("## As a library", 1)[1]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert len([line for line in program.splitlines() if line and not line.startswith(("import", "from"))]) <= 20
    (tmp_path / "example.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "example.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tensors = load_plain_tensors(tmp_path / "checkpoint")
    assert tensors["w"].shape == (12, 8) and tensors["w"][-1, 0] == ranks - 1 and tensors["b"].shape == (8,)
    assert load_common_state_dict(tmp_path / "checkpoint")["step"] == 7
