"""Adam on fp32 masters that lie in the order of the gradient buffers.

An optimizer owns pieces of parameters: ranges that are contiguous in a buffer and in the flattened parameter. The plain
optimizer here owns every parameter whole on every data-parallel rank; ``DistributedOptimizer`` owns one shard of each
bucket. Everything else, and so every bit of an update, is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megalite.config.schema import OptimizerConfig
from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.dist_checkpointing.optimizer import sharded_tensors_of_range
from megalite.optimizer.clip_grads import clip_coefficient, gradient_norm
from megalite.optimizer.grad_scaler import ConstantGradScaler
from megalite.parallel.buffers import ROW, BucketLayout, ParamAndGradBuffer, pieces_of_shard, round_up
from megalite.parallel.ddp import DistributedDataParallel
from megalite.parallel.layers import traits
from megalite.utils.dist import Group
from megalite.utils.errors import CheckpointError

MASTER = "param"
STATE_KINDS = (MASTER, "exp_avg", "exp_avg_sq")
"""Words under which a parameter's fp32 master and moments are stored: ``optimizer.state.<word>.<model key>``."""
WORDS_ON_DISK = {word: word for word in STATE_KINDS}

SHARDING_TYPE = "fully_reshardable"


GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells parameter groups apart, whatever their order in a file."""


def group_identity(group: Mapping[str, Any]) -> tuple[float, float, bool, bool]:
    """Return what a parameter group is recognised by; old files have the names with ``pre_`` in front."""
    wd_mult, lr_mult, is_expert, is_decoupled = (group.get(name, group.get(f"pre_{name}")) for name in GROUP_IDENTITY)
    multipliers = (float(1.0 if value is None else value) for value in (wd_mult, lr_mult))
    return (*multipliers, bool(is_expert), bool(is_decoupled))


@dataclass
class OwnedPiece:
    """A part of a parameter that this rank updates; all tensors are 1-D and of equal length."""

    name: str
    parameter_start: int
    values: torch.Tensor
    """View of the parameter buffer."""
    gradient: torch.Tensor
    """View of the gradient buffer."""
    master: nn.Parameter
    """What Adam updates: ``values`` itself where that is at least fp32, an fp32 copy of it otherwise."""


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    grad_norm: float
    updated: bool


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: not to biases and not to 1-D parameters."""
    return not (name.endswith(".bias") or parameter.dim() == 1)


def _master_of(values: torch.Tensor) -> nn.Parameter:
    is_exact = values.dtype in (torch.float32, torch.float64)
    return nn.Parameter(values.detach() if is_exact else values.detach().float(), requires_grad=False)


def _has_fused_adam(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


class MixedPrecisionOptimizer:
    """The plain optimizer: every data-parallel rank updates every parameter from the gathered gradients."""

    shards_over_dp = False

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        grad_scaler: ConstantGradScaler | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.config = config
        self.grad_scaler = grad_scaler or ConstantGradScaler()
        self.parallel = self.chunks[0].parallel
        self.pieces: list[OwnedPiece] = []
        self._normed: list[torch.Tensor] = []
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    self._add_bucket(buffer, bucket)
        self.device = self.chunks[0].buffers[0].values.device
        self.adam = self._build_adam()
        self.num_steps = 0
        """Updates that Adam has made; equal on all ranks, also on one that owns nothing."""

    def _ownership(self, buffer: ParamAndGradBuffer, bucket: BucketLayout) -> tuple[int, int]:
        return bucket.start, bucket.end

    @property
    def _norm_group(self) -> Group:
        """Ranks whose owned pieces together hold each gradient once."""
        return self.parallel.model_parallel

    def _add_bucket(self, buffer: ParamAndGradBuffer, bucket: BucketLayout) -> None:
        start, end = self._ownership(buffer, bucket)
        counted: list[tuple[int, int]] = []
        for piece in pieces_of_shard(buffer.layout, bucket, start, end):
            values = buffer.values[piece.buffer_start : piece.buffer_end]
            gradient = buffer.gradients[piece.buffer_start : piece.buffer_end]
            name = buffer.names[piece.parameter]
            self.pieces.append(OwnedPiece(name, piece.parameter_start, values, gradient, _master_of(values)))
            info = traits(buffer.parameters[piece.parameter])
            if not info.is_copy and (info.tp_axis is not None or self.parallel.tp.is_first):
                # The gap behind a parameter, up to the next row, is zero; neighbours merge into one segment.
                begin, stop = piece.buffer_start, round_up(piece.buffer_end, ROW)
                if counted and counted[-1][1] == begin:
                    begin = counted.pop()[0]
                counted.append((begin, stop))
        self._normed += [buffer.gradients[begin:stop] for begin, stop in counted]

    def _build_adam(self) -> torch.optim.AdamW:
        parameters = {name: p for chunk in self.chunks for name, p in chunk.parameters()}
        members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for piece in self.pieces:
            members[decays(piece.name, parameters[piece.name])].append(piece.master)
        # Both groups exist on every rank, also where one is empty, so that rank 0's description fits all ranks.
        groups = [
            {"params": members[with_decay], "wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False}
            | {"is_decoupled_lr": False, "default_config": True}
            | {"max_lr": self.config.lr, "min_lr": self.config.min_lr}
            for with_decay, wd_mult in ((True, 1.0), (False, 0.0))
        ]
        fused = _has_fused_adam(self.device)
        adam = torch.optim.AdamW(
            groups,
            lr=self.config.lr,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_eps,
            weight_decay=self.config.weight_decay,
            fused=fused,
        )
        for group in adam.param_groups:
            for master in group["params"]:
                # Made now, not by the first step: a checkpoint of iteration 0 has moments, and a load has their place.
                adam.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=self.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
        return adam

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def step(self) -> StepOutcome:
        """Unscale, clip, update the masters and write them back to the parameters. Collective over all ranks.

        A gradient norm that is not finite leaves everything untouched but the loss scale.
        """
        scale = self.grad_scaler.scale
        norm = gradient_norm(self._normed, self._norm_group, self.device) / scale
        is_finite = norm < float("inf")
        self.grad_scaler.update(found_inf=not is_finite)
        if not is_finite:
            return StepOutcome(norm, updated=False)
        for piece in self.pieces:
            piece.master.grad = piece.gradient.to(piece.master.dtype)
        # One pass for both: the loss scale is a power of two unless the user gave another, so nothing is rounded twice.
        # On the masters' gradients: in fp16 an unscaled gradient would vanish, which the scale is there to prevent.
        factor = (clip_coefficient(norm, self.config.clip_grad) or 1.0) / scale
        if factor != 1.0 and self.pieces:
            torch._foreach_mul_([piece.master.grad for piece in self.pieces], factor)
        self.adam.step()
        self.num_steps += 1
        for piece in self.pieces:
            piece.master.grad = None
        self._write_back()
        return StepOutcome(norm, updated=True)

    def _write_back(self) -> None:
        for piece in self.pieces:
            if piece.master.data_ptr() != piece.values.data_ptr():
                piece.values.copy_(piece.master)

    def reload_masters(self) -> None:
        """Set the masters to the present parameters, as after loading weights without optimizer state."""
        for piece in self.pieces:
            if piece.master.data_ptr() != piece.values.data_ptr():
                piece.master.copy_(piece.values)

    # Checkpoint

    def state_tensors(self) -> Iterator[tuple[OwnedPiece, str, torch.Tensor]]:
        """Yield (piece, word, 1-D tensor) for the master and both moments of every owned piece."""
        for piece in self.pieces:
            state = self.adam.state[piece.master]
            yield piece, "param", piece.master.detach()
            yield piece, "exp_avg", state["exp_avg"]
            yield piece, "exp_avg_sq", state["exp_avg_sq"]

    def sharded_state_dict(
        self,
        model_state: Mapping[str, ShardedTensor | ShardedObject],
        word_on_disk: Mapping[str, str] = WORDS_ON_DISK,
        masters: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[str, list[ShardedTensor]]:
        """Return the owned pieces as blocks of parameter-shaped global tensors, sharing memory with the optimizer.

        ``model_state`` says where each parameter lies. No communication; loading fills the optimizer in place.
        ``word_on_disk`` names the tensors, those without a name are left out; ``masters`` has, by the number of a
        piece, a tensor that stands for its master.
        """
        blocks: dict[str, list[ShardedTensor]] = {}
        numbers = {id(piece): number for number, piece in enumerate(self.pieces)}
        for piece, word, values in self.state_tensors():
            if word not in word_on_disk:
                continue
            place = model_state[piece.name]
            flat = values if word != MASTER or masters is None else masters.get(numbers[id(piece)], values)
            own = sharded_tensors_of_range(
                f"optimizer.state.{word_on_disk[word]}.{place.key}",
                flat,
                place,
                piece.parameter_start,
                piece.parameter_start + flat.numel(),
                replica_id=(*place.replica_id[:2], 0 if self.shards_over_dp else place.replica_id[2]),
            )
            blocks.setdefault(f"{word}.{piece.name}", []).extend(own)
        return blocks

    def common_state_dict(self) -> dict[str, Any]:
        """Return what is equal on all ranks: parameter groups with Adam's step count, and the loss scale in fp16."""
        groups = []
        for group in self.param_groups:
            plain = {name: value for name, value in group.items() if name != "params"}
            groups.append(plain | {"step": float(self.num_steps)})
        state = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING_TYPE}
        scaler = self.grad_scaler.state_dict()
        return state | ({"grad_scaler": scaler} if scaler else {})

    def load_common_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore Adam's step count and the loss scale; learning rate and decay come from the schedule."""
        groups = state["optimizer"]["param_groups"]
        saved = {group_identity(group): group for group in groups}
        missing = [group_identity(group) for group in self.param_groups if group_identity(group) not in saved]
        if missing or len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has optimizer groups with {', '.join(GROUP_IDENTITY)} = {sorted(saved)}, this run "
                f"needs {[group_identity(group) for group in self.param_groups]}; set checkpoint.no_load_optim to "
                "start with fresh optimizer state"
            )
        for group in self.param_groups:
            for master in group["params"]:
                self.adam.state[master]["step"].fill_(float(saved[group_identity(group)]["step"]))
        self.num_steps = max(int(group["step"]) for group in saved.values())
        self.grad_scaler.load_state_dict(state.get("grad_scaler", {}))
