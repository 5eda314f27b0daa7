"""A 64-bit sum over global tensors that does not depend on how they are sharded.

Every element contributes a hash of (key, dtype, position in the global tensor, bits), and the contributions are added
modulo 2^64: any cut into blocks gives the same sum, and one changed, moved or missing element gives another. It
compares states; it is no protection against someone who wants two states to agree. The mixing step is the finalizer
of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megalite.dist_checkpointing.mapping import Shape, ShardedTensor, is_main_replica
from megalite.dist_checkpointing.state_dict_utils import ShardedLeaves
from megalite.utils.dist import SINGLE, Group

_BLOCK = 1 << 20
_MASK = (1 << 64) - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)


def fingerprint(
    sharded_state_dict: dict,
    group: Group,
    *,
    prefixes: Sequence[str] = ("",),
    true_rows: Mapping[str, int] | None = None,
) -> str:
    """Return one number, in hexadecimal, for all global tensors whose key starts with one of ``prefixes``.

    Collective over ``group``; only main replicas count. ``true_rows`` limits a key to its first rows on axis 0, so that
    vocabulary padding does not count. Objects and plain values are left out.
    """
    total = sum(_local_sums(sharded_state_dict, prefixes, true_rows or {}).values())
    return _hex(group.all_reduce(_signed([total])).tolist()[0])


def fingerprint_by_key(
    sharded_state_dict: dict,
    group: Group,
    *,
    prefixes: Sequence[str] = ("",),
    true_rows: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the number of every global tensor; they add up to ``fingerprint``. Collective over ``group``."""
    sums = _local_sums(sharded_state_dict, prefixes, true_rows or {})
    keys = sorted(set().union(*group.all_gather_object(sorted(sums))))
    totals = group.all_reduce(_signed([sums.get(key, 0) for key in keys]))
    return {key: _hex(total) for key, total in zip(keys, totals.tolist(), strict=True)}


def fingerprint_of_plain(tensors: Mapping[str, torch.Tensor], *, true_rows: Mapping[str, int] | None = None) -> str:
    """Return what ``fingerprint`` gives for these whole global tensors."""
    whole = {
        key: ShardedTensor.from_block(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())
        for key, tensor in tensors.items()
    }
    return fingerprint(whole, SINGLE, true_rows=true_rows)


def _local_sums(tree: dict, prefixes: Sequence[str], true_rows: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for leaf in ShardedLeaves(tree).tensors:
        if leaf.key.startswith(tuple(prefixes)) and is_main_replica(leaf.replica_id):
            part = _sum_of_block(leaf, true_rows.get(leaf.key))
            sums[leaf.key] = (sums.get(leaf.key, 0) + part) & _MASK
    return sums


def _sum_of_block(leaf: ShardedTensor, rows: int | None) -> int:
    data = leaf.global_data
    if rows is not None:
        data = data[: max(0, rows - leaf.global_offset[0])]
    seed = np.uint64(_seed(leaf))
    base, steps = _merged_axes(tuple(data.shape), leaf.global_shape, leaf.global_offset)
    flat = data.reshape(-1)
    total = 0
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        position = _positions(start, part.numel(), base, steps)
        mixed = _mix(position * _ODD + seed)
        for word in _words(part):
            mixed = _mix(mixed ^ (word + _ODD))
        total += int(mixed.sum(dtype=np.uint64))
    return total & _MASK


def _seed(leaf: ShardedTensor) -> int:
    name = f"{leaf.key}\0{leaf.dtype}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _merged_axes(block: Shape, whole: Shape, offset: Shape) -> tuple[int, list[tuple[int, int]]]:
    """Return the global position of the block's origin and (size, global stride) of its axes, innermost first.

    Axes that can be walked as one are merged.
    """
    base, stride = 0, 1
    axes: list[tuple[int, int]] = []
    for size, full, start in zip(reversed(block), reversed(whole), reversed(offset), strict=True):
        base += start * stride
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * size, axes[-1][1])
        elif size != 1:
            axes.append((size, stride))
        stride *= full
    return base, axes


def _positions(start: int, count: int, base: int, axes: list[tuple[int, int]]) -> np.ndarray:
    """Return the global positions of elements ``start`` to ``start + count`` of a block."""
    rest = np.arange(start, start + count, dtype=np.int64)
    position = np.full(count, base, dtype=np.int64)
    for size, stride in axes[:-1]:
        rest, inner = np.divmod(rest, size)
        position += inner * stride
    if axes:
        position += rest * axes[-1][1]
    return position.view(np.uint64)


def _words(part: torch.Tensor) -> list[np.ndarray]:
    """Return the bits of every element as one or two unsigned words."""
    part = part.cpu().contiguous()
    size = part.element_size()
    raw = part.view(torch.uint8).numpy()
    if size <= 8:
        return [raw.view(f"u{size}").astype(np.uint64)]
    return [raw.view(np.uint64)[word :: size // 8] for word in range(size // 8)]


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _signed(totals: Sequence[int]) -> torch.Tensor:
    """Return totals modulo 2^64 as two's complement, which an int64 sum adds modulo 2^64."""
    return torch.from_numpy(np.array([total & _MASK for total in totals], dtype=np.uint64).view(np.int64))


def _hex(total: int) -> str:
    return f"{total & _MASK:016x}"
