from __future__ import annotations

import pytest

from megalite.config.batch_schedule import BatchSchedule, batch_schedule
from megalite.config.derive import derive
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import config_with

RAMP = ["training.global_batch_size=16", "training.rampup_batch_size=4,4,100"]
# Samples of 32 tokens: the second step begins at 25 samples, the third at 100.
STEPS = ["training.step_batch_size_schedule=0:4 800:6 3200:10"]


def _schedule(*overrides):
    return batch_schedule(config_with(*overrides), data_parallel_size=1)


@pytest.mark.parametrize(("start", "increment", "samples", "total"), [(4, 4, 100, 16), (2, 6, 7, 20), (1, 1, 3, 9)])
def test_a_ramp_follows_the_formula(start, increment, samples, total):
    ramp = f"training.rampup_batch_size={start},{increment},{samples}"
    schedule = _schedule(f"training.global_batch_size={total}", ramp, "training.micro_batch_size=1")
    count = (total - start) // increment
    for consumed in range(2 * samples):
        expected = total if consumed > samples else start + consumed * count // samples * increment
        assert schedule.batch_size(consumed) == expected, consumed
    assert schedule.last == total


def test_steps_begin_at_numbers_of_tokens():
    assert _schedule(*STEPS).steps == ((0, 4), (25, 6), (100, 10))
    text = "training.step_batch_size_schedule=0:768 250B:1536 1T:3072"
    assert _schedule(text, "model.seq_length=4096").steps == (
        (0, 768),
        (250 * 10**9 // 4096, 1536),
        (10**12 // 4096, 3072),
    )
    assert [_schedule(*STEPS).batch_size(n) for n in (0, 24, 25, 99, 100, 10**9)] == [4, 4, 6, 6, 10, 10]


@pytest.mark.parametrize("overrides", [RAMP, STEPS, ["training.global_batch_size=6"]], ids=str)
@pytest.mark.parametrize("start", [0, 3, 30, 99, 100, 500])
def test_counting_is_that_of_the_loop(overrides, start):
    schedule = _schedule(*overrides)
    consumed = start
    for iterations in range(40):
        assert schedule.samples_after(iterations, start) == consumed
        consumed += schedule.batch_size(consumed)


@pytest.mark.parametrize("overrides", [RAMP, STEPS, ["training.global_batch_size=6"]], ids=str)
def test_iterations_of_a_number_of_samples_are_those_that_fit(overrides):
    schedule = _schedule(*overrides)
    for samples in range(1, 300):
        consumed = iterations = 0
        while consumed + schedule.batch_size(consumed) <= samples:
            consumed += schedule.batch_size(consumed)
            iterations += 1
        assert schedule.iterations_until(samples) == iterations, samples


def test_sizes_to_come_leave_out_those_that_are_past():
    schedule = BatchSchedule(((0, 4), (25, 6), (100, 4)))
    assert schedule.sizes_from(0) == [4, 6]
    assert schedule.sizes_from(30) == [6, 4]
    assert schedule.sizes_from(100) == [4]


def test_a_growing_batch_gives_the_length_of_the_run():
    derived = derive(config_with(*RAMP, "training.train_iters=40", "training.micro_batch_size=1"), 2)
    assert derived.global_batch_size == 16 and derived.num_microbatches == 8
    assert derived.train_samples == derived.batches.samples_after(40) < 40 * 16
    assert derived.schedule.lr_decay_steps == derived.train_samples


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.global_batch_size=16", "training.rampup_batch_size=4,5,100"], "grows by 5, which does not lead to"),
        (["training.global_batch_size=16", "training.rampup_batch_size=16,4,100"], "starts at 16 and grows by 4"),
        (["training.step_batch_size_schedule=0:4 25X:6"], "has the entry '25X:6', which is not like 250B:1536"),
        (["training.step_batch_size_schedule=800:4"], r"thresholds are \[25\] in samples; the first has to be 0"),
        (["training.step_batch_size_schedule=0:4 20:6"], r"thresholds are \[0, 0\] in samples"),
        (["training.step_batch_size_schedule=0:4 64:0"], "with a batch size of 0; raise it"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        derive(config_with(*overrides), 1)
