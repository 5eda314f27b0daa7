"""The three tables that turn documents into shuffled samples of equal length, equal to Megatron's for equal sizes.

The tokens of all epochs lie end to end in the order of the document index. Sample k is the ``seq_length + extra``
tokens from token ``k * seq_length`` on, so that neighbours share ``extra`` tokens. The shuffle index is the order in
which samples are handed out. One random stream makes the document index first and the shuffle index after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EXTRA_TOKENS = 1
"""Tokens a sample has beyond the sequence length: labels are the tokens moved by one."""

_CHUNK = 1 << 22


@dataclass(frozen=True)
class IndexPlan:
    """The sizes of the tables; ``samples_before_last_epoch`` is None unless the last epoch is shuffled by itself."""

    num_epochs: int
    num_samples: int
    samples_before_last_epoch: int | None


@dataclass(frozen=True)
class GPTIndices:
    """The tables of E epochs of S sequences that hold N samples.

    ``document_index`` [E * S], ``sample_index`` [N + 1, 2] of (place in the former, offset), ``shuffle_index`` [N].
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def num_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra: int = EXTRA_TOKENS) -> int:
    """Return the least number of epochs with tokens for ``num_samples``; one epoch for None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + extra) // tokens_per_epoch))


def plan_indices(
    tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra: int = EXTRA_TOKENS
) -> IndexPlan:
    """Return the sizes of the tables for at least ``num_samples`` samples, in Python integers that cannot overflow.

    The last epoch is kept apart when less than 80 % of it is used: shuffled together with the others it would make
    some documents rarer than others in the part that is trained on.
    """
    epochs = num_epochs(tokens_per_epoch, num_samples, seq_length, extra)
    total = (epochs * tokens_per_epoch - extra) // seq_length
    if epochs == 1 or num_samples is None:
        return IndexPlan(epochs, total, None)
    before_last = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    per_epoch = (tokens_per_epoch - extra) // seq_length
    separate = num_samples - before_last < int(0.80 * per_epoch)
    return IndexPlan(epochs, total, before_last if separate else None)


def document_index_dtype(largest_sequence: int) -> np.dtype:
    """Return int32 as Megatron does, int64 where a sequence number would overflow it."""
    return np.dtype(np.int32 if largest_sequence <= np.iinfo(np.int32).max else np.int64)


def sample_index_dtype(document_index_length: int, longest_sequence: int) -> np.dtype:
    """Return the dtype that holds places in the document index and offsets in sequences."""
    return np.dtype(np.int32 if max(document_index_length, longest_sequence) <= np.iinfo(np.int32).max else np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype:
    """Return uint32, or int64 from the size on at which Megatron changes."""
    return np.dtype(np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64)


def build_document_index(
    sequences: np.ndarray, epochs: int, random: np.random.RandomState, separate_last_epoch: bool
) -> np.ndarray:
    """Return the sequence numbers of all epochs in shuffled order; advances ``random``."""
    if separate_last_epoch and epochs > 1:
        first = build_document_index(sequences, epochs - 1, random, False)
        return np.concatenate((first, build_document_index(sequences, 1, random, False)))
    largest = int(sequences.max()) if len(sequences) else 0
    index = np.tile(np.asarray(sequences, dtype=document_index_dtype(largest)), epochs)
    random.shuffle(index)
    return index


def build_sample_index(
    sequence_lengths: np.ndarray, document_index: np.ndarray, seq_length: int, extra: int = EXTRA_TOKENS
) -> np.ndarray:
    """Return where each sample begins, and in the last row where the last one ends.

    Megatron walks from sample to sample. The same in closed form: row k stands in the document that holds the last
    token sample k - 1 reads, at token ``k * seq_length`` of the whole. A search in the cumulative ends of documents
    finds it, and steps over empty documents as the walk does.
    """
    lengths = sequence_lengths[document_index]
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    count = max(0, (total - extra) // seq_length)
    longest = int(sequence_lengths.max()) if len(sequence_lengths) else 0
    index = np.zeros((count + 1, 2), dtype=sample_index_dtype(len(document_index), longest))
    # In chunks: the temporaries are several times the size of the table.
    for first in range(1, count + 1, _CHUNK):
        rows = np.arange(first, min(first + _CHUNK, count + 1), dtype=np.int64)
        begins = rows * seq_length
        places = np.searchsorted(ends, begins + (extra - 1), side="right")
        index[first : first + len(rows), 0] = places
        index[first : first + len(rows), 1] = begins - (ends[places] - lengths[places])
    return index


def build_shuffle_index(
    num_samples: int, random: np.random.RandomState, samples_before_last_epoch: int | None = None
) -> np.ndarray:
    """Return the order in which samples are handed out; advances ``random``."""
    dtype = shuffle_index_dtype(num_samples)
    if samples_before_last_epoch is None:
        samples_before_last_epoch = num_samples
    parts = []
    for start, stop in ((0, samples_before_last_epoch), (samples_before_last_epoch, num_samples)):
        part = np.arange(start, stop, dtype=dtype)
        random.shuffle(part)
        parts.append(part)
    return np.concatenate(parts)


def build_indices(
    sequence_lengths: np.ndarray,
    sequences: np.ndarray,
    plan: IndexPlan,
    seq_length: int,
    seed: int,
    extra: int = EXTRA_TOKENS,
) -> GPTIndices:
    """Return the tables of ``plan`` for the given sequence numbers of a dataset."""
    random = np.random.RandomState(seed)
    separate = plan.samples_before_last_epoch is not None
    documents = build_document_index(sequences, plan.num_epochs, random, separate)
    samples = build_sample_index(sequence_lengths, documents, seq_length, extra)
    shuffle = build_shuffle_index(plan.num_samples, random, plan.samples_before_last_epoch)
    return GPTIndices(documents, samples, shuffle)
