"""Leaves of a sharded state dict: they say where local data belongs in a global tensor or grid of objects.

What is on disk is told apart by coordinates only. Which rank wrote a block, and how many ranks there were, means
nothing to the reader; that is what makes a checkpoint loadable at another topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ReplicaId = int | tuple[int, ...]
"""Tells copies of one block apart; all zeros is the copy that is written."""

Shape = tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether the copy with this id is the one that is written and counted."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


def _check_key(key: str) -> None:
    # Megatron splits object keys at "/": one in a name would make the stored key ambiguous.
    if not key or "/" in key:
        raise ValueError(f"key {key!r} of a sharded leaf is empty or contains '/'; use a dotted name")


def _check_replica_id(key: str, replica_id: ReplicaId) -> None:
    parts = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    if not parts or any(part < 0 for part in parts):
        raise ValueError(f"{key}: replica_id {replica_id} is empty or negative; number the copies of a block from 0")


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """A local block of the global tensor ``key``; loading fills ``data`` in place."""

    key: str
    data: torch.Tensor
    dtype: torch.dtype
    local_shape: Shape
    """Shape of ``data``, without the prepended axes."""
    global_shape: Shape
    global_offset: Shape
    """Elements between the origin of the global tensor and this block, prepended axes included."""
    axis_fragmentations: Shape | None
    """Pieces per global axis of a regular grid; None for a rectangle of any position and size."""
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    """Leading axes that only the global tensor has (layer, expert); the block has size 1 on them."""
    allow_shape_mismatch: bool = False
    """The stored global shape may differ (vocabulary padding): rows the file lacks become zero."""

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_replica_id(self.key, self.replica_id)
        if self.data.dtype != self.dtype or tuple(self.data.shape) != self.local_shape:
            raise ValueError(
                f"{self.key}: data is {self.data.dtype} {tuple(self.data.shape)} but the block is declared "
                f"{self.dtype} {self.local_shape}; declare the tensor that is passed"
            )
        rank = len(self.global_shape)
        if (
            self.prepend_axis_num < 0
            or len(self.local_shape) + self.prepend_axis_num != rank
            or len(self.global_offset) != rank
        ):
            raise ValueError(
                f"{self.key}: {self.prepend_axis_num} prepended axes and local shape {self.local_shape} do not make "
                f"the axes of global shape {self.global_shape} at offset {self.global_offset}; their counts must add up"
            )
        for offset, size, whole in zip(self.global_offset, self.chunk_shape, self.global_shape, strict=True):
            if offset < 0 or offset + size > whole:
                raise ValueError(
                    f"{self.key}: block of shape {self.chunk_shape} at offset {self.global_offset} leaves the global "
                    f"shape {self.global_shape}; check the offsets"
                )
        if self.axis_fragmentations is not None:
            self._check_grid(self.axis_fragmentations)

    def _check_grid(self, fragmentations: Shape) -> None:
        fits = len(fragmentations) == len(self.global_shape) and all(
            fragments >= 1 and fragments * size == whole and (offset % size == 0 if size else offset == 0)
            for fragments, size, whole, offset in zip(
                fragmentations, self.chunk_shape, self.global_shape, self.global_offset, strict=True
            )
        )
        if not fits:
            raise ValueError(
                f"{self.key}: block {self.chunk_shape} at offset {self.global_offset} is no cell of the grid "
                f"{fragmentations} over {self.global_shape}; use from_block for irregular rectangles"
            )

    @property
    def chunk_shape(self) -> Shape:
        """Shape of the block as it is stored: size 1 on every prepended axis."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def global_data(self) -> torch.Tensor:
        """A detached view of ``data`` that has the prepended axes too."""
        view = self.data.detach()
        for _ in range(self.prepend_axis_num):
            view = view.unsqueeze(0)
        return view

    @property
    def is_main_replica(self) -> bool:
        """Whether this copy of the block is the one that is written and counted."""
        return is_main_replica(self.replica_id)

    @property
    def cut_axis(self) -> int | None:
        """The first global axis on which the block is longer than one; None if there is none."""
        return next((axis for axis, size in enumerate(self.chunk_shape) if size > 1), None)

    def rows(self, begin: int, end: int) -> ShardedTensor:
        """Return rows [begin, end) of the block along its cut axis as a block of their own, sharing memory."""
        axis = self.cut_axis
        if axis is None or (begin, end) == (0, self.chunk_shape[axis]):
            return self
        offset = list(self.global_offset)
        offset[axis] += begin
        return ShardedTensor.from_block(
            self.key,
            self.data.detach().narrow(axis - self.prepend_axis_num, begin, end - begin),
            self.global_shape,
            tuple(offset),
            self.replica_id,
            self.prepend_axis_num,
            self.allow_shape_mismatch,
        )

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Describe a cell of a regular grid; each of ``rank_offsets`` is (global axis, position on it, pieces of it).

        Axes that are not named are whole. Raises ValueError for an axis or position that does not exist.
        """
        local_shape = tuple(data.shape)
        chunk_shape = (1,) * prepend_axis_num + local_shape
        fragmentations = [1] * len(chunk_shape)
        offset = [0] * len(chunk_shape)
        named: set[int] = set()
        for axis, position, fragments in rank_offsets:
            if not 0 <= axis < len(chunk_shape) or axis in named or not 0 <= position < fragments:
                raise ValueError(
                    f"{key}: (axis {axis}, position {position}, pieces {fragments}) does not fit a tensor of "
                    f"{len(chunk_shape)} axes; name each axis once and count positions from 0 below the pieces"
                )
            named.add(axis)
            fragmentations[axis] = fragments
            offset[axis] = position * chunk_shape[axis]
        return cls(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=local_shape,
            global_shape=tuple(pieces * size for pieces, size in zip(fragmentations, chunk_shape, strict=True)),
            global_offset=tuple(offset),
            axis_fragmentations=tuple(fragmentations),
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    @classmethod
    def from_block(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: Shape,
        global_offset: Shape,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Describe a rectangle of any position and size."""
        return cls(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=tuple(global_shape),
            global_offset=tuple(global_offset),
            axis_fragmentations=None,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )


@dataclass(frozen=True, eq=False)
class ShardedObject:
    """A Python object in one cell of a grid; the grid cannot change between save and load."""

    key: str
    data: Any
    global_shape: Shape
    global_offset: Shape
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_replica_id(self.key, self.replica_id)
        if len(self.global_shape) != len(self.global_offset) or not all(
            0 <= offset < size for offset, size in zip(self.global_offset, self.global_shape, strict=True)
        ):
            raise ValueError(
                f"{self.key}: cell {self.global_offset} is not in the grid {self.global_shape}; count positions from 0"
            )

    @property
    def unique_key(self) -> str:
        """The key on disk, ``<key>/shard_<offset>_<shape>`` with dots between axes."""
        return f"{self.key}/shard_{_dotted(self.global_offset)}_{_dotted(self.global_shape)}"


def _dotted(numbers: Shape) -> str:
    return ".".join(str(number) for number in numbers)


def parse_unique_key(unique_key: str) -> tuple[str, Shape, Shape] | None:
    """Return (key, offset, shape) of an object's key on disk, or None when it does not have that form."""
    key, slash, cell = unique_key.partition("/")
    parts = cell.split("_")
    if not slash or len(parts) != 3 or parts[0] != "shard":
        return None
    try:
        offset, shape = (tuple(int(number) for number in part.split(".") if number) for part in parts[1:])
    except ValueError:
        return None
    return key, offset, shape


@dataclass(frozen=True, eq=False)
class LocalNonpersistentObject:
    """A value that is not stored; a load puts the local one back in its place."""

    obj: Any


@dataclass(frozen=True, eq=False)
class ShardedTensorFactory:
    """One local tensor that is several tensors on disk.

    ``build_fn(key, data, replica_id)`` returns a nested dict or list of sharded leaves that view ``data``; ``merge_fn``
    gets the same structure with loaded values and returns what the state dict should hold.
    """

    key: str
    data: torch.Tensor
    build_fn: Callable[[str, torch.Tensor, ReplicaId], Any]
    merge_fn: Callable[[Any], Any]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_replica_id(self.key, self.replica_id)

    def build(self) -> Any:
        """Return the sub state dict that stands for the tensor on disk."""
        return self.build_fn(self.key, self.data, self.replica_id)


def volume(shape: Shape) -> int:
    """Return the number of elements of ``shape``; 1 for a scalar."""
    return math.prod(shape)
