"""Small runs for tests: configurations, steps, and the global state put together without the checkpoint code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megalite.config.loader import config_from_dict
from megalite.config.schema import Config
from megalite.parallel.layers import traits
from megalite.training.context import TrainContext
from megalite.training.exit import checkpoint_and_decide_exit
from megalite.training.loop import advance
from megalite.training.setup import training_run
from megalite.training.step import StepOutput, train_step
from tests.helpers.ranks import run_on_ranks

Topology = tuple[int, int, int]
"""(tp, pp, dp)"""

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "vocab_size": 257,
        "make_vocab_size_divisible_by": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "training": {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 10, "seed": 4321},
    "optimizer": {"lr": 2e-3, "lr_decay_style": "constant", "weight_decay": 0.1, "clip_grad": 0.5, "adam_beta2": 0.95},
    "data": {"mock_data": True, "split": "2,1,997"},
    "logging": {"log_interval": 1, "log_level": "WARNING"},
}

LLAMA: dict[str, dict[str, Any]] = {
    "model": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
        "ffn_hidden_size": 96,
    }
}
"""What makes the base configuration a Llama."""

VPP: dict[str, dict[str, Any]] = {"parallel": {"num_virtual_stages_per_pipeline_rank": 2}}


def make_config(*changes: dict[str, dict[str, Any]], topology: Topology = (1, 1, 1)) -> Config:
    """Return the base configuration with ``changes`` (section -> key -> value) on top."""
    values = {section: dict(settings) for section, settings in BASE.items()}
    parallel = {"tensor_model_parallel_size": topology[0], "pipeline_model_parallel_size": topology[1]}
    for change in ({"parallel": parallel}, *changes):
        for section, settings in change.items():
            values.setdefault(section, {}).update(settings)
    return config_from_dict(values, "test")


def run_steps(ctx: TrainContext, count: int) -> list[StepOutput]:
    """Do ``count`` iterations of the loop, without validation, and return what each gave."""
    outputs = []
    for _ in range(count):
        outputs.append(train_step(ctx))
        advance(ctx, outputs[-1])
        checkpoint_and_decide_exit(ctx)
    return outputs


Cut = tuple[int | None, int]
"""(axis cut over tp, matrices one upon the other along it)"""


@dataclass
class LocalState:
    """One rank's tensors with their place in the rank grid."""

    tp: tuple[int, int]
    weights: dict[str, tuple[Cut, torch.Tensor]] = field(default_factory=dict)
    """global name -> (how it is cut over tp, local tensor)"""
    pieces: list[tuple[str, str, int, torch.Tensor]] = field(default_factory=list)
    """(global name, word, start in the flattened local parameter, values)"""
    vocab_size: int = 0


def local_state(ctx: TrainContext) -> LocalState:
    """Return copies of this rank's parameters, masters and moments, read from the live objects."""
    ctx.state.finish_param_sync()
    tp = ctx.parallel.tp
    state = LocalState((tp.rank, tp.size), vocab_size=ctx.state.vocab_size)
    for chunk in ctx.state.chunks:
        for name, parameter in chunk.parameters():
            info = traits(parameter)
            if not info.is_copy:
                state.weights[name] = ((info.tp_axis, info.tp_blocks), parameter.detach().clone())
    for piece, word, flat in ctx.state.optimizer.state_tensors():
        if piece.name in state.weights:
            state.pieces.append((piece.name, word, piece.parameter_start, flat.clone()))
    return state


def global_state(ranks: Sequence[LocalState]) -> dict[str, torch.Tensor]:
    """Put the ranks' tensors together: weights under their names, optimizer state under ``<word>.<name>``.

    Ranks that hold the same part must hold the same bits, and every element of the optimizer's state must be there.
    """
    local: dict[tuple[str, int], torch.Tensor] = {}
    cuts: dict[str, tuple[Cut, int]] = {}
    for rank in ranks:
        for name, (cut, tensor) in rank.weights.items():
            cuts[name] = (cut, rank.tp[1])
            _set_equal(local, (name, rank.tp[0]), tensor)
    flats: dict[tuple[str, int], torch.Tensor] = {}
    for rank in ranks:
        for name, word, start, values in rank.pieces:
            shape = local[name, rank.tp[0]].shape
            key = (f"{word}.{name}", rank.tp[0])
            flat = flats.setdefault(key, torch.full((prod(shape),), float("nan"), dtype=values.dtype))
            known = flat[start : start + values.numel()]
            assert torch.isnan(known).all() or torch.equal(known, values), f"{key} differs between ranks"
            flat[start : start + values.numel()] = values
    for (name, tp_rank), flat in flats.items():
        assert not torch.isnan(flat).any(), f"{name} has elements that no rank owns"
        base = name.split(".", 1)[1]
        cuts[name] = cuts[base]
        local[name, tp_rank] = flat.view(local[base, tp_rank].shape)
    whole = {name: _join(local, name, *place) for name, place in cuts.items()}
    for name, tensor in whole.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            whole[name] = tensor[: ranks[0].vocab_size]
    return whole


def _set_equal(known: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    assert key not in known or torch.equal(known[key], value), f"{key} differs between ranks"
    known[key] = value


def _join(local: dict[tuple[str, int], torch.Tensor], name: str, cut: Cut, tp_size: int) -> torch.Tensor:
    axis, blocks = cut
    parts = [local[name, rank] for rank in range(tp_size)]
    if axis is None:
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs along tp"
        return parts[0]
    matrices = [part.chunk(blocks, dim=axis) for part in parts]
    return torch.cat([torch.cat([part[block] for part in matrices], dim=axis) for block in range(blocks)], dim=axis)


def read_with_dcp(step: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a step, as PyTorch's own reader reads them."""
    reader = dcp.FileSystemReader(step)
    entries = {
        key: entry for key, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "size")
    }
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def stored_tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return from the tensors of a step, which stack all layers, the one that ``global_state`` calls ``name``."""
    word, _, base = name.partition(".")
    prefix, base = (f"optimizer.state.{word}.", base) if word in ("param", "exp_avg", "exp_avg_sq") else ("", name)
    if not base.startswith("decoder.layers."):
        return tensors[prefix + base]
    _, _, layer, rest = base.split(".", 3)
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return tensors[f"{prefix}decoder.layers.{rest}"][int(layer)]


@dataclass
class RunResult:
    """What a run gave, equal on all ranks."""

    losses: list[float]
    grad_norms: list[float]
    state: dict[str, torch.Tensor]


def _body(
    config: Config, steps: int, prepare: Callable | None, arguments: tuple
) -> tuple[list[StepOutput], LocalState]:
    with training_run(config) as ctx:
        if prepare is not None:
            prepare(ctx, *arguments)
        return run_steps(ctx, steps), local_state(ctx)


def run(
    topology: Topology, config: Config, steps: int, prepare: Callable | None = None, arguments: tuple = ()
) -> RunResult:
    """Run ``steps`` iterations on the ranks of ``topology``; ``prepare(ctx, *arguments)`` may change the start."""
    ranks = run_on_ranks(prod(topology), _body, config, steps, prepare, arguments, timeout=180.0)
    outputs = [output for output, _ in ranks]
    for other in outputs[1:]:
        assert other == outputs[0], "ranks report different results"
    return RunResult(
        [o.loss for o in outputs[0]], [o.grad_norm for o in outputs[0]], global_state([state for _, state in ranks])
    )


def max_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two global states with the same names."""
    assert a.keys() == b.keys(), f"names differ: {sorted(a.keys() ^ b.keys())[:5]}"
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    assert a.keys() == b.keys(), f"names differ: {sorted(a.keys() ^ b.keys())[:5]}"
    return [name for name in a if not torch.equal(a[name], b[name])]


def topologies_up_to(size: int) -> Iterator[Topology]:
    """Yield every (tp, pp, dp) of powers of two whose product is at most ``size``."""
    powers = [2**k for k in range(size.bit_length()) if 2**k <= size]
    yield from ((t, p, d) for t in powers for p in powers for d in powers if t * p * d <= size)
