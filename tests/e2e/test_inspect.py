"""The tool that looks into checkpoints, as people start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.rank_main import REPOSITORY
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import make_config, run_steps


def _train(folder: Path) -> None:
    from megalite.training.setup import training_run

    save = {"checkpoint": {"save": str(folder), "save_interval": 1, "verify_integrity": "sha256"}}
    with training_run(make_config(save, topology=(2, 1, 1))) as ctx:
        run_steps(ctx, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    run_on_ranks(2, _train, path)
    return path


def _tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(REPOSITORY / "tools" / "inspect_checkpoint.py"),
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_command_of_a_trained_run(folder: Path) -> None:
    shown = _tool("show", folder)
    assert shown.returncode == 0 and "iteration          2" in shown.stdout and "TP=2 PP=1 DP=1" in shown.stdout
    assert json.loads(_tool("show", folder, "--json").stdout)["optimizer_layout"] == "fully_reshardable"
    listed = _tool("keys", folder, "*linear_fc1.weight", "--chunks")
    assert listed.returncode == 0 and "[1, 128, 64] at [0, 128, 0]: __1_0.distcp" in listed.stdout
    checked = _tool("verify", folder)
    assert (checked.returncode, checked.stdout) == (0, "sound: files, index, checksums and hashes agree\n")
    assert _tool("diff", folder, folder, "--values").stdout == "equal\n"
    differing = _tool("diff", folder, folder, "--other-step", 1, "--values")
    assert differing.returncode == 1 and "decoder.final_layernorm.bias" in differing.stdout
    assert "iteration: 2 against 1" in differing.stdout


def test_damage_and_wrong_names_are_status_3_without_a_traceback(folder: Path) -> None:
    data = folder / "iter_0000001" / "__1_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    found = _tool("verify", folder, "--step", 1)
    data.write_bytes(whole)
    assert found.returncode == 3 and "__1_0.distcp" in found.stdout and "problems" in found.stdout
    for arguments in (("show", folder / "none"), ("keys", folder.parent), ("verify", folder, "--step", 9)):
        refused = _tool(*arguments)
        assert refused.returncode == 3 and refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
