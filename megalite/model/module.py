"""What all parts of the model share: its numbers, its ranks, and how it describes itself to a checkpoint."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megalite.dist_checkpointing.mapping import ReplicaId, ShardedObject, ShardedTensor, ShardedTensorFactory
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
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    """Number of tokens; ids are below it."""
    padded_vocab_size: int
    """Rows of the embedding table, divisible over the tensor-parallel group."""
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    normalization: str = "LayerNorm"
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    norm_epsilon: float = 1e-5
    sequence_parallel: bool = False
    """Cut activations along the sequence between tensor-parallel regions; False with one tensor-parallel rank."""
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def output_init_std(self) -> float:
        """Start deviation of layers that write into the residual stream: std / sqrt(2 * num_layers)."""
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5

    @property
    def qkv_width(self) -> int:
        """Rows of the fused projection: all query heads, and a key and a value head per group."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels


@dataclass(frozen=True)
class Placement:
    """Where a part of the model is built: its ranks, its device, and its source of dropout masks."""

    parallel: ParallelState
    dropout: Dropout
    device: torch.device


@dataclass(frozen=True)
class ModelChunk:
    """Which part of the model a chunk is."""

    first_layer: int
    """Global number, from 0, of its first layer."""
    num_layers: int
    is_first: bool
    """It has the embedding."""
    is_last: bool
    """It has the final norm and the loss."""


LayerAxis = tuple[int, int]
"""(global layer from 0, number of layers): the place on the axis that stacks all layers on disk."""

ShardedLeaf = ShardedTensor | ShardedTensorFactory | ShardedObject


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
    ) -> dict[str, ShardedLeaf]:
        """Return parameter name -> its place in the global tensor of its kind.

        ``name`` prefixes the names within the program, ``key`` those on disk; with ``layer`` every tensor is a slice of
        one that stacks all layers along a leading axis.
        """
        state: dict[str, ShardedLeaf] = {}
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
) -> ShardedTensor | ShardedTensorFactory:
    """Return where ``parameter`` lies in the global tensor ``key``, from its traits and this rank's coordinates.

    Several matrices one upon the other, each cut by itself, become as many blocks of one global tensor.
    """
    info = traits(parameter)
    prepended = [] if layer is None else [(0, layer[0], layer[1])]
    # A tensor that is not cut is the same on every tensor-parallel rank; one of them, and one of the data-parallel
    # ranks, writes it. The copy of a tied embedding on the last stage is never the one that is written.
    replica_id = (
        int(info.is_copy),
        0 if info.tp_axis is not None else parallel.tp.rank,
        parallel.dp_cp.rank,
    )

    def place(data: torch.Tensor, block: int, replica_id: ReplicaId) -> ShardedTensor:
        cut = []
        if info.tp_axis is not None:
            position = parallel.tp.rank + block * parallel.tp.size
            cut = [(info.tp_axis + len(prepended), position, info.tp_blocks * parallel.tp.size)]
        return ShardedTensor.from_rank_offsets(
            key,
            data,
            *prepended,
            *cut,
            replica_id=replica_id,
            prepend_axis_num=len(prepended),
            allow_shape_mismatch=allow_shape_mismatch,
        )

    data = parameter.detach()
    if info.tp_blocks == 1:
        return place(data, 0, replica_id)
    return ShardedTensorFactory(
        key,
        data,
        build_fn=lambda _, whole, replica: [
            place(part, block, replica) for block, part in enumerate(whole.chunk(info.tp_blocks))
        ],
        # The parts are views of it and have been filled in place.
        merge_fn=lambda parts: data,
        replica_id=replica_id,
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
    tp_size, tp_rank = (parallel.tp.size, parallel.tp.rank) if info.tp_axis is not None else (1, 0)
    values = torch.zeros(parameter.shape)
    columns = parameter.shape[1] * (tp_size if info.tp_axis == 1 else 1)
    first_column = tp_rank * parameter.shape[1] if info.tp_axis == 1 else 0
    for matrix, part in enumerate(values.chunk(info.tp_blocks)):
        position = tp_rank + matrix * tp_size if info.tp_axis == 0 else 0
        first_row = position * part.shape[0]
        last_row = max(first_row, min(first_row + part.shape[0], rows))
        for start in range(first_row // _INIT_ROWS * _INIT_ROWS, last_row, _INIT_ROWS):
            # The 32 bits of a CRC are all that the Mersenne twister takes as a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}:{start // _INIT_ROWS}".encode()))
            drawn = torch.empty(_INIT_ROWS, columns).normal_(0.0, info.init_std, generator=generator)
            low, high = max(start, first_row), min(start + _INIT_ROWS, last_row)
            kept = drawn[low - start : high - start, first_column : first_column + part.shape[1]]
            part[low - first_row : high - first_row] = kept
    with torch.no_grad():
        parameter.copy_(values)


def factory_arguments(config: TransformerConfig, placement: Placement) -> dict[str, Any]:
    """Return the keyword arguments that every parallel layer takes."""
    return {"tp": placement.parallel.tp, "dtype": config.dtype, "device": placement.device}
