"""Which layers are where: the layers of every chunk of every pipeline stage. Pure arithmetic."""

from __future__ import annotations

from megalite.config.checks import require
from megalite.config.schema import Config

StageLayout = tuple[tuple[tuple[int, int], ...], ...]
"""[stage][chunk] -> (first global layer from 0, number of layers)."""

_PP = "parallel.pipeline_model_parallel_size"
_FIRST = "parallel.decoder_first_pipeline_num_layers"
_LAST = "parallel.decoder_last_pipeline_num_layers"


def num_model_chunks(config: Config) -> int:
    """Return the chunks of layers per stage; 1 without a pipeline, where more have no meaning."""
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1:
        return 1
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return parallel.num_virtual_stages_per_pipeline_rank or 1
    layers, extra = _counted_layers(config)
    key = "parallel.num_layers_per_virtual_pipeline_stage"
    require(
        layers % stages == 0 and layers // stages % per_chunk == 0,
        f"{key} is {per_chunk}, which does not divide the layers of a stage (model.num_layers "
        f"{config.model.num_layers}{extra} over {stages} stages); change it, or give "
        "num_virtual_stages_per_pipeline_rank",
        key,
        "model.num_layers",
        _PP,
    )
    return layers // stages // per_chunk


def layer_layout(config: Config) -> StageLayout:
    """Return the layers of each chunk of each stage.

    Chunk c of all stages comes before chunk c + 1. Layers are spread evenly; ``account_for_*`` count the embedding or
    the loss as a layer of the first or last chunk; ``decoder_first/last_pipeline_num_layers`` fix the ends and spread
    the rest. Megatron's rules. Without a pipeline none of them has a meaning.
    """
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return (((0, config.model.num_layers),),)
    chunks = num_model_chunks(config)
    counts = _counts(config, stages, chunks)
    layout: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    first = 0
    for chunk in range(chunks):
        for stage in range(stages):
            layout[stage].append((first, counts[stage][chunk]))
            first += counts[stage][chunk]
    return tuple(tuple(stage) for stage in layout)


def _counts(config: Config, stages: int, chunks: int) -> list[list[int]]:
    parallel, layers = config.parallel, config.model.num_layers
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        return _uneven(layers, stages, chunks, first, last)
    total, extra = _counted_layers(config)
    require(
        total % stages == 0,
        f"model.num_layers is {layers}{extra}, which {_PP} {stages} does not divide; change one of them, or fix the "
        "ends with decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers",
        "model.num_layers",
        _PP,
    )
    per_stage = total // stages
    _require_chunks(per_stage, chunks, "the layers of a stage")
    counts = [[per_stage // chunks] * chunks for _ in range(stages)]
    counts[0][0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1][-1] -= parallel.account_for_loss_in_pipeline_split
    return counts


def _counted_layers(config: Config) -> tuple[int, str]:
    """Return what is spread evenly: the layers, with the ends that count as one; and words about the ends."""
    parallel = config.parallel
    ends = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    total = config.model.num_layers + ends
    return total, f" ({total} with the ends that count as a layer)" if ends else ""


def _uneven(layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> list[list[int]]:
    middle_stages = stages - (first is not None) - (last is not None)
    middle = layers - (first or 0) - (last or 0)
    # A stage between the ends has nothing but its layers, so it needs one.
    fits = middle > 0 and middle % middle_stages == 0 if middle_stages else middle == 0
    require(
        fits,
        f"model.num_layers is {layers}; after {_FIRST} {first} and {_LAST} {last} there are {middle} layers for the "
        f"other {middle_stages} stages, which cannot be spread evenly; change the ends",
        "model.num_layers",
        _FIRST,
        _LAST,
        _PP,
    )
    per_stage = [middle // middle_stages if middle_stages else 0] * stages
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    for count in per_stage:
        _require_chunks(count, chunks, "the layers of every stage")
    return [[count // chunks] * chunks for count in per_stage]


def _require_chunks(per_stage: int, chunks: int, what: str) -> None:
    key = "parallel.num_virtual_stages_per_pipeline_rank"
    require(
        per_stage % chunks == 0,
        f"{key} is {chunks}, which does not divide {what} ({per_stage}); change one of them",
        key,
        "model.num_layers",
        _PP,
    )
