"""Optimizer state as blocks of the parameter's global tensor.

A data-parallel rank owns flat ranges of buffers, so it holds elements [start, end) of a flattened parameter. Such a
range of a row-major tensor is a few rectangles: partial rows at both ends, whole rows between. Each is an ordinary
``ShardedTensor`` of the parameter-shaped tensor, so that saving needs no communication and loading any topology works.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megalite.dist_checkpointing.dict_utils import iter_leaves
from megalite.dist_checkpointing.mapping import ReplicaId, Shape, ShardedTensor, ShardedTensorFactory, volume

Block = tuple[Shape, Shape, int]
"""(offset, sizes, position of the first element in the range), the rectangle in row-major order."""


def flat_range_to_blocks(shape: Shape, start: int, end: int) -> list[Block]:
    """Cut elements [start, end) of a row-major tensor into at most ``2 * ndim - 1`` rectangles, in flat order.

    Raises ValueError when the range leaves the tensor.
    """
    total = volume(shape)
    if not 0 <= start <= end <= total:
        raise ValueError(
            f"range [{start}, {end}) leaves a tensor of shape {shape} with {total} elements; check the range"
        )
    if start == end:
        return []
    if not shape:
        return [((), (), 0)]
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]

    blocks: list[Block] = []

    def emit(axis: int, position: int, count: int) -> None:
        offset = tuple(position // stride % size for stride, size in zip(strides, shape, strict=True))
        blocks.append((offset, (1,) * axis + (count,) + tuple(shape[axis + 1 :]), position - start))

    position = start
    # Up: fill the started row, then the started matrix, ... until the next unit would pass the end.
    for axis in range(len(shape) - 1, 0, -1):
        boundary = -(-position // strides[axis - 1]) * strides[axis - 1]
        if boundary > end:
            break
        if boundary > position:
            emit(axis, position, (boundary - position) // strides[axis])
            position = boundary
    # Down: as many whole units as fit, from the largest to the single element.
    for axis, stride in enumerate(strides):
        count = (end - position) // stride
        if count:
            emit(axis, position, count)
            position += count * stride
    return blocks


def sharded_tensors_of_range(
    key: str,
    flat_data: torch.Tensor,
    param_sharded_tensor: ShardedTensor | ShardedTensorFactory,
    start: int,
    end: int,
    replica_id: ReplicaId | None = None,
) -> list[ShardedTensor]:
    """Return the leaves of ``key`` that store ``flat_data``, elements [start, end) of the flattened local parameter.

    ``param_sharded_tensor`` is the parameter's own leaf; of a factory (gated fc1) the parts must be consecutive pieces
    of the local parameter, and what they add to the factory's key is added to ``key``. The blocks are views: loading
    them fills ``flat_data``. ``replica_id`` defaults to the parameter's with its last component, the data-parallel
    rank, set to 0: each range has one owner among the data-parallel ranks.
    """
    if flat_data.dim() != 1 or flat_data.numel() != end - start or not flat_data.is_contiguous():
        raise ValueError(
            f"{key}: range [{start}, {end}) needs a contiguous 1-D tensor of {end - start} elements, got shape "
            f"{tuple(flat_data.shape)}; pass the owned slice of the flat buffer"
        )
    numel = param_sharded_tensor.data.numel()
    if not 0 <= start <= end <= numel:
        raise ValueError(f"{key}: range [{start}, {end}) leaves the parameter of {numel} elements; check the range")
    leaves: list[ShardedTensor] = []
    for suffix, part, part_start in _parts(param_sharded_tensor):
        low, high = max(start, part_start), min(end, part_start + part.data.numel())
        if low >= high:
            continue
        owner = _range_replica(part.replica_id) if replica_id is None else replica_id
        for offset, sizes, begin in flat_range_to_blocks(part.local_shape, low - part_start, high - part_start):
            first = low - start + begin
            prepended = part.prepend_axis_num
            inner = zip(part.global_offset[prepended:], offset, strict=True)
            leaves.append(
                ShardedTensor.from_block(
                    key + suffix,
                    flat_data[first : first + volume(sizes)].view(sizes),
                    part.global_shape,
                    part.global_offset[:prepended] + tuple(origin + step for origin, step in inner),
                    replica_id=owner,
                    prepend_axis_num=prepended,
                    allow_shape_mismatch=part.allow_shape_mismatch,
                )
            )
    return leaves


def _range_replica(replica_id: ReplicaId) -> ReplicaId:
    return (*replica_id[:-1], 0) if isinstance(replica_id, tuple) else replica_id


def _parts(leaf: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[str, ShardedTensor, int]]:
    """Yield (key suffix, part, its first element in the flattened local parameter), in flat order."""
    if isinstance(leaf, ShardedTensor):
        yield "", leaf, 0
        return
    origin = leaf.data.storage_offset()
    parts = [part for _, part in iter_leaves(leaf.build())]
    expected = 0
    for part in sorted(parts, key=lambda part: part.data.storage_offset()):
        begin = part.data.storage_offset() - origin
        if begin != expected or not part.data.is_contiguous():
            raise ValueError(
                f"{leaf.key}: part {part.key} starts at element {begin} of the parameter, expected {expected}; a "
                "factory whose parts are not consecutive pieces cannot be cut into flat ranges"
            )
        expected += part.data.numel()
        yield part.key.removeprefix(leaf.key), part, begin
    if expected != leaf.data.numel():
        raise ValueError(
            f"{leaf.key}: the parts hold {expected} of {leaf.data.numel()} elements; a factory must store all of them"
        )
