"""Which rank gets which sample, and that the loader follows it whatever its workers do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.data.samplers import BatchLoader, sample_indices
from megalite.utils.errors import DataError


class Numbers:
    """Sample i holds i, and the process that made it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([index, index]), "pid": torch.tensor(os.getpid())}


def loader(size=40, mb=2, rank=0, dp=1, **options):
    return BatchLoader(Numbers(size), micro_batch_size=mb, dp_rank=rank, dp_size=dp, **options)


def test_micro_batches_of_a_step():
    # consumed 100, micro-batch 2, DP 3: a micro-step takes six samples, rank 1 the middle two.
    assert list(sample_indices(100, 0, 2, 1, 3)) == [102, 103]
    assert list(sample_indices(100, 2, 2, 1, 3)) == [114, 115]


@pytest.mark.parametrize("mb, dp", [(1, 1), (2, 1), (8, 1), (1, 2), (2, 4), (1, 8), (4, 2)])
def test_a_global_batch_is_the_same_samples_for_every_dp_and_micro_batch(mb, dp):
    drawn = []
    for m in range(8 // (mb * dp)):
        for rank in range(dp):
            drawn += sample_indices(24, m, mb, rank, dp)
    assert drawn == list(range(24, 32))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_arithmetic_and_carry_ordinals(workers):
    batches = loader(rank=1, dp=2, consumed_samples=8, num_workers=workers)
    for m in range(4):
        batch = next(batches)
        expected = list(sample_indices(8, m, 2, 1, 2))
        assert batch["sample_ordinals"].tolist() == expected and batch["sample_ordinals"].dtype == torch.int64
        assert batch["tokens"].tolist() == [[i, i] for i in expected]
        assert (batch["pid"][0].item() == os.getpid()) == (workers == 0)
        assert batches.position == 8 + 4 * (m + 1)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_position_can_be_set_while_workers_read_ahead(workers):
    batches = loader(num_workers=workers)
    seen = [next(batches)["sample_ordinals"].tolist() for _ in range(3)]
    batches.set_position(20)
    seen.append(next(batches)["sample_ordinals"].tolist())
    batches.set_position(batches.position)
    seen.append(next(batches)["sample_ordinals"].tolist())
    batches.set_position(0)
    seen.append(next(batches)["sample_ordinals"].tolist())
    assert seen == [[0, 1], [2, 3], [4, 5], [20, 21], [22, 23], [0, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_ranks_run_out_at_the_same_step(workers):
    # Ten samples, micro-batch 2, DP 3: six to a step. Ranks 0 and 1 could fill a second micro-batch, rank 2 could not.
    for rank in range(3):
        batches = loader(size=10, rank=rank, dp=3, num_workers=workers)
        next(batches)
        with pytest.raises(DataError, match=r"train data has 10 samples.*at sample 6 need 12"):
            next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_random_number_of_the_process_is_used(workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    next(loader(num_workers=workers))
    assert torch.equal(before, torch.get_rng_state())


def test_workers_leave_signals_to_the_rank():
    batches = loader(num_workers=1)
    worker = next(batches)["pid"][0].item()
    for name in ("TERM", "INT", "USR1", "TERM"):
        # From another process, as a scheduler does it.
        subprocess.run(["sh", "-c", f"kill -{name} {worker}"], check=True)
    for _ in range(10):
        assert next(batches)["pid"][0].item() == worker


EXITING = """
from tests.unit.data.test_samplers import loader
batches = loader(num_workers=2)
next(batches)
batches.itself = batches
raise SystemExit(5)
"""


def test_a_process_with_workers_can_exit():
    # Within the time a scheduler gives; the loader is in a cycle, so that nothing but the exit itself ends its workers.
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", EXITING], cwd=root, timeout=30).returncode == 5


def _failing(text: str):
    raise RuntimeError(text)
    yield


def test_a_dead_worker_is_a_data_error():
    # Not with a worker that is killed: torch then raises from a signal handler, wherever the process happens to be.
    batches = loader()
    batches._batches = _failing("DataLoader worker (pid 5) is killed by signal: Killed.")
    with pytest.raises(DataError, match=r"a loader process of the train data died at sample 0.*data\.num_workers"):
        next(batches)
    batches._batches = _failing("something else")
    with pytest.raises(RuntimeError, match="something else"):
        next(batches)
