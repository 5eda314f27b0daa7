"""One chunk of a GPT: embedding at the start of the model, loss at its end, layers in between.

Legend: S sequence, B batch, H hidden, V padded vocabulary. Ids, labels and losses are [B, S]; activations [S, B, H].
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.model.embeddings import LanguageModelEmbedding
from megalite.model.module import (
    LayerAxis,
    MegaliteModule,
    ModelChunk,
    Placement,
    ShardedLeaf,
    TransformerConfig,
    initialize_parameter,
    sharded_parameter,
)
from megalite.model.transformer import TransformerBlock
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.layers import ParameterTraits, column_linear, mark, traits
from megalite.parallel.mappings import gather_from_tensor_region
from megalite.parallel.random import DropoutContext

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
VOCABULARY_TABLES = (WORD_EMBEDDING, OUTPUT_LAYER)
"""Tensors whose rows are token ids, padded to a number that depends on TP."""


class OutputLayer(nn.Module):
    """Projection to the vocabulary.

    Untied, it has a weight of its own. Tied, it holds the second copy of the embedding table at the end of a pipeline,
    and without a pipeline borrows the embedding's, which is why the weight comes as an argument there.
    """

    def __init__(self, config: TransformerConfig, placement: Placement, is_borrowed: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = placement.parallel.tp, config.sequence_parallel
        self.weight: nn.Parameter | None = None
        if not is_borrowed:
            shape = (config.padded_vocab_size // self.tp.size, config.hidden_size)
            self.weight = nn.Parameter(torch.empty(shape, dtype=config.dtype, device=placement.device))
            is_copy = not config.untie_embeddings_and_output_weights
            info = ParameterTraits(
                tp_axis=0, init_std=config.init_method_std, shared_embedding=is_copy, is_copy=is_copy
            )
            mark(self.weight, info)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [S, B, V / tp] of the whole sequence."""
        return column_linear(x, self.weight if weight is None else weight, None, self.tp, self.sequence_parallel)


class GPTModel(MegaliteModule):
    """One chunk of the model. Parameters are not initialised by the constructor; call ``initialize``."""

    def __init__(self, config: TransformerConfig, placement: Placement, chunk: ModelChunk) -> None:
        super().__init__()
        self.config = config
        self.chunk = chunk
        self.parallel = placement.parallel
        is_tied = not config.untie_embeddings_and_output_weights
        self.borrows = is_tied and chunk.is_first and chunk.is_last
        self.embedding = LanguageModelEmbedding(config, placement) if chunk.is_first else None
        self.decoder = TransformerBlock(config, placement, chunk)
        self.output_layer = OutputLayer(config, placement, self.borrows) if chunk.is_last else None
        if self.embedding is not None and is_tied and not self.borrows:
            weight = self.embedding.word_embeddings.weight
            mark(weight, ParameterTraits(tp_axis=0, init_std=config.init_method_std, shared_embedding=True))

    def initialize(self, seed: int) -> None:
        """Draw all start values as a function of (seed, parameter); equal for any TP and PP."""
        for name, parameter in self.named_parameters():
            info = traits(parameter)
            if info.init_std is not None:
                name = WORD_EMBEDDING if info.is_copy else name
                whole = parameter.shape[0] * (self.parallel.tp.size if info.tp_axis == 0 else 1)
                rows = self.config.vocab_size if name in VOCABULARY_TABLES else whole
                initialize_parameter(parameter, name, seed, self.parallel, rows)

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
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return activations for the next chunk; at the end of the model the loss of each label, [B, S], or without
        labels the logits of the vocabulary proper, [B, S, vocab_size].

        ``document_ids`` [B, S] keep a position from attending to other documents.
        """
        x = stage_input if self.embedding is None else self.embedding(tokens, position_ids, context)
        x = self.decoder(x, context, document_ids)
        if self.output_layer is None:
            return x
        logits_SBV = self.output_layer(x, self.embedding.word_embeddings.weight if self.borrows else None)
        tp = self.parallel.tp
        if labels is None:
            logits = gather_from_tensor_region(logits_SBV, tp)[..., : self.config.vocab_size]
            return logits.transpose(0, 1)
        labels_SB = labels.transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits_SBV, labels_SB, self.config.vocab_size, tp).transpose(0, 1)

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedLeaf]:
        state = super().sharded_state_dict(name, key, layer)
        if self.output_layer is not None and self.output_layer.weight is not None:
            weight = self.output_layer.weight
            # The copy of a tied embedding is stored, and found, under the name of the first stage's.
            on_disk = WORD_EMBEDDING if traits(weight).is_copy else OUTPUT_LAYER
            state[name + OUTPUT_LAYER] = sharded_parameter(
                weight, key + on_disk, self.parallel, allow_shape_mismatch=True
            )
        return state
