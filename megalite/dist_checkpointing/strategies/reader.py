"""The items that one rank needs: read once each, checked, and copied to where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.dist_checkpointing.integrity import BlockHashes
from megalite.dist_checkpointing.strategies.base import ByteSource, ChunkRead, ItemFraming, LoadPlan, StoredItem
from megalite.dist_checkpointing.strategies.filesystem import FileSource


class ItemReader:
    """Reads the items of a plan; with ``hashes`` every byte that is used is compared with what was written."""

    def __init__(self, folder: Path, framing: ItemFraming, hashes: BlockHashes | None = None) -> None:
        self.folder, self.framing, self.hashes = folder, framing, hashes

    def read(self, plan: LoadPlan) -> dict[str, Any]:
        """Fill the leaves of ``plan`` and return the loaded objects by unique key."""
        source = FileSource(self.folder)
        try:
            objects = {}
            for key, item in plan.objects:
                data = self._bytes(source, item, key)
                objects[key] = self.framing.parse_object(data, f"{key} in {self.folder / item.file}")
            for leaf in plan.zeroed:
                leaf.data.detach().zero_()
            for read in plan.chunks:
                self._fill(source, read)
        finally:
            source.close()
        return objects

    def _bytes(self, source: ByteSource, item: StoredItem, name: str) -> bytes:
        data = source.read(item.file, item.offset, item.length)
        if self.hashes is not None:
            self.hashes.check(item.file, item.offset, data, name)
        return data

    def _fill(self, source: ByteSource, read: ChunkRead) -> None:
        item = read.chunk.item
        data = self._bytes(source, item, read.name)
        tensor = self.framing.parse_tensor(data, read.dtype, read.chunk.sizes, f"{read.name}/{item.file}")
        for copy in read.copies:
            target = copy.leaf.global_data
            part = tensor.detach()
            for axis, (start, goal, size) in enumerate(zip(copy.source, copy.target, copy.sizes, strict=True)):
                part = part.narrow(axis, start, size)
                target = target.narrow(axis, goal, size)
            target.copy_(part)
