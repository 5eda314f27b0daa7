"""Looking into a checkpoint from one process: what it is, what it holds, whether it is whole, how two differ.

Results are plain dicts of JSON values with stable keys, for a program to use and for ``tools/inspect_checkpoint.py`` to
print. No tensor is loaded; ``verify`` and the comparison of values stream, with a few MiB in memory.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.checkpoint.paths import iteration_folder, read_tracker, step_folder
from megalite.checkpoint.sniff import StepFormat, format_of
from megalite.dist_checkpointing.archive import check_records, find_records
from megalite.dist_checkpointing.core import COMMON_FILE, INDEX_FILE, MARKER_FILE, read_entry, read_marker
from megalite.dist_checkpointing.integrity import SHA256_FILE, XXH3_FILE, verify_manifests
from megalite.dist_checkpointing.mapping import ShardedTensor
from megalite.dist_checkpointing.serialization import load_common_state_dict, load_plain_objects, read_index
from megalite.dist_checkpointing.state_dict_utils import digests_of_common
from megalite.dist_checkpointing.strategies.base import CheckpointIndex, StoredItem, StoredTensor
from megalite.dist_checkpointing.strategies.filesystem import FileSource
from megalite.dist_checkpointing.strategies.framing import TorchSaveFraming
from megalite.dist_checkpointing.strategies.index import index_problems, iter_items, survey_index
from megalite.dist_checkpointing.strategies.load_plan import plan_load
from megalite.dist_checkpointing.strategies.reader import ItemReader
from megalite.utils.errors import CheckpointError

Json = dict[str, Any]

_OWN_FILES = (COMMON_FILE, INDEX_FILE, MARKER_FILE, SHA256_FILE, XXH3_FILE)
_READABLE = ("config.yaml", "progress.json", "tokenizer")
_PARTS = (
    ("masters", re.compile(r"(chained_\d+\.)?optimizer\..*(\.param|\.fp32_param)(\.|$)")),
    ("exp_avg_sq", re.compile(r"(chained_\d+\.)?optimizer\..*\.exp_avg_sq(\.|$)")),
    ("exp_avg", re.compile(r"(chained_\d+\.)?optimizer\..*\.exp_avg(\.|$)")),
    ("other optimizer state", re.compile(r"(chained_\d+\.)?optimizer\.")),
)
_COMPARED_ELEMENTS = 1 << 20
"""Elements of a tensor that are compared at a time."""


def find_step(path: Path, step: int | None = None) -> Path:
    """Return the step that ``path`` is, or that the tracker of the save folder ``path`` names, or its step ``step``."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name a step (iter_...) or a save folder")
    if step is not None:
        return _existing(iteration_folder(path, step))
    if (path / MARKER_FILE).exists() or format_of(path) is not StepFormat.NOTHING:
        return path
    published = read_tracker(path)
    if published is None:
        raise CheckpointError(
            f"{path} is neither a step nor a save folder: it has no latest_checkpointed_iteration.txt; name a step "
            "(iter_...) or the folder above it"
        )
    return _existing(step_folder(path, published))


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing; choose another step")
    return folder


# Summary


def summary(folder: Path) -> Json:
    """Return what a step is: format, who wrote it at which topology, and its bytes by part, by rank and by file."""
    found = format_of(folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    result: Json = {"folder": str(folder), "format": found.value, "complete": found is StepFormat.TORCH_DIST}
    result |= {"files": files, "integrity": [name for name in (SHA256_FILE, XXH3_FILE) if name in files]}
    if found is not StepFormat.TORCH_DIST:
        return result
    index, common = read_index(folder), load_common_state_dict(folder)
    return result | _origin(common) | _sizes(index)


def _origin(common: Mapping[str, Any]) -> Json:
    args = vars(common["args"]) if hasattr(common.get("args"), "__dict__") else {}
    ours = common.get("megalite", {})
    sizes = ours.get("topology") or [
        args.get(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "data")
    ]
    content = common.get("content_metadata") or {}
    layout = content.get("distrib_optim_sharding_type")
    return {
        "iteration": common.get("iteration"),
        "written_by": f"megalite {ours['version']}" if ours else "Megatron" if args else "another program",
        "topology": dict(zip(("tp", "pp", "dp"), sizes, strict=True)),
        "run_id": ours.get("run_id"),
        "consumed_train_samples": args.get("consumed_train_samples"),
        "optimizer_layout": layout or ("not distributed" if "optimizer" in common else None),
    }


def part_of(key: str) -> str:
    """Return which part of the state a tensor belongs to, by its key."""
    return next((part for part, pattern in _PARTS if pattern.match(key)), "weights")


def _sizes(index: CheckpointIndex) -> Json:
    parts: dict[str, Json] = defaultdict(lambda: {"tensors": 0, "elements": 0, "bytes": 0})
    ranks: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for key, tensor in index.tensors.items():
        part = part_of(key)
        parts[part]["tensors"] += 1
        parts[part]["elements"] += math.prod(tensor.shape)
        parts[part]["bytes"] += math.prod(tensor.shape) * tensor.dtype.itemsize
        for chunk in tensor.chunks:
            ranks[_rank_of(chunk.item.file)][part] += math.prod(chunk.sizes) * tensor.dtype.itemsize
    totals = [sum(by_part.values()) for by_part in ranks.values()]
    return {
        "tensors": len(index.tensors),
        "objects": len(index.objects),
        "chunks": sum(len(tensor.chunks) for tensor in index.tensors.values()),
        "parts": dict(parts),
        "ranks": {rank: dict(by_part) for rank, by_part in sorted(ranks.items())},
        "bytes_per_rank": _spread(totals),
    }


def _spread(totals: list[int]) -> Json:
    if not totals:
        return {"min": 0, "mean": 0, "max": 0}
    return {"min": min(totals), "mean": sum(totals) / len(totals), "max": max(totals)}


def _rank_of(file: str) -> int:
    """Return the rank in the name of a data file; -1 if it has none."""
    match = re.fullmatch(r".*__(\d+)_\d+\.distcp", file)
    return int(match[1]) if match else -1


# Keys


def keys(folder: Path, pattern: str | None = None, with_chunks: bool = False) -> list[Json]:
    """Return every tensor and object whose key matches the shell pattern, or contains it."""
    index = read_index(folder)

    def wanted(key: str) -> bool:
        return pattern is None or pattern in key or fnmatch.fnmatchcase(key, pattern)

    rows = [_tensor_row(key, tensor, with_chunks) for key, tensor in sorted(index.tensors.items()) if wanted(key)]
    for key, item in sorted(index.objects.items()):
        if wanted(key):
            rows.append({"key": key, "kind": "object", "bytes": item.length} | (_place(item) if with_chunks else {}))
    return rows


def _tensor_row(key: str, tensor: StoredTensor, with_chunks: bool) -> Json:
    row: Json = {
        "key": key,
        "kind": "tensor",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "num_chunks": len(tensor.chunks),
        "bytes": math.prod(tensor.shape) * tensor.dtype.itemsize,
    }
    if with_chunks:
        ordered = sorted(tensor.chunks, key=lambda chunk: chunk.offset)
        row["chunks"] = [
            {"offset": list(chunk.offset), "sizes": list(chunk.sizes), **_place(chunk.item)} for chunk in ordered
        ]
    return row


def _place(item: StoredItem) -> Json:
    return {"file": item.file, "first_byte": item.offset, "length": item.length}


# Verification


def verify(folder: Path) -> list[Json]:
    """Return everything that is wrong with a step, each as {"text", "key", "file"}; nothing for a sound one.

    Marker, common part and index are parsed, the index is compared with itself and with the files, and every item's
    checksums and the manifests with the bytes.
    """
    findings: list[Json] = []

    def found(text: str, key: str | None = None, file: str | None = None) -> None:
        # Whatever needs the marker says the same of one that is missing.
        if all(entry["text"] != text for entry in findings):
            findings.append({"text": text, "key": key, "file": file})

    for name, read in ((MARKER_FILE, read_marker), (COMMON_FILE, load_common_state_dict)):
        try:
            read(folder)
        except CheckpointError as error:
            found(str(error), file=name)
    try:
        index, problems = survey_index(read_entry(folder / INDEX_FILE), str(folder / INDEX_FILE))
    except (OSError, CheckpointError) as error:
        found(f"cannot read {folder / INDEX_FILE}: {error}", file=INDEX_FILE)
    else:
        for problem in (*problems, *index_problems(index)):
            found(problem.text, problem.key, problem.file or INDEX_FILE)
        findings += _file_findings(folder, index)
    for text in verify_manifests(folder):
        found(text)
    return findings


def _file_findings(folder: Path, index: CheckpointIndex) -> Iterator[Json]:
    items = sorted(iter_items(index), key=lambda entry: (entry[1].file, entry[1].offset))
    named = {item.file for _, item in items}
    for path in sorted(folder.iterdir()):
        if path.name not in named and path.name not in _OWN_FILES and path.name not in _READABLE:
            yield {"text": f"{path.name} is named by nothing in the checkpoint", "key": None, "file": path.name}
    for name in sorted(named):
        end = max(item.offset + item.length for _, item in items if item.file == name)
        path = folder / name
        if path.is_file() and path.stat().st_size > end:
            text = f"{path} has {path.stat().st_size - end} bytes at its end that belong to no item"
            yield {"text": text, "key": None, "file": name}
    source = FileSource(folder)
    try:
        for key, item, kind in _typed_items(index):
            try:
                _check_item(source, item, kind, f"{key} in {folder / item.file}")
            except CheckpointError as error:
                yield {"text": str(error), "key": key, "file": item.file}
    finally:
        source.close()


Kind = tuple[torch.dtype, tuple[int, ...]]


def _typed_items(index: CheckpointIndex) -> Iterator[tuple[str, StoredItem, Kind | None]]:
    """Yield (name, item, type and shape of what it has to hold; None for an object)."""
    yield from ((key, item, None) for key, item in index.objects.items())
    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            name = key if len(tensor.chunks) == 1 else f"{key} at {chunk.offset}"
            yield name, chunk.item, (tensor.dtype, chunk.sizes)


def _check_item(source: FileSource, item: StoredItem, kind: Kind | None, where: str) -> None:
    """Raise CheckpointError unless an item is a sound archive of what the index says it is."""

    def read(start: int, length: int) -> bytes:
        return source.read(item.file, item.offset + start, length)

    check_records(read, find_records(read, item.length, where), where)
    framing = TorchSaveFraming()
    if kind is None:
        framing.parse_object(read(0, item.length), where)
    elif framing.find_elements(read, item.length, *kind, where) is None:
        # Not as torch lays out a plain tensor of this type and shape: loading it tells whether it is one all the same.
        framing.parse_tensor(read(0, item.length), *kind, where)


# Comparison


def difference(one: Path, other: Path, with_values: bool = False) -> Json:
    """Return how two steps differ: keys, shapes and types, plain values, and with ``with_values`` elements."""
    indices = [read_index(folder) for folder in (one, other)]
    first, second = ({**index.tensors, **dict.fromkeys(index.objects)} for index in indices)
    both = sorted(indices[0].tensors.keys() & indices[1].tensors.keys())
    shapes = {
        key: [_kind(index.tensors[key]) for index in indices]
        for key in both
        if _kind(indices[0].tensors[key]) != _kind(indices[1].tensors[key])
    }
    result: Json = {
        "only_in_first": sorted(first.keys() - second.keys()),
        "only_in_second": sorted(second.keys() - first.keys()),
        "shapes": shapes,
        "common": _common_differences(load_common_state_dict(one), load_common_state_dict(other)),
    }
    if with_values:
        same = [key for key in both if key not in shapes]
        result["values"] = {key: found for key in same if (found := _compare(key, (one, other), indices)) is not None}
        shared = sorted(indices[0].objects.keys() & indices[1].objects.keys())
        stored = [load_plain_objects(folder, shared) for folder in (one, other)]
        result["objects"] = [key for key in shared if _digests(stored[0][key]) != _digests(stored[1][key])]
    return result


def is_equal(result: Mapping[str, Any]) -> bool:
    """Return whether a result of ``difference`` names nothing."""
    return not any(result.values())


def _kind(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _common_differences(one: Any, other: Any) -> Json:
    first, second = dict(_plain_leaves(one)), dict(_plain_leaves(other))
    absent = "(absent)"
    return {
        name: [first.get(name, absent), second.get(name, absent)]
        for name in sorted(first.keys() | second.keys())
        if first.get(name, absent) != second.get(name, absent)
    }


def _digests(value: Any) -> dict[str, bytes]:
    return digests_of_common({"value": value})


def _plain_leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as text) of nested plain values."""
    inner = vars(value) if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) else value
    if isinstance(inner, dict):
        for key, part in inner.items():
            yield from _plain_leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(inner, list) and any(isinstance(part, (dict, list)) for part in inner):
        for position, part in enumerate(inner):
            yield from _plain_leaves(part, f"{path}.{position}")
    elif isinstance(inner, (torch.Tensor, np.ndarray)):
        # Long ones are cut short when they are printed.
        yield path, f"{inner.dtype} {tuple(inner.shape)} with digest {_digests(inner)['value'].hex()[:12]}"
    else:
        yield path, str(inner)


def _compare(key: str, folders: tuple[Path, Path], indices: list[CheckpointIndex]) -> Json | None:
    """Return how many elements of a tensor differ and the largest difference; None when all bits are equal."""
    shape = indices[0].tensors[key].shape
    differing, largest = 0, 0.0
    for first, end in _row_ranges(shape):
        parts = [_rows(key, folder, index, first, end) for folder, index in zip(folders, indices, strict=True)]
        if torch.equal(*(part.contiguous().reshape(-1).view(torch.uint8) for part in parts)):
            continue
        unequal = parts[0] != parts[1]
        differing += int(unequal.sum())
        if unequal.any():
            gap = (parts[0].double() - parts[1].double()).abs()[unequal]
            largest = max(largest, float(gap.nan_to_num(nan=math.inf).max()))
    return {"elements": differing, "of": math.prod(shape), "largest": largest} if differing else None


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield ranges along the first axis that have about as many elements as are compared at a time."""
    rows = shape[0] if shape else 1
    step = max(1, _COMPARED_ELEMENTS * rows // max(math.prod(shape), 1))
    yield from ((first, min(first + step, rows)) for first in range(0, rows, step))


def _rows(key: str, folder: Path, index: CheckpointIndex, first: int, end: int) -> torch.Tensor:
    stored = index.tensors[key]
    shape = (end - first, *stored.shape[1:]) if stored.shape else ()
    data = torch.empty(shape, dtype=stored.dtype)
    offset = (first, *(0,) * (len(shape) - 1)) if shape else ()
    leaf = ShardedTensor.from_block(key, data, stored.shape, offset)
    ItemReader(folder, TorchSaveFraming()).read(plan_load([leaf], [], index, folder))
    return data
