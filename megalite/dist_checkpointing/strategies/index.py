"""Reading ``.metadata``: what it says is checked entry by entry, and as a whole, before anything is believed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.core import is_file_name
from megalite.dist_checkpointing.mapping import Shape, parse_unique_key
from megalite.dist_checkpointing.safe import Record, shown, unpickle_index, without_collections
from megalite.dist_checkpointing.strategies.base import (
    CheckpointIndex,
    StoredChunk,
    StoredItem,
    StoredTensor,
    shape_rows,
)
from megalite.dist_checkpointing.validation import find_hole, find_overlap
from megalite.utils.errors import DamagedCheckpointError

_LARGEST = 2**62
"""Numbers from here on are no place in a file; sums of two below it still fit 64 bits."""
_LONGEST_AXIS = 2**44
_MOST_ELEMENTS = 2**56
"""With these, the sums and products of the search for overlaps fit 64 bits."""
_SHOWN_PER_TENSOR = 16
_SHOWN_CELLS = 8
_MOST_PROBLEMS = 100


@dataclass(frozen=True)
class IndexProblem:
    """One thing that is wrong with an index."""

    text: str
    key: str | None = None
    file: str | None = None


def parse_index(data: bytes, where: str) -> CheckpointIndex:
    """Return the content of ``.metadata``; CheckpointError when it is damaged, hostile or contradicts itself.

    Whether its parts fit together is for ``check_index``.
    """
    index, problems = survey_index(data, where)
    _raise_first(problems, where)
    return index


def check_index(index: CheckpointIndex, where: str) -> None:
    """Raise CheckpointError unless chunks cover each tensor exactly once, object grids are full and no two items
    share bytes."""
    _raise_first(list(itertools.islice(index_problems(index), _MOST_PROBLEMS)), where)


def _raise_first(problems: Sequence[IndexProblem], where: str) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DamagedCheckpointError(
            f"{where}: {problems[0].text}{more}; the index is damaged, do not use this checkpoint"
        )


def survey_index(data: bytes, where: str) -> tuple[CheckpointIndex, list[IndexProblem]]:
    """Return what can be used of ``.metadata``, and everything that cannot.

    Raises CheckpointError only when it is no index at all, or names what an index has no use for.
    """
    with without_collections():
        return _survey(unpickle_index(data, where), where)


def _survey(found: Record, where: str) -> tuple[CheckpointIndex, list[IndexProblem]]:
    storage, entries = (getattr(found, name, None) for name in ("storage_data", "state_dict_metadata"))
    if type(storage) is not dict or type(entries) is not dict:
        raise DamagedCheckpointError(
            f"{where} is not a valid index: storage_data is {shown(storage)}, state_dict_metadata is {shown(entries)}; "
            "do not use this checkpoint"
        )
    problems: list[IndexProblem] = []
    places = _places(storage, problems)
    rectangles: dict[tuple[int, Shape], int] = {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredItem] = {}
    for key, entry in entries.items():
        kind = type(entry).name.rpartition(".")[2] if isinstance(entry, Record) else ""
        if type(key) is not str or kind not in ("BytesStorageMetadata", "TensorStorageMetadata"):
            problems.append(IndexProblem(f"key {shown(key)} is {shown(entry)}, no tensor or object", shown(key)))
        elif kind == "TensorStorageMetadata":
            tensor = _parse_tensor(key, entry, places, rectangles, problems)
            if tensor is not None:
                tensors[key] = tensor
        elif (key, None) in places:
            objects[key] = places[key, None]
        else:
            problems.append(IndexProblem(f"it does not say where {shown(key)} lies", key))
    return CheckpointIndex(tensors, objects), problems


Places = dict[tuple[str, Shape | None], StoredItem]


def _places(storage: dict, problems: list[IndexProblem]) -> Places:
    places: Places = {}
    # Files and offsets recur, as one object each where the writer shared them: what was found good is not looked at
    # again. All objects live as long as ``storage``, so that an id means one of them.
    good_files: set[str] = set()
    good_offsets: set[int] = set()
    for place, info in storage.items():
        key, offset = getattr(place, "fqn", None), getattr(place, "offset", None)
        file, start, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
        if type(key) is not str or not (offset is None or id(offset) in good_offsets or _is_shape(offset)):
            problems.append(IndexProblem(f"an item has key {shown(key)} and offset {shown(offset)}", shown(key)))
            continue
        good_offsets.add(id(offset))
        if type(file) is not str or (file not in good_files and not is_file_name(file)):
            text = f"{shown(key)} is placed in {shown(file)}, which is not a file of the folder"
            problems.append(IndexProblem(text, key))
            continue
        good_files.add(file)
        is_range = type(start) is type(length) is int and 0 <= start < _LARGEST and 0 <= length < _LARGEST
        if not is_range or getattr(info, "transform_descriptors", None):
            text = f"{shown(key)} has byte range ({shown(start)}, {shown(length)}) of {file} or is transformed"
            problems.append(IndexProblem(f"{text}; only plain items can be read", key, file))
        elif (key, offset) in places:
            problems.append(IndexProblem(f"{shown(key)} at {offset} is placed twice", key, file))
        else:
            places[key, offset] = StoredItem(file, start, length)
    return places


def _is_shape(value: Any) -> bool:
    if type(value) is not tuple:
        return False
    for number in value:
        if type(number) is not int or not 0 <= number < _LARGEST:
            return False
    return True


def _parse_tensor(
    key: str, entry: Record, places: Places, rectangles: dict[tuple[int, Shape], int], problems: list[IndexProblem]
) -> StoredTensor | None:
    """``rectangles`` has the elements of every chunk that was found good for a shape, by its id."""
    shape, chunks, dtype = getattr(entry, "size", None), getattr(entry, "chunks", None), _parse_dtype(entry)
    sound = _is_shape(shape) and max(shape, default=0) < _LONGEST_AXIS and math.prod(shape) < _MOST_ELEMENTS
    if not sound or type(chunks) is not list or dtype is None:
        problems.append(IndexProblem(f"{shown(key)} has no valid shape {shown(shape)}, dtype or list of chunks", key))
        return None
    found = []
    itemsize = dtype.itemsize
    for chunk in chunks:
        offset, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        elements = rectangles.get((id(chunk), shape))
        if elements is None:
            fits = _is_shape(offset) and _is_shape(sizes) and len(shape) == len(offset) == len(sizes)
            if not fits or any(start + size > whole for start, size, whole in zip(offset, sizes, shape, strict=True)):
                text = f"chunk {shown(sizes)} at {shown(offset)} of {shown(key)} leaves shape {shape}"
                problems.append(IndexProblem(text, key))
                continue
            elements = rectangles[id(chunk), shape] = math.prod(sizes)
        item = places.get((key, offset))
        if item is None:
            text = f"it does not say where chunk {sizes} at {offset} of {shown(key)} lies"
            problems.append(IndexProblem(text, key))
        elif elements * itemsize > item.length:
            text = f"chunk {sizes} at {offset} of {shown(key)} needs {elements * itemsize} bytes of elements, its item"
            problems.append(IndexProblem(f"{text} in {item.file} has {item.length} bytes", key, item.file))
        else:
            found.append(StoredChunk(offset, sizes, item))
    return StoredTensor(shape, dtype, found)


def _parse_dtype(entry: Record) -> torch.dtype | None:
    properties = getattr(entry, "properties", None)
    state = getattr(properties, "state", None)
    dtype = state[0] if type(state) is tuple and state else getattr(properties, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def index_problems(index: CheckpointIndex) -> Iterator[IndexProblem]:
    """Yield what does not fit together: regions of tensors without a chunk or with several, cells of object grids
    without an object, bytes that belong to two items."""
    yield from _coverage_problems(index)
    yield from _grid_problems(index)
    yield from _sharing_problems(index)


def _coverage_problems(index: CheckpointIndex) -> Iterator[IndexProblem]:
    tensors = list(index.tensors.items())
    axes = max((len(tensor.shape) for _, tensor in tensors), default=0)
    owner = np.repeat(np.arange(len(tensors)), [len(tensor.chunks) for _, tensor in tensors])
    chunks = [chunk for _, tensor in tensors for chunk in tensor.chunks]
    offsets = shape_rows([chunk.offset for chunk in chunks], axes, 0)
    sizes = shape_rows([chunk.sizes for chunk in chunks], axes, 1)
    covered = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(covered, owner, sizes.prod(axis=1, dtype=np.int64))
    overlaps = find_overlap(owner, offsets, sizes) is not None
    ends = np.cumsum([len(tensor.chunks) for _, tensor in tensors]).tolist()
    for number, (key, tensor) in enumerate(tensors):
        # Tensors are only looked at one by one when something is known to be wrong.
        if overlaps or covered[number] != math.prod(tensor.shape):
            mine = slice(ends[number] - len(tensor.chunks), ends[number])
            yield from _tensor_problems(key, tensor, offsets[mine], sizes[mine])


def _tensor_problems(key: str, tensor: StoredTensor, offsets: np.ndarray, sizes: np.ndarray) -> Iterator[IndexProblem]:
    """Yield the overlaps and then the holes of one tensor."""
    chunks = list(tensor.chunks)
    while (pair := find_overlap(np.zeros(len(chunks), dtype=np.int64), offsets, sizes)) is not None:
        one, other = (chunks[position] for position in pair)
        yield IndexProblem(
            f"{key}: chunks {one.sizes} at {one.offset} of {one.item.file} and {other.sizes} at {other.offset} of "
            f"{other.item.file} overlap",
            key,
            other.item.file,
        )
        if len(tensor.chunks) - len(chunks) >= _SHOWN_PER_TENSOR:
            return
        del chunks[pair[1]]
        offsets, sizes = np.delete(offsets, pair[1], axis=0), np.delete(sizes, pair[1], axis=0)
    missing = math.prod(tensor.shape) - int(sizes.prod(axis=1, dtype=np.int64).sum())
    for _ in range(_SHOWN_PER_TENSOR):
        if not missing:
            return
        offset, extent = _widest(tensor.shape, *find_hole(tensor.shape, offsets, sizes), offsets, sizes)
        yield IndexProblem(f"{key}: no chunk holds {extent} at {offset} of shape {tensor.shape}", key)
        offsets = np.concatenate([offsets, shape_rows([offset], offsets.shape[1], 0)])
        sizes = np.concatenate([sizes, shape_rows([extent], sizes.shape[1], 1)])
        missing -= math.prod(extent)
    if missing:
        yield IndexProblem(f"{key}: no chunk holds {missing} more elements", key)


def _widest(shape: Shape, offset: Shape, extent: Shape, offsets: np.ndarray, sizes: np.ndarray) -> tuple[Shape, Shape]:
    """Return (offset, sizes) of the empty block grown along each axis until it meets a rectangle."""
    axes = len(shape)
    starts, ends = offsets[:, :axes], offsets[:, :axes] + sizes[:, :axes]
    low, high = np.array(offset), np.array(offset) + np.array(extent)
    for axis in range(axes):
        others = np.arange(axes) != axis
        beside = ((starts < high) & (low < ends))[:, others].all(axis=1)
        low[axis] = max((int(end) for end in ends[beside, axis] if end <= low[axis]), default=0)
        high[axis] = min((int(start) for start in starts[beside, axis] if start >= high[axis]), default=shape[axis])
    return tuple(low.tolist()), tuple((high - low).tolist())


def _grid_problems(index: CheckpointIndex) -> Iterator[IndexProblem]:
    grids: dict[tuple[str, Shape], set[Shape]] = defaultdict(set)
    for unique_key, item in index.objects.items():
        cell = parse_unique_key(unique_key)
        if cell is None:
            continue
        key, offset, shape = cell
        if len(offset) != len(shape) or not all(0 <= at < size for at, size in zip(offset, shape, strict=True)):
            yield IndexProblem(f"object {unique_key} lies outside its grid", unique_key, item.file)
        else:
            grids[key, shape].add(offset)
    for (key, shape), cells in grids.items():
        missing = math.prod(shape) - len(cells)
        if missing:
            # Counted up, not listed: the size of the grid is a claim.
            absent = (cell for cell in (_cell(number, shape) for number in itertools.count()) if cell not in cells)
            names = [str(cell) for cell in itertools.islice(absent, min(missing, _SHOWN_CELLS))]
            yield IndexProblem(
                f"object {key}: {missing} cells of its grid {shape} are missing: {', '.join(names)}", key
            )


def _cell(number: int, shape: Shape) -> Shape:
    cell = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        cell.append(at)
    return tuple(reversed(cell))


def _sharing_problems(index: CheckpointIndex) -> Iterator[IndexProblem]:
    items = list(iter_items(index))
    files = {name: number for number, name in enumerate(sorted({item.file for _, item in items}))}
    places = np.array([(files[item.file], item.offset, item.length) for _, item in items], dtype=np.int64)
    places = places.reshape(len(items), 3)
    order = np.lexsort((places[:, 1], places[:, 0]))
    file, start, length = places[order].T
    new_file = np.concatenate(([True], file[1:] != file[:-1]))[: len(file)]
    reach = _running_maximum(start + length, new_file)
    # The last item whose end is the reach so far: the one that a later item meets.
    furthest = np.maximum.accumulate(np.where(start + length == reach, np.arange(len(file)), 0))
    for later in np.flatnonzero((start[1:] < reach[:-1]) & ~new_file[1:] & (length[1:] > 0)) + 1:
        earlier = furthest[later - 1]
        (one, _), (other, item) = items[order[earlier]], items[order[later]]
        yield IndexProblem(f"{one} and {other} share bytes from {item.offset} of {item.file}", other, item.file)


def _running_maximum(values: np.ndarray, restart: np.ndarray) -> np.ndarray:
    """Return the largest value so far since the last ``restart``."""
    result = values.copy()
    begins = [*np.flatnonzero(restart).tolist(), len(values)]
    for begin, end in itertools.pairwise(begins):
        np.maximum.accumulate(result[begin:end], out=result[begin:end])
    return result


def iter_items(index: CheckpointIndex) -> Iterator[tuple[str, StoredItem]]:
    """Yield (name for messages, item) of every object and chunk."""
    yield from index.objects.items()
    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            yield key if len(tensor.chunks) == 1 else f"{key} at {chunk.offset}", chunk.item
