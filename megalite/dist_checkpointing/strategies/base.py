"""The four interfaces on the path from a tensor to a byte on disk, and the plans they share.

    leaves --plan--> SavePlan --staging--> host tensors --framing--> pieces of bytes --sink--> file
    leaves --plan--> LoadPlan --source--> bytes of an item --framing--> host tensor --copy--> leaf

Each knows nothing of its neighbours: another staging makes a save asynchronous, another sink changes the I/O, another
framing the item format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor

Piece = bytes | memoryview


class ItemFraming(Protocol):
    """One tensor or object as bytes, and back. Lengths are known before anything is serialized."""

    def tensor_length(self, dtype: torch.dtype, shape: Shape) -> int:
        """Return the bytes that a tensor of this type and shape takes."""
        ...

    def frame_tensor(self, tensor: torch.Tensor) -> list[Piece]:
        """Return the bytes of a contiguous host tensor; its elements are a view, not a copy."""
        ...

    def frame_object(self, value: Any) -> bytes:
        """Return the bytes of an object."""
        ...

    def parse_tensor(self, data: bytes, dtype: torch.dtype, shape: Shape, where: str) -> torch.Tensor:
        """Return the tensor; CheckpointError naming ``where`` when the bytes are not such a tensor."""
        ...

    def parse_object(self, data: bytes, where: str) -> Any:
        """Return the object; CheckpointError naming ``where`` when the bytes are damaged or hostile."""
        ...


class ByteSink(Protocol):
    """A file being written. Its fault points are "open", "write", "fsync" and "close"."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Append ``pieces``."""
        ...

    def close(self) -> None:
        """Make the file durable and close it."""
        ...

    def abort(self) -> None:
        """Close without flushing, after a failure."""
        ...


class ByteSource(Protocol):
    """The files of a checkpoint folder, read by range."""

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return exactly these bytes; CheckpointError when the file is missing, cut short or outside the folder."""
        ...

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on; CheckpointError as for ``read``."""
        ...

    def close(self) -> None:
        """Release open files."""
        ...


class Staging(Protocol):
    """Where the elements are while they are written."""

    def stage(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each tensor as a contiguous host tensor, in order.

        A staging for a save that outlives the call must copy host tensors too: ``.cpu()`` would alias them.
        """
        ...


class SynchronousStaging:
    """Brings one tensor at a time to the host; host tensors are not copied, since training waits for the save."""

    def stage(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tensor in tensors:
            yield tensor.detach().cpu().contiguous()


def shape_rows(shapes: Sequence[Shape], axes: int, filler: int) -> np.ndarray:
    """Return [n, axes]: shapes or offsets of up to that many axes, the rest filled up."""
    rows = [(*shape, *(filler,) * (axes - len(shape))) for shape in shapes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), axes)


@dataclass(frozen=True)
class Blocks:
    """Rectangles of global tensors as arrays: small to send, and checked by sorting.

    ``offsets`` and ``sizes`` have one row per block; rows of tensors with fewer axes end in offset 0, size 1.
    """

    keys: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Global shape of each key, and its type below."""
    dtypes: tuple[torch.dtype, ...]
    key_of: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.key_of)

    def rectangle(self, block: int) -> tuple[Shape, Shape]:
        """Return (offset, sizes) of one block."""
        axes = len(self.shapes[self.key_of[block]])
        return tuple(self.offsets[block, :axes].tolist()), tuple(self.sizes[block, :axes].tolist())


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes: tensor blocks and, after them, objects; the items of a file lie without gaps."""

    blocks: Blocks
    objects: tuple[str, ...]
    """Unique keys; all of them end the first file, so that no place of a tensor depends on their lengths."""
    files: tuple[str, ...]
    file_of: np.ndarray
    """File of each block."""
    starts: np.ndarray
    """First byte of each block in its file, and its bytes below."""
    lengths: np.ndarray
    only_declared: tuple[str, ...] = ()
    """Keys of tensors and objects that this rank holds and leaves to others."""

    def object_places(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return (first byte, length) of each object in the first file."""
        first = self.file_of == 0
        end = int((self.starts[first] + self.lengths[first]).max()) if first.any() else 0
        starts = np.cumsum([end, *lengths]).tolist()
        return list(zip(starts[:-1], lengths, strict=True))


@dataclass(frozen=True)
class StoredObject:
    """Where an object that is being saved lies."""

    unique_key: str
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class GlobalSavePlan:
    """The plans of all ranks as one."""

    blocks: Blocks
    files: tuple[str, ...]
    file_of: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    rank_of: np.ndarray
    """Rank that writes each block."""
    local: tuple[SavePlan, ...]
    """The plans it was made from, in the order of ranks."""

    def place_objects(self, lengths: Sequence[Sequence[int]]) -> list[StoredObject]:
        """Return where the objects lie, whose lengths change from save to save; one list per rank."""
        return [
            StoredObject(key, plan.files[0], start, length)
            for plan, own in zip(self.local, lengths, strict=True)
            for key, (start, length) in zip(plan.objects, plan.object_places(own), strict=True)
        ]


class StoredItem(NamedTuple):
    """Where the bytes of one item lie."""

    file: str
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A block of a stored tensor."""

    offset: Shape
    sizes: Shape
    item: StoredItem


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor on disk."""

    shape: Shape
    dtype: torch.dtype
    chunks: list[StoredChunk]


@dataclass(frozen=True)
class CheckpointIndex:
    """All that ``.metadata`` says: tensors by key, objects by unique key."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredItem]

    @property
    def keys(self) -> list[str]:
        """All keys on disk, sorted."""
        return sorted([*self.tensors, *self.objects])


@dataclass(frozen=True)
class Copy:
    """A rectangle that goes from a stored chunk into a requested block."""

    leaf: ShardedTensor
    source: Shape
    target: Shape
    sizes: Shape


@dataclass
class ChunkRead:
    """One stored chunk and everything that is copied out of it."""

    name: str
    """Key and folder, for messages."""
    dtype: torch.dtype
    chunk: StoredChunk
    copies: list[Copy] = field(default_factory=list)


@dataclass(frozen=True)
class LoadPlan:
    """What one rank reads, in file order, each item once; ``zeroed`` are leaves with elements the file lacks."""

    chunks: list[ChunkRead]
    objects: list[tuple[str, StoredItem]]
    zeroed: list[ShardedTensor]
