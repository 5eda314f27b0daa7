"""Situations of public reports that need a whole trainer; each test bears the report's id."""

from __future__ import annotations

import json
import os
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.paths import iteration_folder, read_tracker
from megalite.config.schema import Config
from megalite.data.indexed_dataset import IndexedDatasetWriter
from megalite.training.context import TrainContext
from megalite.training.evaluate import evaluate
from megalite.training.exit import save_checkpoint
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.errors import MegaliteError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import Topology, local_state, make_config, run_steps

SEQ_LENGTH = 8
NUM_TOKENS = 161
"""20 samples an epoch; every token of the corpus is a different number, so that a sample is known by its tokens."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prefix = tmp_path / "numbers"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for start in range(0, NUM_TOKENS, 23):
            writer.add_document(np.arange(start, min(start + 23, NUM_TOKENS), dtype=np.uint16))
        writer.finalize()
    return prefix


def _config(corpus: Path, *changes: dict[str, Any], topology: Topology = (1, 1, 1)) -> Config:
    data = {
        "model": {"seq_length": SEQ_LENGTH, "vocab_size": 200},
        "data": {"mock_data": False, "data_path": [str(corpus)], "split": "1,0,0", "tokenizer_type": "NullTokenizer"},
        "training": {"train_iters": 15, "global_batch_size": 4, "micro_batch_size": 1},
    }
    return make_config(data, *changes, topology=topology)


def _tokens_seen(config: Config, steps: int) -> list[list[list[int]]]:
    """Run iterations; return for each the samples that this rank trained on."""
    with training_run(config) as ctx:
        seen: list[list[list[int]]] = []
        draw = type(ctx.train_batches).__next__

        class Recorder(type(ctx.train_batches)):
            def __next__(self) -> dict[str, torch.Tensor]:
                batch = draw(self)
                seen[-1].extend(batch["tokens"].tolist())
                return batch

        ctx.train_batches.__class__ = Recorder
        for _ in range(steps):
            seen.append([])
            run_steps(ctx, 1)
        return seen


def _global_batches(ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    return [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("stop", [3, 7, 9])
def test_dat_01_03_04_07_16_samples_go_on_over_epochs(corpus: Path, tmp_path: Path, stop: int) -> None:
    """DAT-01, DAT-03, DAT-04, DAT-07, DAT-16: stopped in the middle or near the end of an epoch, on 1 and 2 ranks."""
    whole = _global_batches(run_on_ranks(1, _tokens_seen, _config(corpus), 15))
    for ranks in (1, 2):
        save = {"checkpoint": {"save": str(tmp_path / f"run{ranks}"), "save_interval": stop}}
        first = run_on_ranks(ranks, _tokens_seen, _config(corpus, save), stop)
        second = run_on_ranks(ranks, _tokens_seen, _config(corpus, save), 15 - stop)
        assert _global_batches(first) + _global_batches(second) == whole
    # Another permutation in each epoch, and each sample once in it; the last epoch is shuffled by itself.
    epochs = [[tuple(sample) for batch in whole[start : start + 5] for sample in batch] for start in (0, 5, 10)]
    assert len(set(sum(epochs, []))) > 20 and epochs[0] != epochs[1]


def test_dat_06_a_missing_position_is_an_error(corpus: Path, tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 2}}
    run_on_ranks(2, _tokens_seen, _config(corpus, save), 2)
    common = iteration_folder(tmp_path / "run", 2) / "common.pt"
    common.unlink()
    assert all("common.pt" in text for text in run_on_ranks(2, _refusal, _config(corpus, save)))


def _refusal(config: Config) -> str:
    with pytest.raises(MegaliteError) as caught, training_run(config):
        pass
    return f"{caught.value.exit_status}: {caught.value}"


def test_dat_09_no_sample_twice_in_a_global_batch(corpus: Path) -> None:
    """DAT-09: 3 ranks, an epoch whose length they do not divide: all change epoch together."""
    settings = {"training": {"global_batch_size": 6, "micro_batch_size": 2, "train_iters": 9}}
    batches = _global_batches(run_on_ranks(3, _tokens_seen, _config(corpus, settings), 9))
    assert all(len(batch) == 6 for batch in batches)
    assert batches == _global_batches(run_on_ranks(1, _tokens_seen, _config(corpus, settings), 9))


def test_dat_10_order_does_not_depend_on_dp_or_workers(corpus: Path) -> None:
    runs = [
        _global_batches(run_on_ranks(dp, _tokens_seen, _config(corpus, {"data": {"num_workers": workers}}), 8))
        for dp, workers in ((1, 0), (2, 0), (4, 0), (2, 2))
    ]
    assert all(run == runs[0] for run in runs)


def test_dat_12_a_changed_sequence_length_is_refused(corpus: Path, tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 2}}
    run_on_ranks(1, _tokens_seen, _config(corpus, save), 2)
    longer = {"model": {"seq_length": 16, "max_position_embeddings": 16}}
    (text,) = run_on_ranks(1, _refusal, _config(corpus, save, longer))
    assert text.startswith("3: ") and "seq_length is 8 in the checkpoint and 16 in this run" in text


def test_dat_18_micro_batches_of_a_step_are_distinct(corpus: Path) -> None:
    (steps,) = run_on_ranks(1, _tokens_seen, _config(corpus), 5)
    assert all(len({tuple(sample) for sample in step}) == 4 for step in steps)


@pytest.mark.parametrize("name", ["with blanks", "\u6570\u636e", "100% 'quoted' \"too\"", "a;b&c"])
def test_tok_15_paths_may_have_any_characters(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with IndexedDatasetWriter(folder / name, np.uint16) as writer:
        writer.add_document(np.arange(NUM_TOKENS, dtype=np.uint16))
        writer.finalize()
    save = {"checkpoint": {"save": str(folder / "runs" / name), "save_interval": 1}}
    cache = {"data": {"data_cache_path": str(folder / "cache")}}
    for end in (2, 4):
        config = _config(folder / name, save, cache)
        assert run_on_ranks(1, _save_and_say, config, 2) == [end]
    assert read_tracker(folder / "runs" / name) == 4


# Configuration


def _save_and_say(config: Config, steps: int) -> int:
    with training_run(config) as ctx:
        run_steps(ctx, steps)
        return ctx.progress.iteration


def _saved(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    folder = tmp_path / "run"
    run_on_ranks(1, _save_and_say, make_config({"checkpoint": {"save": str(folder), "save_interval": 2}}, *changes), 2)
    return folder


def test_cfg_01_a_typo_in_the_path_stops_the_run(tmp_path: Path) -> None:
    texts = run_on_ranks(2, _refusal, make_config({"checkpoint": {"load": str(tmp_path / "rnu")}}))
    assert all(text.startswith("3: ") and "no checkpoint in" in text for text in texts)


def test_cfg_03_an_unreadable_shard_stops_the_run(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    shard = next(iteration_folder(folder, 2).glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    texts = run_on_ranks(2, _refusal, make_config({"checkpoint": {"save": str(folder)}}))
    assert all(text.startswith("3: ") and shard.name in text for text in texts)
    assert read_tracker(folder) == 2


def test_cfg_04_other_levels_of_the_folder_are_named(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    for load, hint in ((folder / "iter_0000002", str(folder)), (tmp_path, str(folder))):
        (text,) = run_on_ranks(1, _refusal, make_config({"checkpoint": {"load": str(load)}}))
        assert text.startswith("3: ") and hint in text


@pytest.mark.parametrize("layers", [2, 6])
def test_cfg_06_another_number_of_layers_is_refused(tmp_path: Path, layers: int) -> None:
    folder = _saved(tmp_path)
    changed = make_config({"checkpoint": {"load": str(folder)}, "model": {"num_layers": layers}})
    (text,) = run_on_ranks(1, _refusal, changed)
    assert f"num_layers is 4 in the checkpoint and {layers} in this run" in text


def _rate_and_seed(config: Config) -> tuple[float, int]:
    with training_run(config) as ctx:
        return ctx.state.scheduler.lr, ctx.config.training.seed


def test_cfg_07_explicit_values_win_over_the_checkpoint(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    wanted = {"lr": 5e-4, "override_opt_param_scheduler": True}
    config = make_config({"checkpoint": {"save": str(folder)}, "optimizer": wanted})
    assert run_on_ranks(1, _rate_and_seed, config)[0][0] == 5e-4
    # Without the override the difference is an error that shows both values, not a choice in silence.
    refused = make_config({"checkpoint": {"save": str(folder)}, "optimizer": {"lr": 5e-4}})
    assert "max_lr 0.002 -> 0.0005" in run_on_ranks(1, _refusal, refused)[0]


def _poison(ctx: TrainContext, iteration: int, rank: int, value: float) -> None:
    chunk = ctx.state.chunks[0]
    start = chunk.start_last_backward

    def start_last_backward() -> None:
        start()
        if ctx.progress.iteration == iteration and ctx.parallel.world.rank == rank:
            next(parameter for _, parameter in chunk.parameters()).main_grad.view(-1)[3] = value

    chunk.start_last_backward = start_last_backward


def _run_poisoned(config: Config, value: float, steps: int) -> tuple[list[bool], int, bool]:
    with training_run(config) as ctx:
        _poison(ctx, 2, ctx.parallel.world.size - 1, value)
        outputs = run_steps(ctx, steps)
        finite = all(torch.isfinite(tensor).all().item() for _, tensor in local_state(ctx).weights.values())
        return [output.updated for output in outputs], ctx.progress.skipped_iterations, finite


@pytest.mark.parametrize("value", [float("nan"), inf])
@pytest.mark.parametrize("topology", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_cfg_10_a_bad_gradient_on_one_rank_is_skipped_on_all(topology: Topology, value: float) -> None:
    config = make_config({"resilience": {"check_for_nan_in_loss_and_grad": False}}, topology=topology)
    for updated, skipped, finite in run_on_ranks(prod(topology), _run_poisoned, config, value, 4):
        assert (updated, skipped, finite) == ([True, True, False, True], 1, True)


def _stopped_by_poison(config: Config) -> str:
    with training_run(config) as ctx:
        _poison(ctx, 2, 1, float("nan"))
        with pytest.raises(MegaliteError) as caught:
            run_steps(ctx, 4)
        return f"{ctx.progress.iteration}: {caught.value}"


def test_cfg_10_a_bad_gradient_stops_the_run_by_default() -> None:
    texts = run_on_ranks(2, _stopped_by_poison, make_config(topology=(2, 1, 1)))
    assert all(text.startswith("2: the gradient norm of iteration 3 ") for text in texts)


def test_cfg_09_nothing_is_saved_in_the_middle_of_a_bad_step(tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run"), "save_interval": 1}}
    run_on_ranks(2, _stopped_by_poison, make_config(save, topology=(2, 1, 1)))
    assert read_tracker(tmp_path / "run") == 2
    assert run_on_ranks(2, _save_and_say, make_config(save, topology=(2, 1, 1)), 2) == [4, 4]


def _train(config: Config) -> int:
    with training_run(config) as ctx:
        train(ctx)
        return ctx.progress.iteration


def test_cfg_15_no_validation_without_validation_data(corpus: Path) -> None:
    settings = {"training": {"eval_interval": 1, "eval_iters": 0, "train_iters": 2}}
    assert run_on_ranks(1, _train, _config(corpus, settings)) == [2]


def test_cfg_16_nothing_is_written_when_saving_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"checkpoint": {"save": None, "save_interval": None}, "training": {"train_iters": 2}}
    assert run_on_ranks(1, _train, make_config(settings)) == [2]
    assert list(tmp_path.iterdir()) == []


# Logging


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_log_01_03_04_iterations_and_run_id_go_on(tmp_path: Path) -> None:
    """LOG-01, LOG-03, LOG-04: steps continue, a save is logged under its own iteration, the run keeps its id."""
    folder = tmp_path / "run"
    for stop in (3, 6, None):
        settings = {"train_iters": 8, "exit_interval": stop}
        config = make_config({"checkpoint": {"save": str(folder)}, "training": settings})
        run_on_ranks(1, _train, config)
    records = _records(folder)
    assert [r["iteration"] for r in records if "train/loss" in r] == list(range(1, 9))
    assert [r["iteration"] for r in records if "checkpoint/save_s" in r] == [3, 6, 8]
    starts = [r for r in records if r.get("run/event") == "start"]
    assert [r["iteration"] for r in starts] == [0, 3, 6]
    assert len({r["run/id"] for r in starts}) == 1


def test_a_new_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    first = _saved(tmp_path)
    config = make_config({"checkpoint": {"load": str(first), "save": str(tmp_path / "other")}})
    run_on_ranks(1, _save_and_say, config, 1)
    ids = [_records(folder)[0]["run/id"] for folder in (first, tmp_path / "other")]
    assert ids[0] != ids[1]


def _validate(config: Config, times: int) -> tuple[dict[str, float], dict[str, int]]:
    with training_run(config) as ctx:
        run_steps(ctx, 1)
        for _ in range(times):
            losses = evaluate(ctx)
        save_checkpoint(ctx)
        return losses, ctx.progress.consumed_valid_samples


@pytest.mark.parametrize("pp", [1, 2])
def test_log_06_validation_sets_have_positions_of_their_own(corpus: Path, tmp_path: Path, pp: int) -> None:
    other = tmp_path / "other"
    with IndexedDatasetWriter(other, np.uint16) as writer:
        writer.add_document(np.arange(NUM_TOKENS, dtype=np.uint16)[::-1].copy())
        writer.finalize()

    def config(folder: str, names: list[Path]) -> Config:
        data = {
            "data_path": None,
            "split": None,
            "train_data_path": [str(corpus)],
            "valid_data_path": [str(name) for name in names],
            "multiple_validation_sets": True,
        }
        training = {"eval_interval": 1, "eval_iters": 1}
        save = {"checkpoint": {"save": str(tmp_path / folder)}}
        return _config(corpus, {"data": data, "training": training}, save, topology=(1, pp, 1))

    both = [corpus, other]
    (whole, positions), *_ = run_on_ranks(pp, _validate, config("whole", both), 3)
    assert len(whole) == 2 and len(set(whole.values())) == 2 and set(positions.values()) == {12}
    # The second set joins at the resume: it starts at its beginning while the first goes on.
    run_on_ranks(pp, _validate, config("joined", [corpus]), 2)
    (joined, positions), *_ = run_on_ranks(pp, _validate, config("joined", both), 1)
    assert sorted(positions.values()) == [4, 12]
    assert joined.keys() == whole.keys()
