"""A global batch that grows with the consumed samples, skipped iterations, and changed sizes at a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.paths import complete_iterations
from megalite.config.schema import Config
from megalite.training.loop import train
from megalite.training.setup import training_run
from megalite.utils.errors import ConfigError
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import make_config

RAMP = {"training": {"global_batch_size": 8, "rampup_batch_size": [2, 2, 24], "train_iters": 12}}
RAMP_SIZES = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8, 8, 8]
"""k = 3 steps of 8 samples each: sizes 2, 4, 6 and then 8."""


def _run(config: Config, stop_at: int | None = None) -> dict[str, Any]:
    """Run the loop, and record the ordinals of each iteration's samples on this rank, and the rates."""
    with training_run(config) as ctx:
        seen: list[list[int]] = []
        draw = type(ctx.train_batches).__next__

        class Recorder(type(ctx.train_batches)):
            def __next__(self) -> dict:
                batch = draw(self)
                while len(seen) <= ctx.progress.iteration:
                    seen.append([])
                seen[-1].extend(batch["sample_ordinals"].tolist())
                return batch

        ctx.train_batches.__class__ = Recorder
        offset = ctx.progress.iteration
        seen.extend([] for _ in range(offset))
        train(ctx)
        return {
            "samples": seen[offset:],
            "progress": vars(ctx.progress).copy(),
            "schedule": ctx.state.scheduler.num_steps,
            "steps": ctx.state.optimizer.num_steps,
        }


def _global_batches(ranks: list[dict[str, Any]]) -> list[list[int]]:
    return [sorted(sum(parts, [])) for parts in zip(*(rank["samples"] for rank in ranks), strict=True)]


def _contiguous(sizes: list[int], start: int = 0) -> list[list[int]]:
    batches = []
    for size in sizes:
        batches.append(list(range(start, start + size)))
        start += size
    return batches


@pytest.mark.parametrize("dp", [1, 2])
def test_ramped_batches_are_contiguous_for_any_dp(dp: int) -> None:
    ranks = run_on_ranks(dp, _run, make_config(RAMP))
    assert _global_batches(ranks) == _contiguous(RAMP_SIZES)
    assert ranks[0]["progress"]["consumed_train_samples"] == sum(RAMP_SIZES) == ranks[0]["schedule"]


def test_a_step_schedule_counts_tokens() -> None:
    # 32 tokens a sample: from 256 tokens on, which is sample 8, batches of 4.
    settings = {"global_batch_size": None, "step_batch_size_schedule": "0:2 256:4", "train_iters": 6}
    ranks = run_on_ranks(1, _run, make_config({"training": settings}))
    assert _global_batches(ranks) == _contiguous([2, 2, 2, 2, 4, 4])


def test_a_checkpoint_is_saved_before_the_batch_grows(tmp_path: Path) -> None:
    config = make_config(RAMP, {"checkpoint": {"save": str(tmp_path / "run")}})
    run_on_ranks(1, _run, config)
    assert complete_iterations(tmp_path / "run") == [4, 6, 8, 12]


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_a_ramp_goes_on_after_a_resume_at_another_dp(tmp_path: Path, stop: int) -> None:
    saving = {"checkpoint": {"save": str(tmp_path / "run")}, "training": {"exit_interval": stop}}
    first = run_on_ranks(1, _run, make_config(RAMP, saving))
    saving["training"] = {"exit_interval": None}
    second = run_on_ranks(2, _run, make_config(RAMP, saving))
    assert _global_batches(first) + _global_batches(second) == _contiguous(RAMP_SIZES)


def test_dat_15_a_start_size_that_was_left_behind_need_not_fit(tmp_path: Path) -> None:
    saving = {"checkpoint": {"save": str(tmp_path / "run")}, "training": {"exit_interval": 9}}
    run_on_ranks(1, _run, make_config(RAMP, saving))
    saving["training"] = {"exit_interval": None}
    second = run_on_ranks(4, _run, make_config(RAMP, saving))
    assert _global_batches(second) == _contiguous([8, 8, 8], sum(RAMP_SIZES[:9]))


def _expect_refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught, training_run(config):
        pass
    return str(caught.value)


def test_a_size_that_is_still_to_come_has_to_fit() -> None:
    messages = run_on_ranks(4, _expect_refusal, make_config(RAMP))
    assert all("is 2, not a multiple of" in message for message in messages)


@pytest.mark.parametrize("size", [4, 16])
def test_dat_13_a_changed_global_batch_goes_on_where_the_samples_stand(tmp_path: Path, size: int) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    first = run_on_ranks(1, _run, make_config(save, {"training": {"exit_interval": 3}}))
    changed = {"training": {"global_batch_size": size, "train_iters": 6}}
    second = run_on_ranks(1, _run, make_config(save, changed))
    assert _global_batches(first) == _contiguous([8, 8, 8])
    assert _global_batches(second) == _contiguous([size] * 3, 24)


def test_skipped_iterations_consume_their_data() -> None:
    settings = {"training": {"iterations_to_skip": [2, 5], "train_iters": 6}}
    (result,) = run_on_ranks(1, _run, make_config(settings))
    assert [batch[:1] for batch in result["samples"] if batch] == [[0], [16], [24], [40]]
    progress = result["progress"]
    assert (progress["consumed_train_samples"], progress["skipped_train_samples"]) == (48, 16)
    assert (result["steps"], result["schedule"]) == (4, 32)


def test_train_samples_ends_the_run() -> None:
    settings = {"training": {"train_iters": None, "train_samples": 45}}
    (result,) = run_on_ranks(1, _run, make_config(settings))
    assert (result["progress"]["iteration"], result["progress"]["consumed_train_samples"]) == (5, 40)
