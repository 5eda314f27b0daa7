"""megatron-core 0.16.1 on gloo ranks of the CPU: its own model and optimizer, written and read by its own functions.

megatron-core expects CUDA, and Transformer Engine or Apex. ``megatron_core`` makes the few places that ask for them
content; what is compared in tests (modules, optimizer, sharded state dicts, planning, files) is all megatron-core's.
Ranks come from ``run_on_ranks``, so what is replaced here ends with the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megalite.config.derive import Derived, derive
from megalite.config.schema import Config
from tests.helpers.runs import Cut, LocalState, Topology

needs_megatron = [
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core, the interop extra"),
]


# Shims


class _CudaIsCpu(TorchFunctionMode):
    """Let every request for a CUDA device give a CPU tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        # The optimizer knows which parameters need an fp32 master by names such as "torch.cuda.BFloat16Tensor".
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_core(topology: Topology) -> Iterator[None]:
    """Set up megatron-core's process groups for ``topology``. Collective over all ranks."""
    warnings.filterwarnings("ignore", module="megatron")
    # Used as a device in factories, and for synchronisation of streams that are not there.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    # Random states per device: there is the CPU's.
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    # Its fused functions would be compiled, which takes longer than all that is tested with them.
    torch._dynamo.config.disable = True
    with _CudaIsCpu():
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        # Its writer takes the results of a save from a queue of a manager process, started by spawning this program.
        # A synchronous save fills the queue in the same process.
        results: queue.Queue = queue.Queue()
        filesystem_async._get_write_results_queue = lambda: results
        _carry_step(DistributedOptimizer)
        tp, pp, _ = topology
        parallel_state.initialize_model_parallel(tp, pp)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def _carry_step(optimizer_class: type) -> None:
    """Let the reader of ``fully_reshardable`` work with PyTorch's Adam.

    It looks up every entry of Adam's state in the file. PyTorch keeps ``step`` there too (Transformer Engine and Apex
    do not), but ``step`` is in the parameter groups of the file and has been restored from them by then.
    """
    if getattr(optimizer_class, "carries_step", False):
        return
    set_tensors = optimizer_class._set_main_param_and_optimizer_states
    get_tensors = optimizer_class._get_main_param_and_optimizer_states

    def set_with_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        set_tensors(self, model_param, {"step": get_tensors(self, model_param)["step"], **tensors})

    optimizer_class._set_main_param_and_optimizer_states = set_with_step
    optimizer_class.carries_step = True


# Model and optimizer


@dataclass
class MegatronRun:
    """megatron-core's objects for the model of a megalite configuration."""

    config: Config
    derived: Derived
    vocab_size: int
    model: Any
    """Its GPTModel in its DistributedDataParallel."""
    optimizer: Any
    """Its chain of one DistributedOptimizer."""

    @property
    def gpt(self) -> Any:
        return self.model.module

    @property
    def distributed_optimizer(self) -> Any:
        return self.optimizer.chained_optimizers[0]


def build(config: Config, *, bucket_size: int | None = None) -> MegatronRun:
    """Return megatron-core's model and DistributedOptimizer for ``config``, with the weights of ``_fill``.

    With ``bucket_size`` the gradient buffer has several buckets, as with --overlap-grad-reduce. Collective.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    derived = derive(config, dist.get_world_size())
    vocab_size = config.model.vocab_size
    transformer = _transformer_config(config, derived)
    gpt = _gpt_model(config, derived, transformer, vocab_size)
    if config.precision.bf16:
        # As its Float16Module does: the position table is built in fp32 whatever params_dtype says.
        gpt.bfloat16()
    for name, parameter, cut, tp_rank in _named_parameters(gpt, config):
        _fill(parameter.data, f"{name} {tp_rank if cut[0] is not None else 0}", 0.05)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
    )
    model = DistributedDataParallel(transformer, ddp, gpt)
    settings = config.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=0.0,
            bf16=config.precision.bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    run = MegatronRun(config, derived, vocab_size, model, optimizer)
    _start_adam(run)
    return run


def _transformer_config(config: Config, derived: Derived) -> Any:
    from megatron.core.transformer import TransformerConfig

    model = config.model
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=derived.num_query_groups,
        ffn_hidden_size=derived.ffn_hidden_size,
        kv_channels=derived.kv_channels,
        add_bias_linear=model.add_bias_linear,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        bf16=config.precision.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def _gpt_model(config: Config, derived: Derived, transformer: Any, vocab_size: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = config.model
    return GPTModel(
        transformer,
        get_gpt_layer_local_spec(normalization=model.normalization),
        vocab_size=derived.padded_vocab_size(vocab_size),
        max_sequence_length=derived.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
    )


def _named_parameters(gpt: Any, config: Config) -> Iterator[tuple[str, torch.nn.Parameter, Cut, int]]:
    """Yield (name with the layer's global number, parameter, how it is cut over tp, rank in tp).

    The last stage's copy of a tied embedding comes under the embedding's name.
    """
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    first = gpt.decoder.layers[0].layer_number - 1
    for name, parameter in gpt.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"decoder.layers.{first + int(layer)}.{rest}"
        if name == "output_layer.weight" and not config.model.untie_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        is_gated = config.model.swiglu and ".linear_fc1." in name
        yield name, parameter, (axis, 2 if is_gated else 1), tp_rank


def _fill(tensor: torch.Tensor, name: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def _start_adam(run: MegatronRun) -> None:
    """Give PyTorch's Adam the state of step 0: the request for a load reads its step, which must be there."""
    adam = run.distributed_optimizer.optimizer
    for group in adam.param_groups:
        for parameter in group["params"]:
            moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            adam.state[parameter] = {"step": torch.zeros(()), **moments}
    # Masters are copied from the weights when the optimizer is built.
    run.optimizer.reload_model_params()


def update(run: MegatronRun, steps: int) -> None:
    """Let megatron-core's optimizer do ``steps`` updates with gradients that follow from names. Collective."""
    for step in range(steps):
        for name, parameter, cut, tp_rank in _named_parameters(run.gpt, run.config):
            _fill(parameter.main_grad, f"gradient {step} {name} {tp_rank if cut[0] is not None else 0}", 0.01)
        is_successful, _, _ = run.optimizer.step()
        assert is_successful


def train_step(run: MegatronRun, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Let megatron-core do a step on one micro-batch, on one rank, and return its loss of each label."""
    from megatron.core import tensor_parallel

    # Its attention asks for the named random states, though nothing is dropped.
    tensor_parallel.model_parallel_cuda_manual_seed(run.config.training.seed)
    length = tokens.shape[1]
    is_hidden = torch.ones(1, 1, length, length).triu(1).bool()
    run.model.zero_grad_buffer()
    losses = run.model(tokens, positions, is_hidden, labels=labels)
    losses.mean().backward()
    run.model.finish_grad_sync()
    is_successful, _, _ = run.optimizer.step()
    assert is_successful
    return losses.detach()


def local_state(run: MegatronRun) -> LocalState:
    """Return copies of this rank's parameters, masters and moments, read from the live objects."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    state = LocalState((rank, parallel_state.get_tensor_model_parallel_world_size()), vocab_size=run.vocab_size)
    optimizer = run.distributed_optimizer
    for name, parameter, cut, _ in _named_parameters(run.gpt, run.config):
        state.weights[name] = (cut, parameter.detach().clone())
        if parameter not in optimizer.model_param_group_index_map:
            continue
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for word in ("param", "exp_avg", "exp_avg_sq"):
            state.pieces.append((name, word, start, tensors[word].detach().clone()))
    return state


def scheduler_from(run: MegatronRun, state: dict[str, Any]) -> Any:
    """Return megatron-core's scheduler of the optimizer with the settings and the position of ``state``."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # It sets the groups for the restored position before it takes the weight decay over, so that one has to be right.
    weight_decay = run.config.optimizer.weight_decay

    scheduler = OptimizerParamScheduler(
        run.optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.5,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="linear",
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )
    scheduler.load_state_dict(state)
    return scheduler
