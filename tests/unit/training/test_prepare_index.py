"""Index tables built ahead: a run finds all it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.config.loader import config_from_dict, dump_config
from megalite.data import blended, gpt_dataset
from megalite.data.indexed_dataset import IndexedDatasetWriter
from megalite.training.prepare_index import build_index
from megalite.training.setup import training_run
from megalite.utils.errors import ConfigError, DataError

TOOL = Path(__file__).resolve().parents[3] / "tools" / "preprocess_data.py"


@pytest.fixture
def prefixes(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for number, path in enumerate(paths):
        with IndexedDatasetWriter(path, np.uint16, "ByteTokenizer", 257, 256) as writer:
            for _ in range(40):
                writer.add_document([number] * 20 + [256])
            writer.finalize()
    return paths


def config_of(prefixes, **changes):
    sections = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 6,
            "eval_interval": 3,
            "eval_iters": 2,
        },
        "optimizer": {"lr": 1e-3},
        "data": {"data_path": ["0.3", prefixes[0], "0.7", prefixes[1]], "split": "80,20"},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return config_from_dict(sections)


def test_a_run_builds_nothing_more(prefixes, monkeypatch):
    config = config_of(prefixes)
    reports = list(build_index(config))
    assert [(report.name, report.num_sources) for report in reports] == [("train", 2), ("valid", 2)]
    assert reports[0].num_samples >= 24 and all(report.size > 0 and report.seconds >= 0 for report in reports)
    for module, name in ((gpt_dataset, "build_indices"), (blended, "build_blending_indices")):
        monkeypatch.setattr(module, name, lambda *a: pytest.fail("a table was missing"))
    with training_run(config) as ctx:
        assert ctx.train_batches is not None and ctx.valid_batches
    assert list(build_index(config))[0].size == reports[0].size


def test_tables_are_the_same_for_any_number_of_ranks_if_the_batch_is_given(prefixes):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = config_of(prefixes, parallel=sizes, model={"num_layers": 2, "num_attention_heads": 2})
    assert [report.num_samples for report in build_index(config)] == [
        report.num_samples for report in build_index(config, world_size=8)
    ]


def test_without_a_batch_the_number_of_ranks_is_needed(prefixes):
    config = config_of(prefixes, training={"global_batch_size": None})
    with pytest.raises(ConfigError, match=r"training\.global_batch_size is left out.*--world-size"):
        list(build_index(config))
    assert next(build_index(config, 1)).num_samples < next(build_index(config, 4)).num_samples


def test_tables_that_are_not_kept_are_an_error(prefixes, tmp_path):
    (tmp_path / "occupied").write_text("a file where a folder should be")
    with pytest.raises(DataError, match=r"train data could not be kept.*data\.data_cache_path"):
        list(build_index(config_of(prefixes, data={"data_cache_path": str(tmp_path / "occupied")})))
    mock = {"data_path": None, "mock_data": True}
    with pytest.raises(ConfigError, match=r"data\.mock_data is on and data\.data_cache_path is left out"):
        list(build_index(config_of(prefixes, data=mock)))
    assert len(list(build_index(config_of(prefixes, data={**mock, "data_cache_path": str(tmp_path / "c")})))) == 2


def test_the_command_prints_sizes_and_seconds(prefixes, tmp_path):
    (tmp_path / "run.yaml").write_text(dump_config(config_of(prefixes)))
    command = [sys.executable, str(TOOL), "--index", str(tmp_path / "run.yaml")]
    override = f"--data.data_cache_path={tmp_path / 'cache'}"
    result = subprocess.run([*command, override], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "train: " in result.stdout and "samples of 2 sources, tables of 0.0" in result.stdout
    assert "index tables of" in result.stdout.splitlines()[-1] and "blended" in result.stderr
    # Three tables and a description of each source, two and a description of the blend, in two sets.
    assert len(list((tmp_path / "cache").iterdir())) == 2 * (2 * 4 + 3)
    result = subprocess.run([*command, "--data.split=x"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stderr.startswith("error: command line: data.split is 'x'")
    assert result.stdout == ""
