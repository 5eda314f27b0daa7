"""What all parts of the model share: its numbers, its ranks, and how it describes itself to a checkpoint."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.parallel.layers import traits
from megalite.parallel.random import Dropout
from megalite.parallel.state import ParallelState


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The resolved numbers of a GPT; nothing in it is left to be derived."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    """Number of tokens; ids are below it."""
    padded_vocab_size: int
    """Rows of the embedding table, divisible over the tensor-parallel group."""
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    norm_epsilon: float = 1e-5
    sequence_parallel: bool = False
    """Cut activations along the sequence between tensor-parallel regions; False with one tensor-parallel rank."""
    dtype: torch.dtype = torch.float32

    @property
    def output_init_std(self) -> float:
        """Start deviation of layers that write into the residual stream: std / sqrt(2 * num_layers)."""
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5


@dataclass(frozen=True)
class Placement:
    """Where a model is built: its ranks, its device, and its source of dropout masks."""

    parallel: ParallelState
    dropout: Dropout
    device: torch.device


LayerAxis = tuple[int, int]
"""(global layer from 0, number of layers): the place on the axis that stacks all layers on disk."""


class MegaliteModule(nn.Module):
    """A module that can describe its parameters in global coordinates."""

    parallel: ParallelState

    extra_state_of: tuple[str, ...] = ()
    """Children whose ``_extra_state`` Megatron asks for; ours is always None."""

    def on_disk_name(self, name: str) -> str:
        """Return the name on disk of the child or parameter ``name``, which may be a dotted path."""
        return name

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return parameter name -> its place in the global tensor of its kind.

        ``name`` prefixes the names within the program, ``key`` those on disk; with ``layer`` every tensor is a slice of
        one that stacks all layers along a leading axis.
        """
        state: dict[str, ShardedTensor | ShardedObject] = {}
        for own, parameter in self.named_parameters(recurse=False):
            state[name + own] = sharded_parameter(parameter, key + self.on_disk_name(own), self.parallel, layer)
        for own, child in self.named_children():
            if isinstance(child, MegaliteModule):
                state.update(child.sharded_state_dict(f"{name}{own}.", f"{key}{self.on_disk_name(own)}.", layer))
                continue
            for path, parameter in child.named_parameters():
                on_disk = key + self.on_disk_name(f"{own}.{path}")
                state[f"{name}{own}.{path}"] = sharded_parameter(parameter, on_disk, self.parallel, layer)
        for own in self.extra_state_of:
            state[f"{name}{own}._extra_state"] = _extra_state(f"{key}{own}._extra_state", self.parallel, layer)
        return state


def sharded_parameter(
    parameter: nn.Parameter,
    key: str,
    parallel: ParallelState,
    layer: LayerAxis | None = None,
    allow_shape_mismatch: bool = False,
) -> ShardedTensor:
    """Return where ``parameter`` lies in the global tensor ``key``, from its traits and this rank's coordinates."""
    tp_axis = traits(parameter).tp_axis
    prepended = [] if layer is None else [(0, layer[0], layer[1])]
    cut = [] if tp_axis is None else [(tp_axis + len(prepended), parallel.tp.rank, parallel.tp.size)]
    return ShardedTensor.from_rank_offsets(
        key,
        parameter.detach(),
        *prepended,
        *cut,
        # A tensor that is not cut is the same on every tensor-parallel rank; one of them, and one of the data-parallel
        # ranks, writes it. The copy of a tied embedding on the last stage is never the one that is written.
        replica_id=(
            int(traits(parameter).is_copy),
            0 if tp_axis is not None else parallel.tp.rank,
            parallel.dp_cp.rank,
        ),
        prepend_axis_num=len(prepended),
        allow_shape_mismatch=allow_shape_mismatch,
    )


def _extra_state(key: str, parallel: ParallelState, layer: LayerAxis | None) -> ShardedObject:
    offset, size = layer if layer is not None else (0, 1)
    return ShardedObject(key, None, (size,), (offset,), replica_id=(0, parallel.tp.rank, parallel.dp_cp.rank))


_INIT_ROWS = 128
"""Rows that are drawn from one generator; a rank draws only the blocks that it holds a part of."""


def initialize_parameter(parameter: nn.Parameter, name: str, seed: int, parallel: ParallelState, rows: int) -> None:
    """Fill a parameter with its normal start values, which do not depend on TP, PP or padding.

    The global tensor is drawn in blocks of rows, each from a generator seeded by (seed, name, block), and this rank
    keeps its part. ``rows`` is the global number of rows that mean something; later ones are padding and zero.
    """
    info = traits(parameter)
    values = torch.zeros(parameter.shape)
    columns = parameter.shape[1] * (parallel.tp.size if info.tp_axis == 1 else 1)
    first_row = parallel.tp.rank * parameter.shape[0] if info.tp_axis == 0 else 0
    # A rank may hold padding only, and then begins behind the last row.
    last_row = max(first_row, min(first_row + parameter.shape[0], rows))
    first_column = parallel.tp.rank * parameter.shape[1] if info.tp_axis == 1 else 0
    for block in range(first_row // _INIT_ROWS, -(-last_row // _INIT_ROWS)):
        start = block * _INIT_ROWS
        # The 32 bits of a CRC are all that the Mersenne twister takes as a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}:{block}".encode()))
        drawn = torch.empty(_INIT_ROWS, columns).normal_(0.0, info.init_std, generator=generator)
        low, high = max(start, first_row), min(start + _INIT_ROWS, last_row)
        part = drawn[low - start : high - start, first_column : first_column + parameter.shape[1]]
        values[low - first_row : high - first_row] = part
    with torch.no_grad():
        parameter.copy_(values)


def factory_arguments(config: TransformerConfig, placement: Placement) -> dict[str, Any]:
    """Return the keyword arguments that every parallel layer takes."""
    return {"tp": placement.parallel.tp, "dtype": config.dtype, "device": placement.device}
