"""Sequences made up on the fly, equal to Megatron's mock data: counting upwards, which a model learns quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.data.gpt_dataset import GPTDataset, SampleFields

NUM_SEQUENCES = 100_000
MAX_SEQUENCE_LENGTH = 4096


class MockTokens:
    """100,000 sequences 1, 2, 3, ... (modulo the vocabulary) of random length, each ended by the end-of-document id."""

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self.name, self.vocab_size, self.eod_id = "mock data", vocab_size, eod_id
        # The dtype is part of the definition: it changes how many random bits a number takes.
        random = np.random.default_rng(0)
        self.sequence_lengths = random.integers(1, MAX_SEQUENCE_LENGTH, NUM_SEQUENCES, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens (default: the rest) of a sequence from ``offset`` on; IndexError outside it."""
        size = int(self.sequence_lengths[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} are outside mock sequence {index} with {size}")
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == size and len(tokens):
            tokens[-1] = self.eod_id
        return tokens


class MockGPTDataset(GPTDataset):
    """A ``GPTDataset`` over ``MockTokens``; needs no file."""

    def __init__(
        self,
        vocab_size: int,
        eod_id: int,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        sequences: range = range(NUM_SEQUENCES),
        split: str = "train",
        fields: SampleFields | None = None,
        cache_folder: Path | None = None,
        defined_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(
            MockTokens(vocab_size, eod_id),
            sequences,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            split=split,
            fields=fields,
            cache_folder=cache_folder,
            defined_sizes=defined_sizes,
        )
