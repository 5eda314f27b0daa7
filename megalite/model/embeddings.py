"""Token and position embeddings of the first stage.

Legend: B batch, S sequence, H hidden; ids [B, S] in, activations [S, B, H] out, or [S / tp, B, H] with sequence
parallelism.
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.model.module import (
    LayerAxis,
    MegaliteModule,
    Placement,
    ShardedLeaf,
    TransformerConfig,
    factory_arguments,
    sharded_parameter,
)
from megalite.parallel.layers import ParameterTraits, VocabParallelEmbedding, mark
from megalite.parallel.mappings import scatter_to_sequence_region
from megalite.parallel.random import DropoutContext


class LanguageModelEmbedding(MegaliteModule):
    """Embedding of the token, plus that of its position where positions are learned, with dropout."""

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.config = config
        self.dropout = placement.dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            init_std=config.init_method_std,
            **factory_arguments(config, placement),
        )
        self.position_embeddings: nn.Embedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(
                config.max_position_embeddings, config.hidden_size, dtype=config.dtype, device=placement.device
            )
            mark(self.position_embeddings.weight, ParameterTraits(init_std=config.init_method_std))

    def forward(self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, context: DropoutContext) -> torch.Tensor:
        x_SBH = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(position_ids_BS.transpose(0, 1))
        offset = 0
        if self.config.sequence_parallel:
            # After the positions are added: they are whole on every rank, and so is their gradient.
            x_SBH = scatter_to_sequence_region(x_SBH, self.parallel.tp)
            offset = self.parallel.tp.rank * x_SBH.shape[0]
        site = context.in_layer(0).at("embedding", position_offset=offset)
        return self.dropout.hidden(x_SBH, self._rate, site, is_local=self.config.sequence_parallel)

    @property
    def _rate(self) -> float:
        return self.config.hidden_dropout if self.training else 0.0

    def sharded_state_dict(
        self, name: str = "", key: str = "", layer: LayerAxis | None = None
    ) -> dict[str, ShardedLeaf]:
        state = super().sharded_state_dict(name, key, layer)
        word = "word_embeddings.weight"
        # The number of padding rows depends on TP, so the table on disk may be longer or shorter than ours.
        state[name + word] = sharded_parameter(
            self.word_embeddings.weight, key + word, self.parallel, allow_shape_mismatch=True
        )
        return state
