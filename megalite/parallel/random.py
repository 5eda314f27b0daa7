"""Random streams of a rank, and dropout, which always says where in the run it is.

Megatron's seed rules: with s = seed + 100 * pp_rank (+ 10 * dp_rank with ``data_parallel_random_init``)

| stream                      | seed                  | used for                                                 |
|-----------------------------|-----------------------|----------------------------------------------------------|
| Python, NumPy, torch        | s                     | activations that every tensor-parallel rank holds whole  |
| tracker data-parallel-rng   | s                     | (kept for checkpoints that Megatron reads)               |
| tracker model-parallel-rng  | s + 2718 + tp_rank    | activations that are cut over the tensor-parallel group  |
| tracker expert-parallel-rng | s + 1024 + 100 * ep_rank + tp_rank | experts                                     |
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from megalite.parallel.state import ParallelState

DATA_PARALLEL_RNG = "data-parallel-rng"
MODEL_PARALLEL_RNG = "model-parallel-rng"
EXPERT_PARALLEL_RNG = "expert-parallel-rng"


class CudaRNGStatesTracker:
    """Named states of the default generator of one device, CUDA or CPU; ``fork`` runs a block on one of them."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def _get_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_state(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def add(self, name: str, seed: int) -> None:
        """Add stream ``name``; a name or a seed that is taken is refused, as two streams would then be equal."""
        if name in self.states or seed in self._seeds:
            raise ValueError(f"random stream {name!r} with seed {seed}: the name or the seed is already in use")
        current = self._get_state()
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        self.states[name] = self._get_state()
        self._seeds.add(seed)
        self._set_state(current)

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of all states by name."""
        return {name: state.clone() for name, state in self.states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states by copies of ``states``."""
        self.states = {name: state.clone() for name, state in states.items()}

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Run the block on stream ``name`` and leave the default stream as it was."""
        default = self._get_state()
        self._set_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._get_state()
            self._set_state(default)


def seed_everything(
    seed: int, parallel: ParallelState, device: torch.device, data_parallel_random_init: bool = False
) -> CudaRNGStatesTracker:
    """Seed all generators of this rank by the table above and return its tracker."""
    own = seed + 100 * parallel.pp.rank + (10 * parallel.dp.rank if data_parallel_random_init else 0)
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    tracker = CudaRNGStatesTracker(device)
    tracker.add(DATA_PARALLEL_RNG, own)
    tracker.add(MODEL_PARALLEL_RNG, own + 2718 + parallel.tp.rank)
    tracker.add(EXPERT_PARALLEL_RNG, own + 1024 + 100 * parallel.ep.rank + parallel.tp.rank)
    return tracker


@dataclass(frozen=True)
class DropoutContext:
    """Where in the run a dropout site is: enough to make its mask a function of the run and not of the topology.

    ``Dropout`` does not use it yet: its masks come from streams, which depend on the topology.

    Made on each stage from the progress and the micro-batch index, passed down explicitly and captured by recomputed
    blocks, so that a forward that runs twice sees the same context.
    """

    sample_ordinals: tuple[int, ...]
    """For each sequence of the micro-batch, its place in the order of consumed samples."""
    layer: int = 0
    """Global layer number from 1; 0 is the embedding."""
    site: str = "embedding"
    """Name of the site within the layer."""
    position_offset: int = 0
    """Sequence position of the first local row; not 0 where activations are cut along the sequence."""
    head_offset: int = 0
    """Global number of the first local attention head."""

    def at(self, site: str, *, position_offset: int = 0, head_offset: int = 0) -> DropoutContext:
        """Return the context of another site of the same layer."""
        return replace(self, site=site, position_offset=position_offset, head_offset=head_offset)

    def in_layer(self, layer: int) -> DropoutContext:
        """Return the context of layer ``layer``."""
        return replace(self, layer=layer)


class Dropout:
    """The two ways in which a model drops values. The only place that decides where a mask comes from."""

    def __init__(self, tracker: CudaRNGStatesTracker) -> None:
        self.tracker = tracker

    def hidden(self, x: torch.Tensor, p: float, context: DropoutContext, is_local: bool) -> torch.Tensor:
        """Drop values of hidden activations [S, B, H].

        ``is_local`` says that ``x`` is this rank's part of the sequence, whose mask must differ from the other parts';
        a whole ``x`` is dropped alike on every rank of the tensor-parallel group.
        """
        if p == 0.0:
            return x
        with self.tracker.fork() if is_local else contextlib.nullcontext():
            return F.dropout(x, p)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        p: float,
        context: DropoutContext,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return causal attention over this rank's heads, dropping probabilities with rate ``p``.

        ``q`` is [B, N, S, D], ``k`` and ``v`` [B, G, S, D] with N / G query heads to a group; [B, N, S, D] out. With
        ``document_ids`` [B, S] a position sees its own document only.
        """
        mask = None
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None, :]
            mask = same.tril().unsqueeze(1)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            # Spelled out rather than enable_gqa, which torch has from 2.5 on for some kernels only.
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        with self.tracker.fork() if p > 0.0 else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
