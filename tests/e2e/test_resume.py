"""The same command again: a run in pieces is the unbroken run, on as many ranks as there are, to its last iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.checkpoint.paths import complete_iterations, read_tracker
from megalite.config.cli import parse_command_line
from megalite.data.indexed_dataset import IndexedDatasetWriter
from megalite.training.setup import training_run
from tests.helpers.torchrun import TINY, Job, losses, run_job

RunMain = Callable[[Sequence[str]], int]

DROPOUT = ("--model.hidden_dropout=0.1", "--model.attention_dropout=0.1")
SCHEDULE = ("--optimizer.lr_decay_style=cosine", "--optimizer.lr_warmup_iters=2", "--training.train_iters=12")


def test_same_command_three_times_is_the_unbroken_run(tmp_path: Path) -> None:
    command = [*TINY, *DROPOUT, *SCHEDULE]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert run_job(tmp_path / "unbroken", [*command, f"--checkpoint.save={whole}"]).status == 0
    command += ["--training.exit_interval=4", f"--checkpoint.save={pieces}"]
    for number, stop in enumerate((4, 8, 12)):
        result = run_job(tmp_path / f"piece{number}", command)
        assert (result.status, result.stopped_at[0]) == (0, stop)
        assert (read_tracker(pieces), max(losses(pieces))) == (stop, stop)
    expected = losses(whole)
    assert sorted(expected) == list(range(1, 13))
    assert len(set(expected.values())) == 12
    # Bit for bit: JSON keeps every digit of a float.
    assert losses(pieces) == expected
    # A fourth time there is nothing to do, and nothing is written again.
    before = (pieces / "iter_0000012" / "metadata.json").stat()
    assert run_job(tmp_path / "fourth", command).stopped_at == (12, "all iterations are done")
    after = (pieces / "iter_0000012" / "metadata.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert losses(pieces) == expected


def test_run_goes_on_over_changing_topologies(run_main: RunMain, tmp_path: Path) -> None:
    save, unbroken = tmp_path / "run", tmp_path / "unbroken"
    # Without dropout, whose masks are drawn anew where the grid of ranks changes.
    command = [*TINY, "--model.hidden_dropout=0", "--model.attention_dropout=0", "--training.train_iters=9"]
    assert run_main([*command, f"--checkpoint.save={unbroken}"]) == 0
    command += [f"--checkpoint.save={save}", "--training.exit_interval=3"]
    for number, (topology, arguments) in enumerate(
        (
            ((2, 1, 1), ["--parallel.tensor_model_parallel_size=2", "--parallel.sequence_parallel=true"]),
            ((1, 2, 1), ["--parallel.pipeline_model_parallel_size=2"]),
            ((1, 1, 1), []),
        ),
        start=1,
    ):
        tp, pp, dp = topology
        with Job(tmp_path / f"job{number}", *command, *arguments, num_ranks=tp * pp * dp) as job:
            result = job.finish()
        assert result.status == 0, str(result)
        assert set(result.rank_statuses.values()) == {0}
        assert result.stopped_at[0] == read_tracker(save) == 3 * number
        assert f"TP={tp} PP={pp} DP={dp} on {tp * pp * dp} rank(s)" in result.stderr[0]
    # Each iteration once, with the losses of one rank but for the order of sums.
    assert losses(save) == pytest.approx(losses(unbroken), abs=1e-4)
    assert len(losses(save)) == 9


# The data order of a run that is made longer


def _corpus(prefix: Path) -> None:
    random = np.random.default_rng(5)
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(6):
            writer.add_document(random.integers(0, 256, 60))
        writer.finalize()


def _reading(tmp_path: Path) -> list[str]:
    data = ["--data.mock_data=false", f"--data.data_path={tmp_path / 'corpus'}", "--data.split=1,0,0"]
    return [*TINY, *data, f"--checkpoint.save={tmp_path / 'run'}"]


def _samples(arguments: Sequence[str], first: int, last: int) -> list[torch.Tensor]:
    """The tokens of samples [first, last) as a run with these arguments would see them; it is not advanced."""
    threads = torch.get_num_threads()
    with training_run(parse_command_line(arguments).config) as ctx:
        torch.set_num_threads(threads)
        batch_size = ctx.derived.micro_batch_size
        ctx.train_batches.set_position(first)
        batches = [next(ctx.train_batches)["tokens"] for _ in range((last - first) // batch_size)]
        return list(torch.cat(batches))


def test_longer_run_keeps_the_order_that_was_defined(run_main: RunMain, tmp_path: Path) -> None:
    _corpus(tmp_path / "corpus")
    short = [*_reading(tmp_path), "--training.train_iters=8"]
    defined = _samples([*short, "--checkpoint.save=null"], 0, 32)
    assert run_main([*short, "--training.exit_interval=5"]) == 0
    longer = [*_reading(tmp_path), "--training.train_iters=30"]
    extended = _samples(longer, 0, 120)
    assert all(torch.equal(a, b) for a, b in zip(defined, extended[:32], strict=True))
    # A run that is 30 iterations long from its start has another order: without the sizes that the checkpoint keeps,
    # the resumed run would go on in that one.
    fresh = _samples([*longer, "--checkpoint.save=null"], 0, 32)
    assert not all(torch.equal(a, b) for a, b in zip(defined, fresh, strict=True))
    assert run_main(longer) == 0
    assert sorted(losses(tmp_path / "run")) == list(range(1, 31))
    assert read_tracker(tmp_path / "run") == 30


def test_longer_run_has_the_losses_of_the_defined_order(run_main: RunMain, tmp_path: Path) -> None:
    """Iterations 6 to 8 of a run stopped at 5 and made longer are those of the short run."""
    _corpus(tmp_path / "corpus")
    command = _reading(tmp_path)
    assert run_main([*command, "--training.train_iters=8"]) == 0
    expected = losses(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "short")
    assert run_main([*command, "--training.train_iters=8", "--training.exit_interval=5"]) == 0
    assert run_main([*command, "--training.train_iters=30", "--training.exit_interval=9"]) == 0
    found = losses(tmp_path / "run")
    assert sorted(found) == list(range(1, 10))
    assert {iteration: found[iteration] for iteration in expected} == expected


# The last iteration


@pytest.mark.parametrize(
    ("interval", "saved"), [("5", [5, 10, 13]), ("13", [13]), ("null", [13])], ids=["5", "13", "none"]
)
def test_last_iteration_is_saved_once(
    run_main: RunMain, tmp_path: Path, capfd: pytest.CaptureFixture[str], interval: str, saved: list[int]
) -> None:
    save = tmp_path / "run"
    arguments = [f"--checkpoint.save={save}", "--training.train_iters=13", f"--checkpoint.save_interval={interval}"]
    assert run_main([*TINY, *arguments]) == 0
    assert (read_tracker(save), complete_iterations(save)) == (13, saved)
    written = [line for line in capfd.readouterr().err.splitlines() if line.startswith("saved iteration")]
    assert [int(line.split()[2]) for line in written] == saved
