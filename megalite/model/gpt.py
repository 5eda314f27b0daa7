"""One pipeline stage of a GPT: embedding on the first stage, loss on the last, layers in between.

Legend: S sequence, B batch, H hidden, V padded vocabulary. Ids, labels and losses are [B, S]; activations [S, B, H].
"""

from __future__ import annotations

import re

import torch
from torch import nn

from megalite.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megalite.model.embeddings import LanguageModelEmbedding
from megalite.model.module import (
    LayerAxis,
    MegaliteModule,
    Placement,
    TransformerConfig,
    factory_arguments,
    initialize_parameter,
    sharded_parameter,
)
from megalite.model.transformer import TransformerBlock
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.layers import ParameterTraits, VocabParallelEmbedding, column_linear, mark, traits
from megalite.parallel.mappings import gather_from_tensor_region
from megalite.parallel.random import DropoutContext
from megalite.parallel.state import ParallelState

WORD_EMBEDDING = "embedding.word_embeddings.weight"


def stage_layers(num_layers: int, pp_size: int, pp_rank: int) -> tuple[int, int]:
    """Return (first global layer from 0, number of layers) of a stage, with layers spread evenly."""
    per_stage = num_layers // pp_size
    return pp_rank * per_stage, per_stage


class TiedOutputLayer(nn.Module):
    """Projection to the vocabulary with the transposed embedding table.

    On a pipeline's last stage it holds the second copy of the table; without a pipeline it borrows the embedding's,
    which is why the weight comes as an argument there.
    """

    def __init__(self, config: TransformerConfig, placement: Placement, has_copy: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = placement.parallel.tp, config.sequence_parallel
        self.weight: nn.Parameter | None = None
        if has_copy:
            rows = VocabParallelEmbedding(
                config.padded_vocab_size,
                config.hidden_size,
                init_std=config.init_method_std,
                **factory_arguments(config, placement),
            )
            self.weight = rows.weight
            mark(
                self.weight,
                ParameterTraits(tp_axis=0, init_std=config.init_method_std, shared_embedding=True, is_copy=True),
            )

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [S, B, V / tp] of the whole sequence."""
        return column_linear(x, self.weight if weight is None else weight, None, self.tp, self.sequence_parallel)


class GPTModel(MegaliteModule):
    """The GPT-2 face: learned positions, LayerNorm, GELU, biases, tied embeddings.

    Parameters are not initialised by the constructor; call ``initialize``.
    """

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.parallel = placement.parallel
        pp = placement.parallel.pp
        self.embedding = LanguageModelEmbedding(config, placement) if pp.is_first else None
        self.decoder = TransformerBlock(config, placement, *stage_layers(config.num_layers, pp.size, pp.rank))
        self.output_layer = TiedOutputLayer(config, placement, has_copy=pp.size > 1) if pp.is_last else None
        if self.embedding is not None and pp.size > 1:
            weight = self.embedding.word_embeddings.weight
            mark(weight, ParameterTraits(tp_axis=0, init_std=config.init_method_std, shared_embedding=True))

    def initialize(self, seed: int) -> None:
        """Draw all start values as a function of (seed, parameter); equal for any TP and PP."""
        for name, parameter in self.named_parameters():
            if traits(parameter).init_std is not None:
                name = self.global_name(name)
                rows = self.config.vocab_size if name == WORD_EMBEDDING else _global_rows(parameter, self.parallel)
                initialize_parameter(parameter, name, seed, self.parallel, rows)

    def global_name(self, name: str) -> str:
        """Return the name of a parameter in the whole model: layers counted over all stages, copies by the original."""
        if name == "output_layer.weight":
            return WORD_EMBEDDING
        first = self.decoder.first_layer
        return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{first + int(m[1])}.", name)

    def activation_shape(self, micro_batch_size: int) -> tuple[int, int, int]:
        """Return the shape of what is sent to the next stage."""
        cut = self.parallel.tp.size if self.config.sequence_parallel else 1
        return (self.config.seq_length // cut, micro_batch_size, self.config.hidden_size)

    def forward(
        self,
        context: DropoutContext,
        *,
        tokens: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        stage_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return activations for the next stage; on the last stage the loss of each label, [B, S], or without labels
        the logits of the vocabulary proper, [B, S, vocab_size].
        """
        x = stage_input if self.embedding is None else self.embedding(tokens, position_ids, context)
        x = self.decoder(x, context)
        if self.output_layer is None:
            return x
        tied = self.embedding.word_embeddings.weight if self.embedding is not None else None
        logits_SBV = self.output_layer(x, tied)
        tp = self.parallel.tp
        if labels is None:
            logits = gather_from_tensor_region(logits_SBV, tp)[..., : self.config.vocab_size]
            return logits.transpose(0, 1)
        labels_SB = labels.transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits_SBV, labels_SB, self.config.vocab_size, tp).transpose(0, 1)

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedTensor | ShardedObject]:
        state = super().sharded_state_dict(name, key, layer)
        if self.output_layer is not None and self.output_layer.weight is not None:
            state[name + "output_layer.weight"] = sharded_parameter(
                self.output_layer.weight, key + WORD_EMBEDDING, self.parallel, allow_shape_mismatch=True
            )
        return state


def _global_rows(parameter: nn.Parameter, parallel: ParallelState) -> int:
    return parameter.shape[0] * (parallel.tp.size if traits(parameter).tp_axis == 0 else 1)
