"""The data files of one rank: items through staging and framing into one sink per file, each file in its own thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from megalite.dist_checkpointing.integrity import HashedFile, Hasher, Integrity
from megalite.dist_checkpointing.strategies.base import ItemFraming, SavePlan, Staging
from megalite.dist_checkpointing.strategies.direct import open_sink, takes_direct_writes
from megalite.utils.files import FaultHook, fsync_directory

_WORTH_DIRECT = 8 << 20
"""Bytes of a rank from which on writing past the page cache is faster than through it."""


class ItemWriter:
    """Writes the items of a plan and returns their hashes, if there are to be any."""

    def __init__(
        self, folder: Path, staging: Staging, framing: ItemFraming, integrity: Integrity, hook: FaultHook
    ) -> None:
        self.folder = folder
        self.staging, self.framing = staging, framing
        self.integrity, self.hook = integrity, hook

    def write(self, plan: SavePlan, tensors: Sequence[torch.Tensor], objects: Sequence[bytes]) -> list[HashedFile]:
        """Write ``tensors`` and ``objects``, in the order of the plan, into the plan's files, durably."""
        if not plan.files:
            return []
        is_direct = int(plan.lengths.sum()) >= _WORTH_DIRECT and takes_direct_writes(self.folder)

        def write_file(number: int) -> HashedFile | None:
            members = np.flatnonzero(plan.file_of == number)
            members = members[np.argsort(plan.starts[members], kind="stable")].tolist()
            lengths = [int(plan.lengths[member]) for member in members]
            ending = list(objects) if number == 0 else []
            staged = [tensors[member] for member in members]
            return self._write_file(plan.files[number], staged, lengths, ending, is_direct)

        if len(plan.files) == 1:
            files = [write_file(0)]
        else:
            with ThreadPoolExecutor(len(plan.files)) as threads:
                files = list(threads.map(write_file, range(len(plan.files))))
        self.hook("fsync_directory", self.folder)
        fsync_directory(self.folder)
        return [file for file in files if file is not None]

    def _write_file(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        lengths: Sequence[int],
        objects: Sequence[bytes],
        is_direct: bool,
    ) -> HashedFile | None:
        sink = open_sink(self.folder / name, is_direct, self.hook)
        hasher = Hasher(self.integrity)
        try:
            for tensor, planned in zip(self.staging.stage(tensors), lengths, strict=True):
                pieces = self.framing.frame_tensor(tensor)
                assert sum(len(piece) for piece in pieces) == planned, "an item is not as long as its plan says"
                hasher.item(pieces)
                sink.write(pieces)
            for data in objects:
                hasher.item([data])
                sink.write([data])
        except BaseException:
            sink.abort()
            raise
        sink.close()
        if self.integrity == "off":
            return None
        sizes = [*lengths, *map(len, objects)]
        starts = np.cumsum([0, *sizes]).tolist()
        return HashedFile(name, list(zip(starts, sizes, strict=False)), hasher.digest())
