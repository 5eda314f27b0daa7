"""The loss under masks that keep different numbers of tokens: the same for any DP, and what is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.data.indexed_dataset import IndexedDatasetWriter
from megalite.training.context import TrainContext
from tests.helpers.runs import Topology, make_config, max_difference, run

FLOAT64 = {"precision": {"float64": True}}


def _mask_of(ordinal: int, length: int) -> torch.Tensor:
    """Keep between none and all tokens of a sample, by its ordinal."""
    return (torch.arange(length) < (ordinal * 7) % (length + 1)).float()


def _mask_unevenly(ctx: TrainContext) -> None:
    if ctx.train_batches is None:
        return
    draw = type(ctx.train_batches).__next__

    class Masked(type(ctx.train_batches)):
        def __next__(self) -> dict[str, torch.Tensor]:
            batch = draw(self)
            masks = [_mask_of(ordinal, batch["tokens"].shape[1]) for ordinal in batch["sample_ordinals"].tolist()]
            return {**batch, "loss_mask": torch.stack(masks)}

    ctx.train_batches.__class__ = Masked


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("topology", [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
def test_loss_and_update_do_not_depend_on_dp(topology: Topology, per_token: bool) -> None:
    changes: tuple[dict[str, Any], ...] = (FLOAT64, {"training": {"calculate_per_token_loss": per_token}})
    expected = run((1, 1, 1), make_config(*changes), 3, _mask_unevenly)
    actual = run(topology, make_config(*changes, topology=topology), 3, _mask_unevenly)
    assert actual.losses == pytest.approx(expected.losses, abs=1e-10)
    assert actual.grad_norms == pytest.approx(expected.grad_norms, abs=1e-9)
    assert max_difference(actual.state, expected.state) < 1e-9


def test_per_token_loss_does_not_depend_on_the_micro_batch() -> None:
    results = []
    for micro in (1, 4):
        settings = {"calculate_per_token_loss": True, "micro_batch_size": micro}
        results.append(run((1, 1, 1), make_config(FLOAT64, {"training": settings}), 3, _mask_unevenly))
    assert results[0].losses == pytest.approx(results[1].losses, abs=1e-10)
    assert max_difference(results[0].state, results[1].state) < 1e-9


def test_by_default_micro_batches_count_alike() -> None:
    config = make_config(FLOAT64, {"training": {"global_batch_size": 2}})
    result = run((1, 1, 1), config, 1, _mask_unevenly)
    per_token = {"training": {"global_batch_size": 2, "calculate_per_token_loss": True}}
    other = run((1, 1, 1), make_config(FLOAT64, per_token), 1, _mask_unevenly)
    # Sample 0 keeps no token and counts as a loss of 0; sample 1 keeps 7.
    assert result.losses[0] == pytest.approx(other.losses[0] / 2, abs=1e-12)


DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


def _documents(folder: Path) -> dict[str, Any]:
    """Write documents of 5 to 11 tokens that end with token 99, and say how to train on them."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "documents", np.uint16) as writer:
        for _ in range(120):
            writer.add_document(np.append(random.integers(0, 99, random.integers(4, 11)), 99).astype(np.uint16))
        writer.finalize()
    data = {"mock_data": False, "data_path": [str(folder / "documents")], "split": "1,0,0"}
    return {"model": {"vocab_size": 100}, "data": {**data, "tokenizer_type": "NullTokenizer"}}


@pytest.mark.parametrize(
    ("topology", "parallel"),
    [
        ((1, 4, 1), {}),
        ((1, 2, 2), {"num_virtual_stages_per_pipeline_rank": 2}),
        ((2, 1, 1), {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_documents_are_kept_apart_on_every_stage(tmp_path: Path, topology: Topology, parallel: dict[str, Any]) -> None:
    changes = (FLOAT64, _documents(tmp_path), {"data": DOCUMENTS})
    expected = run((1, 1, 1), make_config(*changes), 3)
    actual = run(topology, make_config(*changes, {"parallel": parallel}, topology=topology), 3)
    assert actual.losses == pytest.approx(expected.losses, abs=1e-10)
    assert max_difference(actual.state, expected.state) < 1e-9
    together = run((1, 1, 1), make_config(*changes[:2], {"data": {"eod_mask_loss": True}}), 1)
    assert together.losses[0] != expected.losses[0]
