"""The index tables against a slow walk over tokens, written from the format's definition alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megalite.data.gpt_indices import (
    build_document_index,
    build_indices,
    build_sample_index,
    build_shuffle_index,
    document_index_dtype,
    num_epochs,
    plan_indices,
    sample_index_dtype,
    shuffle_index_dtype,
)


def reference(lengths, sequences, n, L, e, seed):
    T = sum(int(lengths[s]) for s in sequences)
    E = 1
    while n is not None and E * T < n * L + e:
        E += 1
    separate = False
    sans = None
    if E > 1:
        sans = math.floor(((E - 1) * T - e) / L)
        per = math.floor((T - e) / L)
        separate = n - sans < int(0.80 * per)
    rng = np.random.RandomState(seed)

    def documents(epochs):
        index = np.array(list(sequences) * epochs, dtype=np.int32)
        rng.shuffle(index)
        return index

    document_index = np.concatenate([documents(E - 1), documents(1)]) if separate else documents(E)
    N = (E * T - e) // L
    rows, d, o = [(0, 0)], 0, 0
    for _ in range(N):
        need = L + e
        while need > 0:
            taken = int(lengths[document_index[d]]) - o
            need -= taken
            if need <= 0:
                o += need + taken - e
            else:
                d, o = d + 1, 0
        rows.append((d, o))
    cut = sans if separate else N
    first, second = np.arange(cut, dtype=np.uint32), np.arange(cut, N, dtype=np.uint32)
    rng.shuffle(first)
    rng.shuffle(second)
    return E, separate, document_index, np.array(rows), np.concatenate([first, second])


def _random_case(case):
    random = np.random.RandomState(1000 + case)
    longest = (3, 12, 200)[case % 3]
    lengths = random.randint(0 if case % 2 else 1, longest + 1, random.randint(1, 40)).astype(np.int32)
    seq_length = int(random.randint(1, 25))
    lengths[random.randint(len(lengths))] += seq_length + 1
    sequences = np.arange(len(lengths))[random.randint(len(lengths)) // 2 :]
    if lengths[sequences].sum() <= seq_length:
        sequences = np.arange(len(lengths))
    per_epoch = int(lengths[sequences].sum()) // seq_length
    wanted = [None, 1, per_epoch, 3 * per_epoch, int(2.4 * per_epoch) + 1, int(random.randint(1, 12 * per_epoch + 2))]
    return lengths, sequences, wanted[random.randint(len(wanted))], seq_length, 1


def test_tables_equal_the_walk_in_many_settings():
    seen = set()
    for case in range(240):
        lengths, sequences, wanted, seq_length, extra = _random_case(case)
        epochs, separate, documents, samples, shuffle = reference(
            lengths, sequences, wanted, seq_length, extra, seed=case
        )
        plan = plan_indices(int(lengths[sequences].sum()), wanted, seq_length, extra)
        tables = build_indices(lengths, sequences, plan, seq_length, case, extra)
        assert plan.num_epochs == epochs and (plan.samples_before_last_epoch is not None) == separate, case
        assert tables.document_index.dtype == np.int32 and np.array_equal(tables.document_index, documents), case
        assert tables.sample_index.dtype == np.int32 and np.array_equal(tables.sample_index, samples), case
        assert tables.shuffle_index.dtype == np.uint32 and np.array_equal(tables.shuffle_index, shuffle), case
        assert wanted is None or plan.num_samples >= wanted
        seen.add((min(epochs, 3), separate, wanted is None, bool((lengths == 0).any())))
    # All kinds of settings were met, or the comparison above says less than it seems to.
    assert {(1, False, True, True), (1, False, False, False), (3, True, False, True), (3, False, False, False)} <= seen


@pytest.mark.parametrize("extra", [0, 1])
def test_the_walk_without_overlap_too(extra):
    random = np.random.RandomState(3)
    for _ in range(50):
        lengths = random.randint(0, 9, 30).astype(np.int32)
        if lengths.sum() < 8:
            continue
        _, _, documents, samples, _ = reference(lengths, range(30), None, 7, extra, seed=5)
        assert np.array_equal(build_sample_index(lengths, documents, 7, extra), samples)


def test_a_last_epoch_of_which_little_is_used_is_shuffled_apart():
    # Ten epochs' worth of 100 tokens, 10 a sample: 9 epochs hold 89 samples.
    assert plan_indices(100, 90, 10).samples_before_last_epoch == 89
    assert plan_indices(100, 95, 10).samples_before_last_epoch == 89
    assert plan_indices(100, 96, 10).samples_before_last_epoch is None
    random = np.random.RandomState(0)
    order = build_shuffle_index(99, random, 89)
    assert sorted(order[:89]) == list(range(89)) and sorted(order[89:]) == list(range(89, 99))
    documents = build_document_index(np.arange(10), 10, np.random.RandomState(0), True)
    assert sorted(documents[-10:]) == list(range(10))


def test_counts_beyond_two_billion():
    """TOK-06."""
    assert num_epochs(2**33, 2**40, 4096) == 2**19 + 1
    assert plan_indices(2**40, 2**31 + 5, 1024).num_samples == (3 * 2**40 - 1) // 1024
    assert num_epochs(7, None, 4) == 1


def test_types_grow_where_32_bits_end():
    assert sample_index_dtype(2**31 - 1, 5) == np.int32
    assert sample_index_dtype(2**31, 5) == np.int64
    assert sample_index_dtype(5, 2**31) == np.int64
    assert document_index_dtype(2**31 - 1) == np.int32 and document_index_dtype(2**31) == np.int64
    assert shuffle_index_dtype(2**32 - 3) == np.uint32
    assert shuffle_index_dtype(2**32 - 2) == np.int64


def test_token_positions_beyond_32_bits_give_right_rows():
    lengths = np.array([2**31 - 1] * 5, dtype=np.int32)
    index = build_sample_index(lengths, np.arange(5, dtype=np.int32), 2**30)
    assert (index >= 0).all() and len(index) == 10
    positions = index[:, 0].astype(np.int64) * (2**31 - 1) + index[:, 1]
    assert positions.tolist() == [k * 2**30 for k in range(10)]
