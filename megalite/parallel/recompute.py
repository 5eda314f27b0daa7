"""Recomputing activations in the backward instead of keeping them.

torch's checkpoint does the work and restores the default generators; the tracker's streams are ours to restore, so that
a recomputed block drops the same values as it did the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megalite.parallel.random import CudaRNGStatesTracker


def recompute(function: Callable[..., torch.Tensor], tracker: CudaRNGStatesTracker, *inputs: Any) -> torch.Tensor:
    """Return ``function(*inputs)``, whose inner activations are computed again when the backward needs them."""
    states: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def first() -> Iterator[None]:
        states.update(tracker.get_states())
        yield

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        current = tracker.get_states()
        tracker.set_states(states)
        try:
            yield
        finally:
            tracker.set_states(current)

    return checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (first(), again()))
