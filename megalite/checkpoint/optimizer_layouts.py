"""In which way a file holds the optimizer: what is asked for, and what is done with the answer.

The file says it, not the run's settings. Each layout ends in the same place: fp32 masters, moments and step counts of
the pieces that this rank owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from megalite.checkpoint.state import TrainState, main_params_request, model_state
from megalite.dist_checkpointing.exchange_utils import agreed
from megalite.dist_checkpointing.serialization import load_plain_objects, read_index
from megalite.model.gpt import VOCABULARY_TABLES
from megalite.optimizer.bucket_space import DP_RESHARDABLE, SCALER, BucketSpace
from megalite.optimizer.optimizer import MASTER, SHARDING_TYPE, WORDS_ON_DISK, OwnedPiece
from megalite.utils.dist import agree_any
from megalite.utils.errors import CheckpointError, DamagedCheckpointError, TopologyMismatchError

FRESH_START = "start from its weights with checkpoint.no_load_optim or checkpoint.finetune"


@contextlib.contextmanager
def as_damage(where: Path) -> Iterator[None]:
    """Turn what goes wrong when plain values are not of the expected form into damage of ``where``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{where} does not hold what a trainer stores: {error!r}; use another checkpoint"
        ) from error


class OptimizerLayout(Protocol):
    """One way to hold the optimizer."""

    def request(self, run: TrainState, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the leaves to ask for; ``weights`` says where parameters lie. Collective over all ranks."""
        ...

    def apply(self, run: TrainState, common: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        """Restore what is not filled in place. Collective over all ranks."""
        ...


def layout_of(common: Mapping[str, Any], run: TrainState, folder: Path) -> OptimizerLayout:
    """Return the layout of a file, from its common part alone; an error if it cannot be read into this run."""
    args = vars(common["args"])
    stored = common["optimizer"]
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if 0 in stored or any(str(name).startswith("chained_") for name in stored):
        raise CheckpointError(f"{folder} holds several optimizers (experts), which this version has not; {FRESH_START}")
    if kind is None and "content_metadata" not in common and args.get("use_distributed_optimizer"):
        # Files older than content_metadata had one of two layouts, both given up since.
        kind = "fully_sharded_model_space" if args.get("ckpt_fully_parallel_save") else "dp_zero_gather_scatter"
    if kind == SHARDING_TYPE:
        return ParameterSpace(WORDS_ON_DISK, folder, _Masters(common))
    if kind == DP_RESHARDABLE:
        _check_topology(args, run, folder)
        fused_norms = args.get("transformer_impl") == "transformer_engine"
        known = "that of Transformer Engine" if fused_norms else "Megatron's without Transformer Engine"
        fault = (
            f"The order of parameters in the buckets was taken to be {known}, as the file's transformer_impl "
            f"{args.get('transformer_impl')} says"
        )
        return Buckets(folder, _Masters(common, fault), fused_norms)
    if kind is None:
        has_masters = "optimizer" in stored
        words = {**WORDS_ON_DISK, MASTER: "fp32_param"}
        if not has_masters:
            words.pop(MASTER)
        return ParameterSpace(words, folder, _Masters(common))
    raise CheckpointError(
        f"{folder} holds its optimizer as {kind}, this version reads {SHARDING_TYPE}, {DP_RESHARDABLE} and optimizers "
        f"that are not distributed; save it again with Megatron's --dist-ckpt-optim-fully-reshardable, or {FRESH_START}"
    )


def _check_topology(args: Mapping[str, Any], run: TrainState, folder: Path) -> None:
    saved = {"TP": args.get("tensor_model_parallel_size"), "PP": args.get("pipeline_model_parallel_size")}
    now = {"TP": run.parallel.tp.size, "PP": run.parallel.pp.size, "VPP": run.derived.num_model_chunks}
    saved["VPP"] = args.get("virtual_pipeline_model_parallel_size")
    saved = {axis: int(size or 1) for axis, size in saved.items()}
    if saved != now:
        shown = [axis for axis in now if axis != "VPP" or saved[axis] != now[axis]]
        before, after = (" ".join(f"{axis}={sizes[axis]}" for axis in shown) for sizes in (saved, now))
        raise TopologyMismatchError(
            f"{folder} was saved at {before} with its optimizer as {DP_RESHARDABLE}, this run has {after}. That layout "
            "follows from TP, PP and virtual stages: start once at the old sizes with "
            "checkpoint.dist_ckpt_optim_fully_reshardable on, save, and change the sizes then; or set "
            "checkpoint.no_load_optim to go on from the weights with fresh moments."
        )


@dataclass
class _Masters:
    """Where fp32 masters are read to when they share memory with the weights, and their comparison with the weights.

    A run in fp32 has no masters beside its weights: weights and masters of a file would be read into the same memory.
    """

    common: Mapping[str, Any]
    known_fault: str = "Megatron shifts masters like this when it saves fully_reshardable with several padded buckets"
    """What is known to make masters and weights of another program's file differ."""
    apart: dict[int, torch.Tensor] = field(default_factory=dict)
    """Number of a piece -> tensor that its master is read into."""

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the file, whose masters are then compared with its weights."""
        return "megalite" not in self.common

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the weights in the file."""
        args = vars(self.common["args"])
        return torch.bfloat16 if args.get("bf16") else torch.float16 if args.get("fp16") else torch.float32

    def prepare(self, run: TrainState) -> dict[int, torch.Tensor]:
        """Return the tensors that stand for masters in the request."""
        if not self.is_foreign and self.stored_dtype == torch.float32:
            # Weights and masters of the file are the same numbers: it does not matter which is read last.
            return {}
        self.apart = {
            number: torch.zeros_like(piece.master)
            for number, piece in enumerate(run.optimizer.pieces)
            if _is_shared(piece)
        }
        return self.apart

    def settle(self, run: TrainState) -> None:
        """Compare masters with weights where another program wrote them, then let shared ones be the masters.

        Collective over all ranks.
        """
        if self.is_foreign:
            self._compare(run)
        for number, values in self.apart.items():
            run.optimizer.pieces[number].values.copy_(values)
        rewritten = bool(self.apart)
        if self.stored_dtype != torch.float32:
            # A run in another 16-bit type has weights that were rounded twice: to the file's type and to its own.
            changed = [
                piece
                for piece in run.optimizer.pieces
                if piece.values.dtype != self.stored_dtype and not _is_shared(piece)
            ]
            for piece in changed:
                piece.values.copy_(piece.master)
            rewritten = rewritten or bool(changed)
        if agree_any(rewritten, run.parallel.world) and run.optimizer.shards_over_dp:
            # Every rank has put its own pieces in place: the others need them as well.
            for chunk in run.chunks:
                chunk.start_param_sync()
            run.finish_param_sync()

    def _compare(self, run: TrainState) -> None:
        weights = model_state(run)
        differing: dict[str, int] = {}
        for number, piece in enumerate(run.optimizer.pieces):
            true = _true_length(piece, weights[piece.name], run.vocab_size)
            master, values = self.apart.get(number, piece.master.detach())[:true], piece.values[:true]
            rounded = master.to(self.stored_dtype).to(values.dtype)
            # A value that is no number equals nothing, not even itself.
            wrong = int(((rounded != values) & ~(rounded.isnan() & values.isnan())).sum())
            if wrong:
                differing[piece.name] = differing.get(piece.name, 0) + wrong
        totals: dict[str, int] = {}
        for found in run.parallel.world.all_gather_object(differing):
            for name, wrong in found.items():
                totals[name] = totals.get(name, 0) + wrong
        if totals:
            names = sorted(totals)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(
                f"the checkpoint's fp32 masters are not its weights: {sum(totals.values())} elements differ after "
                f"rounding to {self.stored_dtype}, in {', '.join(f'{n} ({totals[n]})' for n in names[:5])}{more}. "
                f"{self.known_fault}. Set checkpoint.no_load_optim, and the masters are set from the weights"
            )


def _true_length(piece: OwnedPiece, place: Any, vocab_size: int) -> int:
    """Return how many elements of a piece are no padding of the vocabulary, whose rows mean nothing."""
    if place.key not in VOCABULARY_TABLES:
        return piece.values.numel()
    rows = max(0, vocab_size - place.global_offset[0])
    return min(piece.values.numel(), max(0, rows * place.local_shape[1] - piece.parameter_start))


def _is_shared(piece: OwnedPiece) -> bool:
    return piece.master.data_ptr() == piece.values.data_ptr() and piece.values.numel() > 0


@dataclass
class ParameterSpace:
    """Blocks of parameter-shaped tensors: ``fully_reshardable``, and optimizers that are not distributed."""

    words: Mapping[str, str]
    folder: Path
    masters: _Masters

    def request(self, run: TrainState, weights: Mapping[str, Any]) -> dict[str, Any]:
        if MASTER not in self.words:
            # A file in fp32 without masters: those of a run in 16 bits are its weights, before they are rounded.
            state = run.optimizer.sharded_state_dict(weights, self.words)
            return {"optimizer_state": state, "main_params": main_params_request(run, weights)}
        apart = self.masters.prepare(run)
        return {"optimizer_state": run.optimizer.sharded_state_dict(weights, self.words, apart)}

    def apply(self, run: TrainState, common: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        if MASTER in self.words:
            self.masters.settle(run)
        _restore_groups(run, self.folder, lambda: _plain_common(common))


def _restore_groups(run: TrainState, folder: Path, stored: Callable[[], Mapping[str, Any]]) -> None:
    """Restore what ``stored`` returns: groups with their steps, and the loss scale. Collective over all ranks."""

    def restore() -> None:
        with as_damage(folder):
            run.optimizer.load_common_state_dict(stored())

    agreed(run.parallel.world, "restoring the optimizer's groups", restore)
    # Each (tp, pp) cell may have objects of its own; Adam counts the same steps everywhere.
    steps = sorted(set(run.parallel.world.all_gather_object(run.optimizer.num_steps)))
    if len(steps) > 1:
        raise DamagedCheckpointError(
            f"{folder} has optimizer states of the steps {', '.join(map(str, steps))}: files of several steps are "
            "mixed; use another checkpoint"
        )


def _plain_common(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups with their step, and the scaler, from any of Megatron's ways to keep them."""
    stored = common["optimizer"]
    inner = stored.get("optimizer", stored)
    # Megatron leaves the step out only where there was none yet.
    default = {} if common.get("iteration") else {"common_step": 0}
    steps = {**default, **(inner.get("state") or {})}
    groups = [
        {**({"step": steps["common_step"]} if "step" not in group else {}), **group} for group in inner["param_groups"]
    ]
    return {
        **{name: value for name, value in stored.items() if name == SCALER},
        "optimizer": {"param_groups": groups},
    }


@dataclass
class Buckets:
    """Flat ranges of gradient buckets: ``dp_reshardable``."""

    folder: Path
    masters: _Masters
    fused_norms: bool
    """Whether the file is of a model of Transformer Engine, which registers parameters in another order."""

    def request(self, run: TrainState, weights: Mapping[str, Any]) -> dict[str, Any]:
        space = BucketSpace(run.optimizer)
        objects = space.objects_request()
        layout, scaler = objects["per_bucket_numel_unpadded"].unique_key, objects[SCALER].unique_key

        world = run.parallel.world
        what = f"reading how {self.folder} cut its gradient buckets"
        # One rank reads for all: what is wanted is small, and the index that leads to it is not.
        wanted = sorted(set(world.all_gather_object(layout)))

        def read() -> tuple[dict[str, Any], bool]:
            if not world.is_first:
                return {}, False
            return load_plain_objects(self.folder, wanted), scaler in read_index(self.folder).objects

        stored, has_scaler = world.broadcast_object(agreed(world, what, read))
        if not has_scaler:
            # Whether there is one depends on the precision of the file, not of this run.
            del objects[SCALER]

        def tensors() -> list[Any]:
            with as_damage(self.folder):
                masters = self.masters.prepare(run)
                return space.tensors_request(stored[layout], masters, fused_norms=self.fused_norms)

        return {"optimizer_state": agreed(world, what, tensors), "optimizer_objects": objects}

    def apply(self, run: TrainState, common: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        self.masters.settle(run)
        objects = loaded["optimizer_objects"]
        names = [name for name in ("optimizer", SCALER) if name in objects]
        _restore_groups(run, self.folder, lambda: {name: objects[name] for name in names})
