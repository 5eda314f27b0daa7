"""A global batch that grows with the consumed samples, skipped iterations, and changed sizes at a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.paths import complete_iterations
from megalite.config.schema import Config
from megalite.training.evaluate import evaluate
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


def _validated(config: Config) -> tuple[list[list[int]], float]:
    """Validate twice; return the ordinals this rank saw in each, and the last loss."""
    with training_run(config) as ctx:
        seen: list[list[int]] = []
        batches = ctx.valid_batches["valid"]
        if batches is not None:
            draw = type(batches).__next__

            class Recorder(type(batches)):
                def __next__(self) -> dict:
                    batch = draw(self)
                    seen[-1].extend(batch["sample_ordinals"].tolist())
                    return batch

            batches.__class__ = Recorder
        losses = []
        for _ in range(2):
            seen.append([])
            losses.append(evaluate(ctx)["valid"])
        return seen, losses[-1]


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (1, 2), (2, 1)])
def test_validation_has_batches_of_its_own(pp: int, dp: int) -> None:
    training = {"eval_interval": 5, "eval_iters": 3, "eval_micro_batch_size": 2, "eval_global_batch_size": 4}
    config = make_config({"training": training}, topology=(1, pp, dp))
    ranks = run_on_ranks(pp * dp, _validated, config)
    for validation in (0, 1):
        # Both stages of a pipeline see the same samples; data-parallel ranks see parts of them.
        parts = [seen[validation] for seen, _ in ranks[:dp]]
        assert sorted(sum(parts, [])) == list(range(12 * validation, 12 * validation + 12))
    single = run_on_ranks(1, _validated, make_config({"training": training}))
    assert [loss for _, loss in ranks] == pytest.approx([single[0][1]] * len(ranks), abs=1e-6)


def _end_of(config: Config) -> tuple[int, int]:
    with training_run(config) as ctx:
        train(ctx)
        return ctx.progress.iteration, ctx.reporter.train_iters


def test_train_samples_with_a_larger_batch_after_a_resume(tmp_path: Path) -> None:
    save = {"checkpoint": {"save": str(tmp_path / "run")}}
    length = {"train_iters": None, "train_samples": 96, "eval_interval": 2, "eval_iters": 1}
    first = {**length, "global_batch_size": 8, "exit_interval": 8}
    assert run_on_ranks(1, _end_of, make_config(save, {"training": first})) == [(8, 12)]
    # 64 samples are done; 32 are left, which is two iterations of 16, with a validation each.
    second = {**length, "global_batch_size": 16}
    assert run_on_ranks(1, _end_of, make_config(save, {"training": second})) == [(10, 10)]
