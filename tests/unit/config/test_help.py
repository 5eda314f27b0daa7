from __future__ import annotations

import inspect

import pytest

from megalite.config.help import field_docs, help_text
from megalite.config.names import field_types, section_classes
from megalite.utils.errors import ConfigError


@pytest.mark.parametrize("section", section_classes())
def test_every_section_and_field_has_a_documentation(section):
    cls = section_classes()[section]
    # A dataclass without a docstring of its own gets its signature.
    assert not inspect.getdoc(cls).startswith(cls.__name__)
    docs = field_docs(cls)
    assert list(docs) == list(field_types(section))
    assert all(len(text) > 10 and text.endswith((".", "null")) for text in docs.values())


def test_help_shows_every_key_with_its_text():
    shown = " ".join(help_text().split())
    assert shown.startswith("usage: ")
    for section, cls in section_classes().items():
        for key, text in field_docs(cls).items():
            assert f"{section}.{key}: " in shown
            assert text in shown


def test_help_shows_types_defaults_and_choices():
    text = help_text()
    for line in (
        "model.num_layers: int (required)",
        "parallel.sequence_parallel: bool (default false)",
        "parallel.use_distributed_optimizer: bool (default true)",
        "optimizer.lr_warmup_iters: int (default 0)",
        "optimizer.adam_eps: float (default 1e-08)",
        "optimizer.weight_decay_incr_style: constant | linear | cosine (default constant)",
        "data.data_path: list of str | null (default null)",
        "checkpoint.save: path | null (default null)",
        "profiling.profile_ranks: list of int (default [0])",
    ):
        assert f"  {line}\n" in text


def test_help_of_a_section_or_key_shows_only_that():
    text = help_text("rng")
    assert "rng.data_parallel_random_init" in text
    assert "training." not in text.replace("training.seed", "")
    assert help_text("checkpoint.save").startswith("  checkpoint.save: path")


def test_help_of_something_unknown_suggests():
    with pytest.raises(ConfigError, match="unknown section 'optimiser' .did you mean 'optimizer'"):
        help_text("optimiser")
    with pytest.raises(ConfigError, match="unknown key 'rng.seed' .'seed' belongs in section 'training'"):
        help_text("rng.seed")


def test_help_fits_a_terminal():
    assert max(map(len, help_text().splitlines())) <= 120
