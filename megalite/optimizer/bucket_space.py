"""Masters and moments in Megatron's ``dp_reshardable`` layout: one flat tensor per bucket of the gradient buffers.

A bucket holds parameters in reverse order of registration, each from a multiple of 64 elements on; a file's tensor of a
bucket ends with the bucket's last parameter, without the padding that divides it among ranks. Positions within a bucket
thus do not depend on the number of ranks, but on TP, PP and on where buckets end, which the file says. So a file can
be read with any number of data-parallel ranks and buckets of any size here, at the TP and PP of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.optimizer.optimizer import STATE_KINDS, MixedPrecisionOptimizer, OwnedPiece
from megalite.parallel.buffers import ROW, ParamAndGradBuffer, round_up
from megalite.utils.errors import CheckpointError

DP_RESHARDABLE = "dp_reshardable"

SCALER = "grad_scaler"
OBJECTS = ("optimizer", SCALER, "per_bucket_numel", "per_bucket_numel_unpadded")
"""What a cell has besides its buckets; the loss scale only in fp16."""

Dtypes = tuple[torch.dtype, torch.dtype]
"""(parameters, gradients) of a buffer."""
NumelPerBucket = list[dict[Dtypes, list[int]]]
"""For each buffer the elements of its buckets, as Megatron stores them."""

Place = tuple[int, int]
"""(bucket, first element in it) of a parameter."""


def order_with_fused_norms(names: Sequence[str]) -> list[int]:
    """Return the numbers of parameters in the order in which a model of Transformer Engine registers them.

    Its linear layers hold the norm in front of them, so that the norm before the attention comes behind
    ``linear_proj``, directly before ``linear_qkv``; elsewhere the order is that of ``names``, which is Megatron's
    without Transformer Engine.
    """
    order: list[int] = []
    waiting: list[int] = []
    for number, name in enumerate(names):
        if ".input_layernorm." in name:
            waiting.append(number)
            continue
        if ".self_attention.linear_qkv." in name:
            order += waiting
            waiting = []
        order.append(number)
    return order + waiting


def places_in_buckets(numels: Sequence[int], bucket_numels: Sequence[int]) -> list[Place]:
    """Return where parameters of ``numels`` elements, in order of registration, lie in buckets of these lengths.

    Raises ValueError when they do not fill such buckets.
    """
    places: list[Place] = [(0, 0)] * len(numels)
    bucket, end = 0, 0
    for index in reversed(range(len(numels))):
        start = round_up(end, ROW)
        if bucket < len(bucket_numels) and start + numels[index] > bucket_numels[bucket]:
            # A bucket that a tied embedding has closed ends where its successor would have started.
            _check_end(bucket, bucket_numels[bucket], (end, start))
            bucket, start = bucket + 1, 0
        if bucket >= len(bucket_numels) or start + numels[index] > bucket_numels[bucket]:
            raise ValueError(f"a parameter of {numels[index]} elements does not fit into bucket {bucket}")
        places[index] = (bucket, start)
        end = start + numels[index]
    if bucket != len(bucket_numels) - 1:
        raise ValueError(f"the parameters fill {bucket + 1} of {len(bucket_numels)} buckets")
    _check_end(bucket, bucket_numels[bucket], (end,))
    return places


def _check_end(bucket: int, numel: int, ends: tuple[int, ...]) -> None:
    if numel not in ends:
        raise ValueError(f"the parameters of bucket {bucket} end at element {ends[0]} of {numel}")


class BucketSpace:
    """The optimizer state of one (tp, pp) cell as leaves of that layout."""

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self.optimizer = optimizer
        tp, pp = optimizer.parallel.tp, optimizer.parallel.pp
        self.prefix = f"optimizer.distributed.dp_group_idx_{tp.rank + tp.size * pp.rank}"
        self.buffers: list[ParamAndGradBuffer] = [b for chunk in optimizer.chunks for b in chunk.buffers]

    def state(self) -> dict[str, Any]:
        """Return the leaves to save: for every bucket this rank's range of it, gaps between parameters included."""
        leaves: list[ShardedTensor] = []
        for number, buffer in enumerate(self.buffers):
            tensors = self._tensors_by_start(buffer)
            for index, bucket in enumerate(buffer.buckets):
                end = min(buffer.own_shard(bucket)[1], bucket.start + bucket.numel_unpadded)
                position = buffer.own_shard(bucket)[0]
                while position < end:
                    words = tensors.get(position) or self._gap(position, end, tensors)
                    for word, values in words.items():
                        key = self._key(number, buffer, index, word)
                        place = (position - bucket.start,)
                        leaves.append(ShardedTensor.from_block(key, values, (bucket.numel_unpadded,), place))
                    position += len(words[STATE_KINDS[0]])
        return {"buckets": leaves, **self._objects(self._own_objects())}

    def _tensors_by_start(self, buffer: ParamAndGradBuffer) -> dict[int, dict[str, torch.Tensor]]:
        """Return position in the buffer -> word -> values, for all owned pieces."""
        starts = dict(zip(buffer.names, (start for start, _ in buffer.layout.ranges), strict=True))
        found: dict[int, dict[str, torch.Tensor]] = {}
        for piece, word, values in self.optimizer.state_tensors():
            if piece.name in starts:
                found.setdefault(starts[piece.name] + piece.parameter_start, {})[word] = values
        return found

    def _gap(self, position: int, end: int, tensors: dict[int, Any]) -> dict[str, torch.Tensor]:
        stop = min((start for start in tensors if start > position), default=end)
        dtype = next((piece.master.dtype for piece in self.optimizer.pieces), torch.float32)
        zeros = torch.zeros(min(stop, end) - position, dtype=dtype, device=self.optimizer.device)
        return dict.fromkeys(STATE_KINDS, zeros)

    def _own_objects(self) -> dict[str, Any]:
        numels: dict[str, NumelPerBucket] = {"per_bucket_numel": [], "per_bucket_numel_unpadded": []}
        for buffer in self.buffers:
            padded = [bucket.end - bucket.start for bucket in buffer.buckets]
            numels["per_bucket_numel"].append({_dtypes(buffer): padded})
            unpadded = [bucket.numel_unpadded for bucket in buffer.buckets]
            numels["per_bucket_numel_unpadded"].append({_dtypes(buffer): unpadded})
        common = self.optimizer.common_state_dict()
        scaler = {SCALER: common[SCALER]} if SCALER in common else {}
        return {"optimizer": common["optimizer"], **scaler, **numels}

    def _objects(self, values: dict[str, Any]) -> dict[str, ShardedObject]:
        replica = self.optimizer.parallel.dp_cp.rank
        return {
            name: ShardedObject(f"{self.prefix}.{name}", value, (1,), (0,), replica_id=replica)
            for name, value in values.items()
        }

    def objects_request(self) -> dict[str, ShardedObject]:
        """Return the request of all objects that a file may have of this cell: how its buckets are cut, parameter
        groups, and the loss scale, which only files in fp16 have."""
        return self._objects(dict.fromkeys(OBJECTS))

    def tensors_request(
        self, stored: NumelPerBucket, masters: dict[int, torch.Tensor], *, fused_norms: bool = False
    ) -> list[ShardedTensor]:
        """Return the owned pieces as ranges of the file's buckets, whose lengths ``stored`` are of this cell.

        ``masters`` has, by the number of a piece, what its master is read into instead; ``fused_norms`` says that the
        file is of a model of Transformer Engine. Raises CheckpointError when the file's buckets are not those of this
        model at this TP, PP and VPP.
        """
        places: dict[str, tuple[int, ParamAndGradBuffer, Place]] = {}
        if len(stored) != len(self.buffers):
            self._refuse(f"the file has {len(stored)} gradient buffers, this rank has {len(self.buffers)}")
        for number, (buffer, numels) in enumerate(zip(self.buffers, stored, strict=True)):
            (lengths,) = numels.values()
            order = order_with_fused_norms(buffer.names) if fused_norms else range(len(buffer.names))
            try:
                found = places_in_buckets([buffer.parameters[index].numel() for index in order], lengths)
            except ValueError as error:
                self._refuse(f"gradient buffer {number}: {error}")
            places.update(
                {buffer.names[index]: (number, buffer, place) for index, place in zip(order, found, strict=True)}
            )
        leaves = []
        for index, piece, word, values in self._numbered():
            number, buffer, (bucket, start) = places[piece.name]
            dtypes, lengths = next(iter(stored[number].items()))
            key = self._key(number, buffer, bucket, word, dtypes)
            target = masters.get(index, values) if word == STATE_KINDS[0] else values
            # Gaps between parameters are asked for by nobody, so these are not the copies that have to cover all.
            leaves.append(
                ShardedTensor.from_block(
                    key, target, (lengths[bucket],), (start + piece.parameter_start,), replica_id=1
                )
            )
        return leaves

    def _numbered(self) -> Iterator[tuple[int, OwnedPiece, str, torch.Tensor]]:
        numbers = {id(piece): number for number, piece in enumerate(self.optimizer.pieces)}
        for piece, word, values in self.optimizer.state_tensors():
            yield numbers[id(piece)], piece, word, values

    def _key(
        self, number: int, buffer: ParamAndGradBuffer, bucket: int, word: str, dtypes: Dtypes | None = None
    ) -> str:
        return f"{self.prefix}.gbuf_idx_{number}.dtype_{dtypes or _dtypes(buffer)}.bucket_idx_{bucket}.{word}"

    def _refuse(self, reason: str) -> None:
        raise CheckpointError(
            f"{self.prefix}: {reason}. The layout dp_reshardable follows from the model and from TP, PP and virtual "
            "stages; use those of the checkpoint, or set checkpoint.no_load_optim"
        )


def _dtypes(buffer: ParamAndGradBuffer) -> Dtypes:
    return buffer.values.dtype, buffer.gradients.dtype
