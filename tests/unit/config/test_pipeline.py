"""Which layers are where: Megatron's examples, its offsets written out, and what cannot be spread."""

from __future__ import annotations

import itertools

import pytest

from megalite.config.pipeline import layer_layout, num_model_chunks
from megalite.utils.errors import ConfigError
from tests.unit.config.samples import config_with

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CHUNKS, PER_CHUNK = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"


def _config(layers, stages, **parallel):
    settings = {"pipeline_model_parallel_size": stages, **parallel}
    texts = [f"parallel.{key}={value}" for key, value in settings.items()]
    return config_with(f"model.num_layers={layers}", *texts)


def _layers(layers, stages, **parallel):
    """[stage][chunk] -> global numbers of its layers."""
    layout = layer_layout(_config(layers, stages, **parallel))
    return [[list(range(first, first + count)) for first, count in stage] for stage in layout]


def test_layers_are_spread_evenly():
    assert _layers(8, 4) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert _layers(5, 1) == [[[0, 1, 2, 3, 4]]]


def test_megatrons_example_of_virtual_stages():
    expected = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert _layers(8, 2, **{CHUNKS: 2}) == _layers(8, 2, **{PER_CHUNK: 2}) == expected


@pytest.mark.parametrize(("key", "value"), [(CHUNKS, 3), (PER_CHUNK, 2)])
def test_the_number_of_chunks_follows_from_either(key, value):
    assert num_model_chunks(_config(12, 2, **{key: value})) == 3
    assert num_model_chunks(_config(12, 1, **{key: value})) == 1, "no meaning without a pipeline"


def _megatrons_offset(layers, p, v, stage, chunk, embedding, loss):
    """Even spreading by the formulas: n = L with the ends that count, k = n / p, minus 1 behind the embedding."""
    n = layers + embedding + loss
    k = n // p
    offset = chunk * (n // v) + stage * (k // v)
    count = k // v
    is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (p - 1, v - 1)
    if embedding and not is_first:
        offset -= 1
    return offset, count - (embedding and is_first) - (loss and is_last)


@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4), (1, 2, 3))))
@pytest.mark.parametrize(("embedding", "loss"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_even_spreading_is_megatrons(p, v, embedding, loss):
    for k in (v, 2 * v):
        layers = p * k - embedding - loss
        if layers < p:
            continue
        settings = {CHUNKS: v, EMBEDDING: bool(embedding), LOSS: bool(loss)}
        layout = layer_layout(_config(layers, p, **settings))
        for stage, chunk in itertools.product(range(p), range(v)):
            assert layout[stage][chunk] == _megatrons_offset(layers, p, v, stage, chunk, embedding, loss)


def _megatrons_uneven_offset(layers, p, v, stage, chunk, first, last):
    """Uneven: F, Z and the middle M are each divided by v; t layers to one round through all stages."""
    middle = layers - (first or 0) - (last or 0)
    others = p - (first is not None) - (last is not None)
    per_stage = middle // others if others else 0
    f, z = (per_stage if end is None else end for end in (first, last))
    t = layers // v
    offset = chunk * t
    if stage > 0:
        has_first = first is not None
        offset += (first // v if has_first else 0) + (stage - has_first) * (per_stage // v)
    count = f if stage == 0 else z if stage == p - 1 else per_stage
    return offset, count // v


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize(
    ("layers", "p", "first", "last"),
    [(8, 2, 2, None), (8, 2, None, 2), (8, 2, 2, 6), (16, 4, 2, 6), (14, 3, 2, 4), (12, 3, None, 4), (10, 3, 2, None)],
)
def test_uneven_spreading_is_megatrons(layers, p, first, last, v):
    ends = {key: value for key, value in ((FIRST, first), (LAST, last)) if value is not None}
    layout = layer_layout(_config(layers, p, **{CHUNKS: v, **ends}))
    for stage, chunk in itertools.product(range(p), range(v)):
        assert layout[stage][chunk] == _megatrons_uneven_offset(layers, p, v, stage, chunk, first, last)


def test_uneven_stages_by_hand():
    assert _layers(7, 4, **{LAST: 1}) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6]]]
    assert _layers(7, 4, **{FIRST: 1, LAST: 2}) == [[[0]], [[1, 2]], [[3, 4]], [[5, 6]]]
    assert _layers(6, 4, **{EMBEDDING: "on", LOSS: "on"}) == [[[0]], [[1, 2]], [[3, 4]], [[5]]]


def test_an_end_that_counts_may_be_all_that_a_chunk_has():
    settings = {PER_CHUNK: 1, EMBEDDING: "on", LOSS: "on"}
    assert _layers(6, 2, **settings) == [[[], [1], [3], [5]], [[0], [2], [4], []]]


CASES = [
    (layers, p, {CHUNKS: v, **ends})
    for layers, p, v in itertools.product(range(2, 25), range(1, 5), (1, 2, 3))
    for ends in ({}, {EMBEDDING: "on"}, {EMBEDDING: "on", LOSS: "on"}, {FIRST: 2}, {FIRST: 2, LAST: 4}, {LAST: 6})
]


def test_every_layer_is_somewhere_exactly_once_in_order():
    spread = 0
    for layers, p, settings in CASES:
        try:
            layout = _layers(layers, p, **settings)
        except ConfigError:
            continue
        spread += 1
        chunks = [layout[stage][chunk] for chunk in range(len(layout[0])) for stage in range(p)]
        assert list(itertools.chain(*chunks)) == list(range(layers)), (layers, p, settings)
        # The ends have the embedding or the loss; whatever lies between needs a layer to have parameters at all.
        assert p == 1 or all(chunks[1:-1]), (layers, p, settings)
    assert spread > 200, "most of the cases must be spread and not refused"


@pytest.mark.parametrize(
    ("layers", "stages", "parallel", "expected"),
    [
        (9, 2, {}, "num_layers is 9, which parallel.pipeline_model_parallel_size 2 does not divide"),
        (8, 2, {LOSS: "on"}, r"num_layers is 8 \(9 with the ends that count as a layer\), which"),
        (8, 2, {CHUNKS: 3}, r"_rank is 3, which does not divide the layers of a stage \(4\)"),
        (8, 2, {PER_CHUNK: 3}, r"_stage is 3, which does not divide .* \(model.num_layers 8 over 2 stages\)"),
        (7, 2, {PER_CHUNK: 3, LOSS: "on"}, r"num_layers 7 \(8 with the ends that count as a layer\) over 2 stages"),
        (9, 2, {PER_CHUNK: 2}, "_stage is 2, which does not divide the layers of a stage"),
        (9, 3, {FIRST: 2}, "after .*first.* 2 and .*last.* None there are 7 layers for the other 2 stages"),
        (8, 3, {FIRST: 5, LAST: 4}, "there are -1 layers for the other 1 stages"),
        (8, 3, {FIRST: 4, LAST: 4}, "there are 0 layers for the other 1 stages"),
        (8, 2, {FIRST: 8}, "there are 0 layers for the other 1 stages"),
        (8, 2, {FIRST: 3, LAST: 4}, "there are 1 layers for the other 0 stages"),
        (8, 2, {FIRST: 3, CHUNKS: 2}, r"does not divide the layers of every stage \(3\)"),
        (4, 8, {}, "more stages than layers"),
    ],
)
def test_what_cannot_be_spread_is_refused(layers, stages, parallel, expected):
    with pytest.raises(ConfigError, match=expected):
        _config(layers, stages, **parallel)
