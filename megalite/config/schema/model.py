"""Sections that say what is trained and how it is cut: model, parallel, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.checks import require, require_above, require_at_least, require_at_most_one, require_probability


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """Shape and initialisation of the GPT model."""

    num_layers: int
    """Transformer layers of the whole model, over all pipeline stages."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Attention heads of a layer, over all tensor-parallel ranks."""

    group_query_attention: bool = False
    """Let several query heads share one key and value head. Needs num_query_groups."""

    num_query_groups: int | None = None
    """Key and value heads of a layer; left out, one for each attention head."""

    ffn_hidden_size: int | None = None
    """Inner width of the MLP; left out, 4 x hidden_size, with swiglu two thirds of that, down to a multiple of 64."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How a token knows its place: a learned table, rotary embedding of queries and keys, or not at all."""

    rotary_base: float = 10000.0
    """Base of the rotary angles."""

    rotary_percent: float = 1.0
    """Part of a head's width that is rotated."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm in front of attention and MLP, and at the end."""

    swiglu: bool = False
    """Gate the MLP with SiLU, instead of GELU without a gate."""

    add_bias_linear: bool = True
    """Biases in the linear layers."""

    add_qkv_bias: bool = False
    """Bias of the query, key and value projection also where add_bias_linear is off."""

    qk_layernorm: bool = False
    """Norm over each query and key head."""

    untie_embeddings_and_output_weights: bool = False
    """Give the projection to the vocabulary a weight of its own."""

    kv_channels: int | None = None
    """Width of one attention head; left out, hidden_size / num_attention_heads."""

    seq_length: int
    """Tokens in one training sample."""

    max_position_embeddings: int | None = None
    """Rows of the learned position table, at least seq_length; left out, seq_length."""

    vocab_size: int | None = None
    """Token ids in use, that of end-of-document included, before padding; left out, the tokenizer says."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this number times the tensor-parallel size."""

    hidden_dropout: float = 0.1
    """Dropout probability after the embedding, the attention output and the MLP output."""

    attention_dropout: float = 0.1
    """Dropout probability of the attention weights."""

    init_method_std: float = 0.02
    """Standard deviation of the normal distribution that weights start from. Projections back into the residual stream
    use this number divided by sqrt(2 x num_layers)."""

    norm_epsilon: float = 1e-5
    """Added to the variance in every LayerNorm."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "seq_length",
        ):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        require_at_least("model.vocab_size", self.vocab_size, 1)
        require_at_least("model.make_vocab_size_divisible_by", self.make_vocab_size_divisible_by, 1)
        require_probability("model.hidden_dropout", self.hidden_dropout)
        require_probability("model.attention_dropout", self.attention_dropout)
        require_above("model.init_method_std", self.init_method_std, 0)
        require_above("model.norm_epsilon", self.norm_epsilon, 0)
        require_above("model.rotary_base", self.rotary_base, 0)
        self._check_query_groups()
        self._check_rotation()
        require(
            self.kv_channels is not None or self.hidden_size % self.num_attention_heads == 0,
            f"model.hidden_size is {self.hidden_size}, which model.num_attention_heads {self.num_attention_heads} does "
            "not divide; change one of them or set model.kv_channels",
            "model.hidden_size",
            "model.num_attention_heads",
        )
        require(
            self.max_position_embeddings is None or self.max_position_embeddings >= self.seq_length,
            f"model.max_position_embeddings is {self.max_position_embeddings}, less than model.seq_length "
            f"{self.seq_length}; a sample would run out of positions, so raise it or leave it out",
            "model.max_position_embeddings",
            "model.seq_length",
        )

    def _check_rotation(self) -> None:
        require(
            0 < self.rotary_percent <= 1,
            f"model.rotary_percent is {self.rotary_percent}, but must be above 0 and at most 1; give a part",
            "model.rotary_percent",
        )
        width = self.kv_channels or self.hidden_size // self.num_attention_heads
        rotated = int(width * self.rotary_percent)
        require(
            self.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0),
            f"model.rotary_percent is {self.rotary_percent}, which rotates {rotated} of the {width} components of a "
            "head (model.kv_channels), but components are rotated in pairs; make that an even number above 0",
            "model.rotary_percent",
            "model.kv_channels",
        )

    def _check_query_groups(self) -> None:
        groups, heads = self.num_query_groups, self.num_attention_heads
        require_at_least("model.num_query_groups", groups, 1)
        require(
            self.group_query_attention == (groups is not None),
            f"model.group_query_attention is {_on_off(self.group_query_attention)}, but model.num_query_groups "
            f"is {groups}; set both or neither",
            "model.group_query_attention",
            "model.num_query_groups",
        )
        require(
            groups is None or heads % groups == 0,
            f"model.num_attention_heads is {heads}, which model.num_query_groups {groups} does not divide; change one "
            "of them",
            "model.num_attention_heads",
            "model.num_query_groups",
        )


@dataclass(kw_only=True, frozen=True)
class ParallelConfig:
    """How model and gradients are spread over ranks. The data-parallel size is what remains of the world size."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer (TP)."""

    pipeline_model_parallel_size: int = 1
    """Stages that share the layers (PP)."""

    context_parallel_size: int = 1
    """Ranks that share a sequence (CP). This version has only 1."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer (EP). This version has only 1."""

    sequence_parallel: bool = False
    """Also cut the activations between tensor-parallel regions along the sequence. Without effect at TP 1."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one chunk: each stage has several, and micro-batches go around several times (VPP). Without effect at
    PP 1."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """The same, given as chunks per stage."""

    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage, where the embedding takes a part of its time. Without effect at PP 1."""

    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage, where the loss takes a part of its time. Without effect at PP 1."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage. Without effect at PP 1."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer of the last stage. Without effect at PP 1."""

    use_distributed_optimizer: bool = True
    """Cut fp32 master weights and moments over the data-parallel ranks instead of keeping them on each."""

    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket as soon as its backward pass is done. Does not change a bit of the result."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass runs. Needs use_distributed_optimizer and
    overlap_grad_reduce."""

    ddp_bucket_size: int | None = None
    """Parameters in one gradient bucket; left out, the larger of 40 million and 1 million x data-parallel size."""

    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a rank before the job is given up."""

    def __post_init__(self) -> None:
        sizes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")
        for name in (f"{size}_size" for size in sizes):
            require_at_least(f"parallel.{name}", getattr(self, name), 1)
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ):
            require_at_least(f"parallel.{name}", getattr(self, name), 1)
        self._check_stages()
        require_at_least("parallel.ddp_bucket_size", self.ddp_bucket_size, 1)
        require_above("parallel.distributed_timeout_minutes", self.distributed_timeout_minutes, 0)
        self._check_what_exists()
        require(
            not self.overlap_param_gather or (self.use_distributed_optimizer and self.overlap_grad_reduce),
            "parallel.overlap_param_gather is on, but needs parallel.use_distributed_optimizer (now "
            f"{_on_off(self.use_distributed_optimizer)}) and parallel.overlap_grad_reduce (now "
            f"{_on_off(self.overlap_grad_reduce)}); switch both on, or overlap_param_gather off",
            "parallel.overlap_param_gather",
            "parallel.use_distributed_optimizer",
            "parallel.overlap_grad_reduce",
        )

    def _check_what_exists(self) -> None:
        for name in ("context_parallel_size", "expert_model_parallel_size"):
            size = getattr(self, name)
            require(
                size == 1,
                f"parallel.{name} is {size}, but this version has only 1; leave it out and use TP, PP and DP instead",
                f"parallel.{name}",
            )

    def _check_stages(self) -> None:
        names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        are_set = tuple(getattr(self, name) is not None for name in names)
        require_at_most_one("parallel", names, are_set, "the number of chunks follows from either")
        fixed = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        for name in fixed:
            for other in counted:
                require(
                    getattr(self, name) is None or not getattr(self, other),
                    f"parallel.{name} is {getattr(self, name)} and parallel.{other} is on, but the first already says "
                    "how long that end is; keep one of them",
                    f"parallel.{name}",
                    f"parallel.{other}",
                )
            require(
                getattr(self, name) is None or self.num_layers_per_virtual_pipeline_stage is None,
                f"parallel.{name} is {getattr(self, name)} and parallel.num_layers_per_virtual_pipeline_stage is "
                f"{self.num_layers_per_virtual_pipeline_stage}, but with ends of another length chunks differ in "
                "length; say how many there are with num_virtual_stages_per_pipeline_rank",
                "parallel.num_layers_per_virtual_pipeline_stage",
                f"parallel.{name}",
            )


@dataclass(kw_only=True, frozen=True)
class PrecisionConfig:
    """Number formats. With everything left out, weights, activations and gradients are fp32."""

    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and moments."""

    fp16: bool = False
    """Weights and activations in float16, with fp32 master weights and moments, and a scaled loss."""

    loss_scale: float | None = None
    """Constant factor on the loss in fp16; left out, it is found while training."""

    initial_loss_scale: float = 2.0**32
    """First factor, where it is found while training."""

    min_loss_scale: float = 1.0
    """Least factor."""

    loss_scale_window: int = 1000
    """Updates without overflow after which the factor is doubled."""

    hysteresis: int = 2
    """Overflows after which the factor is halved; later ones halve at once, until it is doubled again."""

    accumulate_allreduce_grads_in_fp32: bool | None = None
    """Keep and reduce gradients in fp32 although weights have 16 bits. Left out, on; without them it has no effect."""

    grad_reduce_in_bf16: bool = False
    """Keep and reduce gradients in bfloat16. Needs bf16."""

    float64: bool = False
    """For tests: everything in double precision, so that sums in another order can be compared. Excludes bf16, fp16."""

    def __post_init__(self) -> None:
        formats = ("bf16", "fp16", "float64")
        are_set = tuple(getattr(self, name) for name in formats)
        require_at_most_one("precision", formats, are_set, "a run has one format")
        require(
            not (self.accumulate_allreduce_grads_in_fp32 and self.float64),
            "precision.accumulate_allreduce_grads_in_fp32 and precision.float64 are both on, but double-precision "
            "gradients would lose digits in fp32; leave the first out",
            "precision.accumulate_allreduce_grads_in_fp32",
            "precision.float64",
        )
        require(
            not self.grad_reduce_in_bf16 or (self.bf16 and not self.accumulate_allreduce_grads_in_fp32),
            f"precision.grad_reduce_in_bf16 is on, but needs precision.bf16 (now {_on_off(self.bf16)}) and "
            "accumulate_allreduce_grads_in_fp32 off or left out; change one of them",
            "precision.grad_reduce_in_bf16",
            "precision.bf16",
            "precision.accumulate_allreduce_grads_in_fp32",
        )
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        for name in ("loss_scale", "initial_loss_scale"):
            value = getattr(self, name)
            require(
                value is None or value <= 2.0**127,
                f"precision.{name} is {value}, more than fp32 can hold; give at most 2^127, which is 1.7e38",
                f"precision.{name}",
            )
        require_above("precision.loss_scale", self.loss_scale, 0)
        require_above("precision.min_loss_scale", self.min_loss_scale, 0)
        require_at_least("precision.loss_scale_window", self.loss_scale_window, 1)
        require_at_least("precision.hysteresis", self.hysteresis, 1)
        require(
            self.initial_loss_scale >= self.min_loss_scale,
            f"precision.initial_loss_scale is {self.initial_loss_scale}, less than precision.min_loss_scale "
            f"{self.min_loss_scale}; raise it",
            "precision.initial_loss_scale",
            "precision.min_loss_scale",
        )
        require(
            self.loss_scale is None or self.fp16,
            f"precision.loss_scale is {self.loss_scale}, but precision.fp16 is off, and other formats need no scale; "
            "leave it out",
            "precision.loss_scale",
            "precision.fp16",
        )


def _on_off(value: bool) -> str:
    return "on" if value else "off"
