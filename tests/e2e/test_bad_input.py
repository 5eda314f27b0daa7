"""What cannot work ends with one message that says what, where and what to do, and with the documented status."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.checkpoint.paths import complete_iterations, read_tracker
from megalite.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path
from tests.helpers.rank_main import FILE_SIZE_LIMIT
from tests.helpers.torchrun import TINY, Finished, losses, run_job

CONFIGURATION, DATA_OR_CHECKPOINT, SAVE, OTHER = 2, 3, 4, 1
NOT_SAVED = "--checkpoint.save=null"

RunMain = Callable[[Sequence[str]], int]


def _iterations(count: int) -> str:
    return f"--training.train_iters={count}"


def _assert_one_message(stderr: str, fragments: Sequence[str], rank: int = 0) -> None:
    messages = re.findall(rf"^\[rank {rank}\] ERROR: (.*)$", stderr, re.MULTILINE)
    assert len(messages) == 1, stderr
    assert "Traceback" not in stderr
    for fragment in fragments:
        assert fragment in messages[0]


def _assert_all_ranks_refused(result: Finished, status: int) -> None:
    assert (result.status, result.rank_statuses) == (1, {0: status, 1: status}), str(result)
    # Else the process could abort at its end, with another status.
    assert not any(result.num_gloo_threads.values())


@pytest.fixture
def refuse(run_main: RunMain, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run in this process, and expect a status and one message with all ``fragments``."""

    def check(status: int, arguments: Sequence[str], *fragments: str) -> None:
        capfd.readouterr()
        assert run_main(arguments) == status
        _assert_one_message(capfd.readouterr().err, fragments)

    return check


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Configuration: status 2


@pytest.mark.parametrize(
    ("argument", "fragments"),
    [
        ("--model.hiden_size=32", ["unknown key 'model.hiden_size'", "did you mean 'hidden_size'?"]),
        (
            "--parallel.tensor_model_parallel_size=3",
            ["num_attention_heads is 4", "parallel.tensor_model_parallel_size 3", "gpt2_tiny.yaml:5", "change one"],
        ),
        (
            "--parallel.pipeline_model_parallel_size=4",
            ["pipeline_model_parallel_size is 4", "more stages than layers", "num_layers 2", "use fewer stages"],
        ),
        (
            "--parallel.tensor_model_parallel_size=2",
            ["the run has 1 ranks", "parallel.tensor_model_parallel_size 2", "start it on 2 ranks"],
        ),
    ],
)
def test_contradicting_settings_are_refused(
    refuse: Callable[..., None], argument: str, fragments: Sequence[str]
) -> None:
    refuse(CONFIGURATION, [*TINY, NOT_SAVED, argument], *fragments)


def test_missing_configuration_file_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    refuse(CONFIGURATION, [path], path, "No such file or directory", "check the path")


def test_misspelt_key_in_a_file_is_refused_with_its_line(refuse: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(Path(TINY[0]).read_text().replace("save_interval", "save_intervall"))
    refuse(CONFIGURATION, [str(path)], f"{path}:21", "'checkpoint.save_intervall'", "did you mean 'save_interval'?")


@pytest.mark.parametrize("below", ["", "below"])
def test_save_folder_that_is_a_file_is_refused(refuse: Callable[..., None], tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    save = tmp_path / "file" / below
    arguments = [*TINY, f"--checkpoint.save={save}"]
    refuse(CONFIGURATION, arguments, "checkpoint.save is", str(save), "is a file, not a folder", "name a folder")
    assert (tmp_path / "file").read_text() == "precious"


def test_every_rank_explains_what_one_rank_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    result = run_job(tmp_path / "job", [*TINY, f"--checkpoint.save={tmp_path / 'file'}"], num_ranks=2)
    _assert_all_ranks_refused(result, CONFIGURATION)
    for rank, stderr in result.stderr.items():
        _assert_one_message(stderr, [f"{tmp_path / 'file'}, which is a file", "name a folder or remove"], rank)


@pytest.mark.slow
def test_contradicting_settings_are_refused_under_torchrun(tmp_path: Path) -> None:
    arguments = [*TINY, NOT_SAVED, "--model.num_attention_heads=1", "--parallel.tensor_model_parallel_size=2"]
    result = run_job(tmp_path / "job", arguments, num_ranks=2)
    assert result.status == 1
    # Each rank finds this for itself, and torchrun ends the others when the first one has left.
    assert set(result.rank_statuses.values()) == {CONFIGURATION}
    for rank in result.rank_statuses:
        _assert_one_message(result.stderr[rank], ["num_attention_heads is 1"], rank)


def test_help_is_no_error(tmp_path: Path) -> None:
    result = run_job(tmp_path / "job", ["--help"])
    assert result.status == 0
    assert "usage: torchrun" in result.output
    assert "checkpoint.save_interval: int" in result.output


# Data: status 3


def _corpus(prefix: Path, num_documents: int = 4, num_ids: int = 257) -> Path:
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(num_documents):
            writer.add_document(np.arange(1000) % num_ids)
        writer.finalize()
    return prefix


def _reading(prefix: Path) -> list[str]:
    data = ["--data.mock_data=false", f"--data.data_path={prefix}", "--data.split=1"]
    return [*TINY, NOT_SAVED, _iterations(2), *data]


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_token_beyond_the_vocabulary_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    prefix = _corpus(tmp_path / "corpus", num_ids=300)
    expected = [
        "token id 257",
        "the vocabulary has 257 ids",
        "the largest id is 299",
        "Set model.vocab_size to at least",
    ]
    refuse(DATA_OR_CHECKPOINT, _reading(prefix), str(bin_path(prefix)), *expected)


def test_token_beyond_the_vocabulary_is_refused_on_tensor_parallel_ranks(tmp_path: Path) -> None:
    prefix = _corpus(tmp_path / "corpus", num_ids=300)
    arguments = [*_reading(prefix), "--parallel.tensor_model_parallel_size=2"]
    result = run_job(tmp_path / "job", arguments, num_ranks=2)
    _assert_all_ranks_refused(result, DATA_OR_CHECKPOINT)
    for rank, stderr in result.stderr.items():
        _assert_one_message(stderr, [str(bin_path(prefix)), "token id 257", "has 257 ids", "at least 300"], rank)


def test_truncated_tokens_are_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    prefix = _corpus(tmp_path / "corpus")
    _cut(bin_path(prefix), 100)
    refuse(DATA_OR_CHECKPOINT, _reading(prefix), str(bin_path(prefix)), "has 7900 bytes", "needs 8000", "Copy the file")


def test_truncated_index_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    prefix = _corpus(tmp_path / "corpus")
    _cut(idx_path(prefix), 9)
    refuse(DATA_OR_CHECKPOINT, _reading(prefix), str(idx_path(prefix)), "has 113 bytes", "need 122", "Copy the file")


def test_empty_corpus_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    prefix = _corpus(tmp_path / "corpus", num_documents=0)
    refuse(DATA_OR_CHECKPOINT, _reading(prefix), str(prefix), "0 sequences and no token", "documents with text")


def test_missing_corpus_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    prefix = tmp_path / "none"
    refuse(DATA_OR_CHECKPOINT, _reading(prefix), f"{prefix}.idx", "No such file", "Set data.data_path")


# Checkpoints: status 3


@pytest.fixture
def saved(run_main: RunMain, tmp_path: Path) -> Path:
    """A save folder with iteration 2."""
    assert run_main([*TINY, _iterations(2), f"--checkpoint.save={tmp_path / 'run'}"]) == 0
    return tmp_path / "run"


def test_changed_model_is_refused_at_resume(refuse: Callable[..., None], saved: Path) -> None:
    before = _contents(saved)
    arguments = [*TINY, _iterations(4), f"--checkpoint.save={saved}", "--model.hidden_size=64"]
    expected = ["hidden_size is 32 in the checkpoint and 64 in this run", "Set the model section"]
    refuse(DATA_OR_CHECKPOINT, arguments, str(saved / "iter_0000002"), *expected)
    assert _contents(saved) == before


@pytest.mark.parametrize("exists", [True, False])
def test_named_checkpoint_that_is_not_there_is_refused(
    refuse: Callable[..., None], tmp_path: Path, exists: bool
) -> None:
    folder = tmp_path / "none"
    if exists:
        folder.mkdir()
    arguments = [*TINY, NOT_SAVED, _iterations(2), f"--checkpoint.load={folder}"]
    refuse(DATA_OR_CHECKPOINT, arguments, f"no checkpoint in {folder}", "exit_on_missing_checkpoint to false")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _halve(path: Path) -> None:
    _cut(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_flip, _halve, Path.unlink], ids=["flipped byte", "half", "missing"])
def test_damaged_checkpoint_is_refused_and_not_overwritten(
    refuse: Callable[..., None], saved: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for name in ("__0_0.distcp", ".metadata", "common.pt", "metadata.json"):
        copy = tmp_path / name
        shutil.copytree(saved, copy)
        damage(copy / "iter_0000002" / name)
        before = _contents(copy)
        refuse(DATA_OR_CHECKPOINT, [*TINY, _iterations(4), f"--checkpoint.save={copy}"], str(copy), name)
        assert _contents(copy) == before


def test_damaged_checkpoint_is_refused_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    _flip(saved / "iter_0000002" / "__0_0.distcp")
    before = _contents(saved)
    result = run_job(tmp_path / "job", [*TINY, _iterations(4), f"--checkpoint.save={saved}"], num_ranks=2)
    _assert_all_ranks_refused(result, DATA_OR_CHECKPOINT)
    for rank, stderr in result.stderr.items():
        _assert_one_message(stderr, ["is damaged: bytes", "of __0_0.distcp have hash", "use another checkpoint"], rank)
    assert _contents(saved) == before


def test_damaged_step_is_replaced_by_an_older_one_if_asked_to(
    run_main: RunMain, refuse: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run"
    arguments = [
        *TINY,
        f"--checkpoint.save={save}",
        "--checkpoint.save_interval=2",
        "--checkpoint.fallback=newest_complete",
    ]
    assert run_main([*arguments, _iterations(6)]) == 0
    unbroken = losses(save)
    # Metrics are appended; what is done again is there again.
    (save / "metrics.jsonl").unlink()
    _flip(save / "iter_0000006" / "common.pt")
    (save / "iter_0000004" / "metadata.json").unlink()
    before = _contents(save / "iter_0000002")
    capfd.readouterr()
    assert run_main([*arguments, _iterations(8)]) == 0
    shown = capfd.readouterr().err
    warnings = [line for line in shown.splitlines() if "WARNING" in line]
    # The unfinished one is no candidate, and so is not refused.
    assert len(warnings) == 1 and "iteration 6 in" in warnings[0] and "common.pt is damaged" in warnings[0]
    assert f"loaded iteration 2 from {save / 'iter_0000002'}" in shown
    assert (read_tracker(save), complete_iterations(save)) == (8, [2, 4, 6, 8])
    again = losses(save)
    assert sorted(again) == list(range(3, 9))
    assert all(again[iteration] == unbroken[iteration] for iteration in range(3, 7))
    assert _contents(save / "iter_0000002") == before
    for iteration in complete_iterations(save):
        _flip(save / f"iter_{iteration:07d}" / "common.pt")
    before = _contents(save)
    refuse(
        DATA_OR_CHECKPOINT, [*arguments, _iterations(10)], f"no step of {save} can be loaded: 8, 6, 4, 2 are damaged"
    )
    assert _contents(save) == before


def test_model_of_the_checkpoint_is_taken_from_the_command_line(
    run_main: RunMain, refuse: Callable[..., None], saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = Path(TINY[0]).read_text()
    path = tmp_path / "others.yaml"
    path.write_text(text[text.index("training:") :])
    save = tmp_path / "second"
    others = [argument for argument in TINY[1:] if not argument.startswith("--model.")]
    arguments = [str(path), *others, _iterations(4), f"--checkpoint.save={save}", f"--checkpoint.load={saved}"]
    refuse(CONFIGURATION, arguments, "model.num_layers, model.hidden_size", "not given and without a default")
    arguments.append("--checkpoint.use_checkpoint_args=true")
    assert run_main(arguments) == 0
    assert "hidden_size: 32" in (save / "iter_0000004" / "config.yaml").read_text()
    expected = ["command line: model.hidden_size is 64, in the checkpoint", "it is 32", "leave these out"]
    refuse(CONFIGURATION, [*arguments, "--model.hidden_size=64"], *expected)
    refuse(CONFIGURATION, [*arguments, "--print-config"], "--print-config does not show", "config.yaml beside a step")


# Saves: status 4


def test_save_that_fails_on_one_rank_leaves_the_older_step(run_main: RunMain, saved: Path, tmp_path: Path) -> None:
    older = _contents(saved / "iter_0000002")
    assert len(older["__0_0.distcp"]) > 4 * FILE_SIZE_LIMIT, "the limit must be met by half of it"
    arguments = [*TINY, f"--checkpoint.save={saved}"]
    result = run_job(tmp_path / "job", [*arguments, _iterations(4)], num_ranks=2, fault="limit_file_size@1")
    _assert_all_ranks_refused(result, SAVE)
    for rank, stderr in result.stderr.items():
        expected = ["iteration 4 could not be saved", str(saved / "iter_0000004"), "File too large", "start the same"]
        _assert_one_message(stderr, expected, rank)
    assert _contents(saved / "iter_0000002") == older
    assert (read_tracker(saved), complete_iterations(saved)) == (2, [2])
    # The same command again, with room on the disk, from the older step over the debris.
    assert run_main([*arguments, _iterations(6), "--training.exit_interval=4"]) == 0
    assert (read_tracker(saved), complete_iterations(saved)) == (4, [2, 4])


def test_metrics_that_cannot_be_written_do_not_end_the_run(
    run_main: RunMain, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "run"
    save.mkdir()
    (save / "metrics.jsonl").symlink_to("/dev/full")
    assert run_main([*TINY, _iterations(3), f"--checkpoint.save={save}"]) == 0
    warnings = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert f"no longer written to {save / 'metrics.jsonl'}, from iteration 0 on: No space left" in warnings[0]
    assert read_tracker(save) == 3


# Numbers


def test_loss_that_is_not_finite_stops_the_run(refuse: Callable[..., None], tmp_path: Path) -> None:
    save = tmp_path / "run"
    arguments = [*TINY, _iterations(9), f"--checkpoint.save={save}", "--optimizer.lr=1e30", "--optimizer.clip_grad=0"]
    refuse(OTHER, arguments, "the loss of iteration 2 (samples 4 to 7) is nan", "Lower optimizer.lr")
    assert (read_tracker(save), sorted(losses(save))) == (None, [1])
