"""Parts of a run built by hand: places in a rank grid without ranks, groups of threads, tiny models and states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megalite.checkpoint.state import TrainState
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.model.gpt import GPTModel
from megalite.model.module import ModelChunk, Placement, TransformerConfig
from megalite.parallel.random import CudaRNGStatesTracker, Dropout
from megalite.parallel.state import ParallelState
from megalite.training.setup import build_state
from megalite.utils.dist import SINGLE, Group
from tests.helpers.runs import make_config

T = TypeVar("T")
CPU = torch.device("cpu")
MAX = dist.ReduceOp.MAX


def axis(size: int, rank: int) -> Group:
    """Return a group that has a size and a rank but cannot communicate."""
    return Group(tuple(range(size)), rank, None)


def place(tp: tuple[int, int] = (1, 0), pp: tuple[int, int] = (1, 0), dp: tuple[int, int] = (1, 0)) -> ParallelState:
    """Return a place in a grid, (size, rank) along each axis, for code that only looks where it is."""
    tp_group, pp_group, dp_group = axis(*tp), axis(*pp), axis(*dp)
    size = tp[0] * pp[0] * dp[0]
    is_end = pp[1] in (0, pp[0] - 1)
    ends = SINGLE if pp[0] == 1 else axis(2, int(pp_group.is_last))
    return ParallelState(
        world=axis(size, tp[1] + tp[0] * (dp[1] + dp[0] * pp[1])),
        tp=tp_group,
        pp=pp_group,
        dp=dp_group,
        dp_cp=dp_group,
        model_parallel=axis(tp[0] * pp[0], tp[1] + tp[0] * pp[1]),
        embedding=ends if is_end else None,
    )


def transformer_config(**changes: Any) -> TransformerConfig:
    """Return a GPT of three layers and width 16 in float64, with ``changes``."""
    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 6,
        "seq_length": 8,
        "max_position_embeddings": 10,
        "vocab_size": 11,
        "padded_vocab_size": 16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "dtype": torch.float64,
    }
    return TransformerConfig(**(values | changes))


LLAMA = {
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
"""What makes the GPT above a Llama."""


def model_chunk(num_layers: int, parallel: ParallelState, index: int = 0, count: int = 1) -> ModelChunk:
    """Return chunk ``index`` of the ``count`` of a stage, with the layers spread evenly."""
    pp = parallel.pp
    layers = num_layers // (pp.size * count)
    return ModelChunk(
        first_layer=(index * pp.size + pp.rank) * layers,
        num_layers=layers,
        is_first=pp.is_first and index == 0,
        is_last=pp.is_last and index == count - 1,
    )


def build_model(
    config: TransformerConfig,
    parallel: ParallelState | None = None,
    dropout: Any = None,
    chunk: ModelChunk | None = None,
) -> GPTModel:
    """Return a model with start values of seed 7; without ``chunk`` all that the stage has."""
    parallel = parallel or ParallelState()
    source = Dropout(CudaRNGStatesTracker()) if dropout is None else dropout
    chunk = chunk or model_chunk(config.num_layers, parallel)
    model = GPTModel(config, Placement(parallel, source, CPU), chunk)
    model.initialize(7)
    return model


SMALL = {
    "model": {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 8,
        "vocab_size": 20,
        "make_vocab_size_divisible_by": 8,
    },
    "data": {"tokenizer_type": "NullTokenizer"},
}


def small_config(*changes: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration of a run of one rank that takes milliseconds."""
    return make_config(SMALL, *changes)


def train_state(config: Config, parallel: ParallelState | None = None) -> TrainState:
    """Return the state of a run that has not started."""
    parallel = parallel or ParallelState()
    return build_state(config, derive(config, parallel.world.size), parallel, CPU, config.model.vocab_size)


def only_model(state: TrainState) -> GPTModel:
    """Return the model of a run that is not cut into chunks."""
    (chunk,) = state.chunks
    return chunk.module


def fill(state: TrainState, seed: int) -> None:
    """Give every value that a checkpoint keeps another one, as a function of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for _, word, tensor in state.optimizer.state_tensors():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + (word == "param"))
    for piece in state.optimizer.pieces:
        piece.values.copy_(piece.master)
    state.progress.iteration = seed
    state.progress.consumed_train_samples = 8 * seed


@dataclass
class _Meeting:
    size: int
    barrier: threading.Barrier = field(init=False)
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20.0)
        self.values = [None] * self.size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        result = list(self.values)
        self.barrier.wait()
        return result


@dataclass(frozen=True)
class ThreadGroup(Group):
    """A group whose ranks are threads of this process."""

    meeting: _Meeting | None = None

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        values = torch.stack(self.meeting.exchange(self.rank, tensor.clone()))
        return tensor.copy_(values.amax(dim=0) if op == MAX else values.sum(dim=0))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.meeting.exchange(self.rank, value)[source]


def on_threads(size: int, body: Callable[[Group], T]) -> list[T]:
    """Return what ``body(group)`` returns for each of ``size`` ranks that are threads; raises the first error."""
    meeting = _Meeting(size)
    groups: Sequence[Group] = [ThreadGroup(tuple(range(size)), rank, None, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(body, group) for group in groups]]
