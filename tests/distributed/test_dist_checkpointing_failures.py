"""A failure of one rank is one error on all ranks: nobody waits, nothing looks complete."""

from __future__ import annotations

import os

import pytest
import torch

from megalite.dist_checkpointing.core import is_complete
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.serialization import LoadOptions, load, save, write_marker
from megalite.dist_checkpointing.strategies import planning
from megalite.utils.dist import world_group
from megalite.utils.errors import CheckpointError, DamagedCheckpointError, MegaliteError, PeerError, SaveError
from tests.helpers.ranks import run_on_ranks

RANKS = 3


def _state(group, fill=1.0, size=2):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((size,), fill), (0, group.rank, group.size)),
        "o": ShardedObject("o", {"rank": group.rank}, (group.size,), (group.rank,)),
        "iteration": 1,
    }


def _outcome(action):
    """Return (class, text) of the error, after a collective that would hang if a rank had stayed behind."""
    try:
        action()
        result = None
    except (MegaliteError, ValueError) as error:
        result = (type(error), str(error))
    group = world_group()
    assert group.all_reduce(torch.ones(1)).item() == group.size
    return result


def _save_with_fault(path, rank, point, file):
    group = world_group()

    def hook(name, where):
        if group.rank == rank and name == point and where.name.endswith(file):
            raise OSError(28, "No space left on device")

    return _outcome(lambda: save(_state(group), path, group=group, hook=hook))


@pytest.mark.parametrize(
    ("rank", "point", "file"),
    [
        (1, "open", "__1_0.distcp"),
        (2, "write", "__2_0.distcp"),
        (1, "fsync", "__1_0.distcp"),
        (0, "close", "__0_0.distcp"),
        (0, "fsync", "common.pt"),
        (0, "rename", ".metadata"),
    ],
)
def test_io_error_of_one_rank_fails_the_save_on_all(tmp_path, rank, point, file):
    outcomes = run_on_ranks(RANKS, _save_with_fault, tmp_path, rank, point, file)
    (outcome,) = set(outcomes)
    assert outcome[0] is SaveError and "No space left on device" in outcome[1] and str(tmp_path) in outcome[1]
    assert not (tmp_path / ".metadata").exists() and not is_complete(tmp_path)


def _save_edited(path, edit):
    group = world_group()
    state = _state(group)
    edit(state, group)
    return _outcome(lambda: save(state, path, group=group))


def _overlap(state, group):
    state["w"] = ShardedTensor.from_block("w", torch.ones(3), (6,), (min(2 * group.rank, 3),))


def _hole(state, group):
    if group.rank == 1:
        del state["w"]


def _other_shape(state, group):
    if group.rank == 2:
        state["w"] = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 2, 4))


def _double_object(state, group):
    state["o"] = ShardedObject("o", 1, (group.size,), (0,))


def _unreadable(state, group):
    if group.rank == 2:
        state["o"] = ShardedObject("o", object(), (group.size,), (group.rank,))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_overlap, r"w: the blocks (3,) at (0,) of rank 0 and (3,) at (2,) of rank 1 overlap"),
        (_hole, "w: 4 of 6 elements of global shape (6,) are written"),
        (_other_shape, "w is declared as torch.float32 of global shape (6,)"),
        (_double_object, "object o/shard_0_3 is in both"),
        (_unreadable, "o/shard_2_3: object cannot be read back"),
    ],
)
def test_blocks_not_written_exactly_once_are_refused_before_anything_is_written(tmp_path, edit, message):
    (outcome,) = set(run_on_ranks(RANKS, _save_edited, tmp_path, edit))
    assert outcome[0] is SaveError and message in outcome[1]
    assert list(tmp_path.iterdir()) == []


def _sharded_tuple(state, group):
    if group.rank == 1:
        state["w"] = (state["w"],)


def test_own_mistake_of_one_rank_reaches_the_others_as_its_failure(tmp_path):
    first, second, third = run_on_ranks(RANKS, _save_edited, tmp_path, _sharded_tuple)
    assert second[0] is ValueError
    assert first == third and first[0] is PeerError and "failed on rank 1: ValueError: w is a tuple" in first[1]


def _save(path):
    group = world_group()
    save(_state(group), path, group=group)
    if group.is_first:
        write_marker(path)


@pytest.fixture
def folder(tmp_path):
    run_on_ranks(RANKS, _save, tmp_path)
    return tmp_path


def _load_edited(path, edit, options=None):
    group = world_group()
    state = _state(group, fill=0.0)
    edit(state, group)
    return _outcome(lambda: load(state, path, group=group, options=options))


def _nothing(state, group):
    pass


def _not_asked(state, group):
    del state["w"]


def _asked_by_one(state, group):
    if group.rank == 1:
        state["more"] = ShardedTensor.from_rank_offsets("more", torch.ones(1))


def _larger_on_one(state, group):
    if group.rank == 2:
        state["w"] = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 2, 4))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_not_asked, "1 stored keys are not asked for: w."),
        (_asked_by_one, "asks for 1 keys that are not stored: more."),
        (_larger_on_one, "w has global shape (6,) in"),
    ],
)
def test_differing_keys_and_shapes_are_one_error_on_all_ranks(folder, edit, message):
    (outcome,) = set(run_on_ranks(RANKS, _load_edited, folder, edit))
    assert outcome[0] is CheckpointError and message in outcome[1]


def test_key_asked_for_by_one_rank_only_is_not_missing(folder):
    partial = LoadOptions(validate_access_integrity=False)
    assert run_on_ranks(RANKS, _load_edited, folder, _only_one_asks, partial) == [None] * RANKS


def test_part_of_a_tensor_that_no_rank_asks_for_is_an_error(folder):
    (outcome,) = set(run_on_ranks(RANKS, _load_edited, folder, _only_one_asks))
    assert outcome[0] is CheckpointError and "w: 2 of 6 elements of global shape (6,) are asked for" in outcome[1]


def _only_one_asks(state, group):
    if group.rank != 1:
        del state["w"]


@pytest.mark.parametrize(
    ("file", "length"), [("__1_0.distcp", 700), ("common.pt", 10), (".metadata", 50), ("metadata.json", 3)]
)
def test_damaged_file_is_one_error_on_all_ranks(folder, file, length):
    assert run_on_ranks(RANKS, _load_edited, folder, _nothing) == [None] * RANKS
    (folder / file).write_bytes((folder / file).read_bytes()[:length])
    (outcome,) = set(run_on_ranks(RANKS, _load_edited, folder, _nothing))
    assert outcome[0] is DamagedCheckpointError and file in outcome[1]


class _Touch:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.open, (self.path, os.O_CREAT))


def _save_with_code(path, target):
    """Rank 1 stores an object that runs code when it is unpickled, as a writer that checks nothing would."""
    group = world_group()
    planning.find_unreadable = lambda value, name: None
    state = _state(group)
    if group.rank == 1:
        state["o"] = ShardedObject("o", _Touch(target), (group.size,), (1,))
    save(state, path, group=group)
    if group.is_first:
        write_marker(path)


def test_sec_01_code_that_one_rank_meets_is_refused_by_all(tmp_path):
    """SEC-01: the object of rank 1's cell; one message on all ranks, nothing is run on any."""
    run_on_ranks(RANKS, _save_with_code, tmp_path, tmp_path / "touched")
    (outcome,) = set(run_on_ranks(RANKS, _load_edited, tmp_path, _nothing))
    assert outcome[0] is DamagedCheckpointError and "o/shard_1_3 in" in outcome[1] and "hostile" in outcome[1]
    assert not (tmp_path / "touched").exists()


def test_incomplete_folder_is_one_error_on_all_ranks(folder):
    (folder / "metadata.json").unlink()
    (outcome,) = set(run_on_ranks(RANKS, _load_edited, folder, _nothing))
    assert outcome[0] is DamagedCheckpointError and "did not finish" in outcome[1]


def _save_into_own_folder(path):
    """Rank 1 sees another folder under the same name, as on nodes that share no filesystem."""
    group = world_group()
    own = path / f"node{group.rank == 1:d}"
    own.mkdir(exist_ok=True)
    return _outcome(lambda: save(_state(group), own, group=group))


def test_folder_that_not_all_ranks_share_is_refused(tmp_path):
    outcomes = run_on_ranks(RANKS, _save_into_own_folder, tmp_path)
    assert all(outcome[0] is SaveError for outcome in outcomes)
    assert all("__1_0.distcp is missing" in outcome[1] and "share" in outcome[1] for outcome in outcomes)
    assert not list(tmp_path.rglob(".metadata"))
