"""A sharded state dict taken apart for saving and put together after loading."""

from __future__ import annotations

import argparse
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megalite.dist_checkpointing.dict_utils import Path, dotted, iter_leaves, map_leaves, vanishes, without_leaves
from megalite.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megalite.utils.errors import CheckpointError

_ABSENT = object()


def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is described here rather than stored in ``common.pt``."""
    return isinstance(leaf, (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject))


def common_part(tree: dict) -> dict:
    """Return what ``common.pt`` holds: ``tree`` without its sharded and non-persistent leaves."""
    return without_leaves(tree, is_sharded)


def digests_of_common(common: dict) -> dict[str, bytes]:
    """Return a digest of every plain value and container by its dotted name; equal on all ranks for equal values."""
    found: dict[str, bytes] = {}
    rest: list[tuple[Path, Any]] = [((), common)]
    while rest:
        path, value = rest.pop()
        inner = vars(value) if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) else value
        parts: list[tuple[Any, Any]] | None = None
        if isinstance(inner, dict):
            parts = list(inner.items())
        elif isinstance(inner, list):
            parts = list(enumerate(inner))
        digest = hashlib.blake2b(digest_size=8)
        # A container counts with its type and size, so that an empty one is not the same as none.
        pieces = _canonical(value) if parts is None else [f"{type(value).__name__} {len(parts)}".encode()]
        for piece in pieces:
            digest.update(len(piece).to_bytes(8, "little") + piece)
        found[dotted(path)] = digest.digest()
        rest += [((*path, key), part) for key, part in parts or ()]
    return found


def _canonical(value: Any) -> Iterator[bytes]:
    """Yield bytes that are equal on two ranks exactly when the plain values are equal."""
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield repr((value.dtype, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, (tuple, list)):
        yield str(len(value)).encode()
        for part in value:
            yield from _canonical(part)
    elif isinstance(value, dict):
        for path, digest in sorted(digests_of_common(value).items()):
            yield path.encode() + digest
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    else:
        yield repr(value).encode()


class ShardedLeaves:
    """The tensors and objects of a sharded state dict, factories expanded; the state dict itself is not changed."""

    def __init__(self, tree: dict) -> None:
        self.tree = tree
        self.tensors: list[ShardedTensor] = []
        self.objects: list[ShardedObject] = []
        # The expansion is kept: a load fills the very leaves that the plan was made from, and then merges them.
        self._expanded: dict[int, Any] = {}
        self._collect(tree)

    def _collect(self, tree: Any) -> None:
        for path, leaf in iter_leaves(tree):
            if isinstance(leaf, ShardedTensor):
                self.tensors.append(leaf)
            elif isinstance(leaf, ShardedObject):
                self.objects.append(leaf)
            elif isinstance(leaf, ShardedTensorFactory):
                self._expanded[id(leaf)] = leaf.build()
                self._collect(self._expanded[id(leaf)])
            elif isinstance(leaf, (tuple, set)) and any(is_sharded(part) for part in leaf):
                raise ValueError(f"{dotted(path)} is a {type(leaf).__name__} with sharded leaves; use a list or a dict")

    @property
    def keys(self) -> set[str]:
        """Keys on disk of everything declared here."""
        return {leaf.key for leaf in self.tensors} | {leaf.unique_key for leaf in self.objects}

    @property
    def main_objects(self) -> list[ShardedObject]:
        """The objects whose copy here is the one that counts."""
        return [leaf for leaf in self.objects if is_main_replica(leaf.replica_id)]

    def assemble(self, common: dict, objects: dict[str, Any]) -> dict:
        """Return ``common`` with the loaded tensors, ``objects`` (by unique key) and local values in their places."""

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, ShardedTensor):
                return leaf.data
            if isinstance(leaf, ShardedObject):
                return objects.get(leaf.unique_key, leaf.data)
            if isinstance(leaf, LocalNonpersistentObject):
                return leaf.obj
            if isinstance(leaf, ShardedTensorFactory):
                return leaf.merge_fn(map_leaves(value_of, self._expanded[id(leaf)]))
            return leaf

        return _place(common, self.tree, value_of, ())


def _place(common: Any, request: Any, value_of: Any, path: Path) -> Any:
    if isinstance(request, dict):
        stored = _container(common, request, {}, path)
        placed = dict(stored)
        for key, part in request.items():
            value = _place(stored.get(key, _ABSENT), part, value_of, (*path, key))
            if value is not _ABSENT:
                placed[key] = value
        return placed if placed or common is not _ABSENT else _ABSENT
    if isinstance(request, list):
        stored = _container(common, request, [], path)
        pairs = zip(_aligned(stored, request, path), request, strict=True)
        values = [_place(part, wanted, value_of, (*path, i)) for i, (part, wanted) in enumerate(pairs)]
        placed = [value for value in values if value is not _ABSENT]
        return placed if placed or common is not _ABSENT else _ABSENT
    return value_of(request) if is_sharded(request) else common


def _container(common: Any, request: Any, empty: Any, path: Path) -> Any:
    if common is _ABSENT:
        return empty
    if not isinstance(common, type(empty)):
        raise CheckpointError(
            f"common.pt holds a {type(common).__name__} at {dotted(path) or 'the top'}, the run asks for a "
            f"{type(request).__name__}; the checkpoint is of another kind of run"
        )
    return common


def _aligned(stored: list, request: list, path: Path) -> list:
    """Return the stored element of each requested one: lists on disk have closed the gaps of what was taken out."""
    if len(stored) == len(request):
        return stored
    if not stored:
        return [_ABSENT] * len(request)
    gone = [vanishes(wanted, is_sharded) for wanted in request]
    if len(stored) != gone.count(False):
        raise CheckpointError(
            f"common.pt holds {len(stored)} elements at {dotted(path)}, the run asks for {len(request)} "
            f"({gone.count(False)} of them plain); make the lists equally long"
        )
    left = iter(stored)
    return [_ABSENT if missing else next(left) for missing in gone]
