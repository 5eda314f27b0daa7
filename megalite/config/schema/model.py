"""Sections that say what is trained and how it is cut: model, parallel, precision."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.checks import require, require_above, require_at_least, require_probability


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """Shape and initialisation of the GPT model."""

    num_layers: int
    """Transformer layers of the whole model, over all pipeline stages."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Attention heads of a layer, over all tensor-parallel ranks."""

    ffn_hidden_size: int | None = None
    """Inner width of the MLP; left out, 4 x hidden_size."""

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

    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks on each stage (VPP). Without effect at PP 1; above, this version has only 1."""

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
        require_at_least("parallel.virtual_pipeline_model_parallel_size", self.virtual_pipeline_model_parallel_size, 1)
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
        chunks = self.virtual_pipeline_model_parallel_size
        require(
            self.pipeline_model_parallel_size == 1 or chunks in (None, 1),
            f"parallel.virtual_pipeline_model_parallel_size is {chunks} at pipeline_model_parallel_size "
            f"{self.pipeline_model_parallel_size}, which needs the interleaved schedule, which this version does not "
            "have; leave it out",
            "parallel.virtual_pipeline_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
        )


@dataclass(kw_only=True, frozen=True)
class PrecisionConfig:
    """Number formats. With everything left out, weights, activations and gradients are fp32."""

    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and moments."""

    accumulate_allreduce_grads_in_fp32: bool | None = None
    """Keep and reduce gradients in fp32 although weights are bfloat16. Left out, on; without bf16 it has no effect."""

    float64: bool = False
    """For tests: everything in double precision, so that sums in another order can be compared. Excludes bf16."""

    def __post_init__(self) -> None:
        require(
            not (self.bf16 and self.float64),
            "precision.bf16 and precision.float64 are both on, but a run has one format; switch one of them off",
            "precision.bf16",
            "precision.float64",
        )
        require(
            not (self.accumulate_allreduce_grads_in_fp32 and self.float64),
            "precision.accumulate_allreduce_grads_in_fp32 and precision.float64 are both on, but double-precision "
            "gradients would lose digits in fp32; leave the first out",
            "precision.accumulate_allreduce_grads_in_fp32",
            "precision.float64",
        )


def _on_off(value: bool) -> str:
    return "on" if value else "off"
