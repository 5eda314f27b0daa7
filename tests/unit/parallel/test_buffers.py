from __future__ import annotations

import random
from math import lcm

import pytest
import torch
from torch import nn

from megalite.config.derive import default_bucket_size
from megalite.parallel.buffers import (
    BufferLayout,
    ParamAndGradBuffer,
    pieces_of_shard,
    plan_buffer,
)
from megalite.parallel.ddp import DistributedDataParallel
from megalite.parallel.layers import traits
from megalite.utils.dist import SINGLE
from tests.unit.samples import axis, build_model, place, transformer_config

ONE_BUCKET = 10**9

# The toy GPT whose buffers Megatron dumped: 4 layers, width 16, MLP 32, 64 tokens, 32 positions.
TOY = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "kv_channels": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 64,
    "padded_vocab_size": 64,
}


def _toy_layout(
    bucket_size: int, dp_size: int, tp: tuple[int, int] = (1, 0), pp: tuple[int, int] = (1, 0)
) -> BufferLayout:
    model = build_model(transformer_config(**TOY), place(tp=tp, pp=pp))
    parameters = list(model.parameters())
    shared = [traits(p).shared_embedding for p in parameters]
    return plan_buffer([p.numel() for p in parameters], shared, bucket_size, dp_size)


def _sizes(layout: BufferLayout) -> tuple[list[int], list[int]]:
    return [b.numel_unpadded for b in layout.buckets], [b.end - b.start for b in layout.buckets]


@pytest.mark.parametrize(
    ("bucket_size", "dp", "tp", "pp", "unpadded", "padded"),
    [
        (ONE_BUCKET, 1, (1, 0), (1, 0), [11904], [11904]),
        (
            1500,
            2,
            (1, 0),
            (1, 0),
            [2240, 1600, 1984, 1536, 1600, 1920, 1024],
            [2304, 1664, 2048, 1536, 1664, 1920, 1024],
        ),
        (ONE_BUCKET, 1, (2, 0), (2, 0), [3584, 512], [3584, 512]),
        (ONE_BUCKET, 1, (2, 1), (2, 1), [512, 3152], [512, 3200]),
    ],
    ids=["one bucket", "buckets of 1500", "first stage", "last stage"],
)
def test_buckets_are_those_megatron_makes(
    bucket_size: int, dp: int, tp: tuple[int, int], pp: tuple[int, int], unpadded: list[int], padded: list[int]
) -> None:
    assert _sizes(_toy_layout(bucket_size, dp, tp, pp)) == (unpadded, padded)


def test_parameters_lie_in_reverse_order_at_multiples_of_64() -> None:
    layout = plan_buffer([10, 64, 65, 1], [False] * 4, ONE_BUCKET, 1)
    assert layout.ranges == ((256, 266), (192, 256), (64, 129), (0, 1))
    assert layout.buckets[0].parameters == (3, 2, 1, 0)
    assert (layout.buckets[0].numel_unpadded, layout.numel) == (266, 384)


def test_a_bucket_is_closed_once_it_is_full() -> None:
    layout = plan_buffer([50, 50, 50, 50], [False] * 4, 100, 1)
    # The second parameter ends at 64 + 50, beyond 100.
    assert [b.parameters for b in layout.buckets] == [(3, 2), (1, 0)]
    assert [(b.start, b.end, b.numel_unpadded) for b in layout.buckets] == [(0, 128, 114), (128, 256, 114)]


def test_nothing_and_defaults() -> None:
    assert plan_buffer([], [], 100, 2).numel == 0
    assert default_bucket_size(1) == 40_000_000 and default_bucket_size(64) == 64_000_000


@pytest.mark.parametrize("dp", range(1, 9))
def test_shards_are_cut_at_whole_rows(dp: int) -> None:
    numels = [random.Random(dp).randrange(1, 5000) for _ in range(30)]
    for bucket_size in (1, 700, 4000, ONE_BUCKET):
        layout = plan_buffer(numels, [i == 3 for i in range(30)], bucket_size, dp)
        position = 0
        for bucket in layout.buckets:
            assert bucket.start == position
            assert (bucket.end - bucket.start) % lcm(64 * dp, 128) == 0
            shards = [bucket.shard(rank, dp) for rank in range(dp)]
            assert all(start % 64 == 0 and end % 64 == 0 for start, end in shards)
            assert [shards[0][0], *(end for _, end in shards)] == [*(start for start, _ in shards), bucket.end]
            position = bucket.end
        assert position == layout.numel


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_size", [1, 1500, ONE_BUCKET])
def test_pieces_cover_each_parameter_exactly_once(dp: int, bucket_size: int) -> None:
    numels = [random.Random(bucket_size).randrange(1, 900) for _ in range(25)]
    layout = plan_buffer(numels, [i in (0, 24) for i in range(25)], bucket_size, dp)
    count = [torch.zeros(n, dtype=torch.int) for n in numels]
    for bucket in layout.buckets:
        for rank in range(dp):
            start, end = bucket.shard(rank, dp)
            for piece in pieces_of_shard(layout, bucket, start, end):
                assert start <= piece.buffer_start < piece.buffer_end <= end
                assert piece.buffer_start - layout.ranges[piece.parameter][0] == piece.parameter_start
                size = piece.buffer_end - piece.buffer_start
                count[piece.parameter][piece.parameter_start : piece.parameter_start + size] += 1
    assert all(bool((c == 1).all()) for c in count)


def test_a_tied_embedding_has_a_bucket_of_its_own_that_both_stages_cut_alike() -> None:
    numel, dp = 20 * 16, 4
    first = plan_buffer([numel, 77, 500], [True, False, False], ONE_BUCKET, dp)
    last = plan_buffer([500, 131, numel], [False, False, True], ONE_BUCKET, dp)
    cuts = []
    for layout, index in ((first, 0), (last, 2)):
        (own,) = (bucket for bucket in layout.buckets if index in bucket.parameters)
        assert own.parameters == (index,)
        assert layout.ranges[index][0] == own.start
        shards = [own.shard(rank, dp) for rank in range(dp)]
        cuts.append(
            [
                [(p.parameter_start, p.buffer_end - p.buffer_start) for p in pieces_of_shard(layout, own, *s)]
                for s in shards
            ]
        )
    assert cuts[0] == cuts[1]


def test_the_layout_does_not_depend_on_overlap_nor_on_the_optimizer() -> None:
    layouts = []
    for options in (
        {},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"gather_gradients": True},
    ):
        ddp = DistributedDataParallel(build_model(transformer_config()), place(dp=(4, 1)), bucket_size=900, **options)
        layouts.append([buffer.layout for buffer in ddp.buffers])
    assert len(layouts[0][0].buckets) > 3
    assert all(other == layouts[0] for other in layouts)


def test_the_layout_does_not_depend_on_the_stage() -> None:
    layers = transformer_config(**TOY | {"num_layers": 6})
    middle = build_model(layers, place(pp=(3, 1)))
    numels = [p.numel() for p in middle.parameters()]
    ddp = DistributedDataParallel(middle, place(pp=(3, 1)), bucket_size=1500)
    assert len(ddp.buffers[0].buckets) > 1, "Megatron would use one bucket here"
    assert ddp.buffers[0].layout == plan_buffer(numels, [False] * len(numels), 1500, 1)


def test_parameters_become_views_with_their_values_kept() -> None:
    linear = nn.Linear(5, 7, dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in linear.named_parameters()}
    buffer = ParamAndGradBuffer(list(linear.named_parameters()), torch.float32, ONE_BUCKET, SINGLE)
    assert buffer.values.dtype == torch.bfloat16 and buffer.gradients.dtype == torch.float32
    for name, parameter in linear.named_parameters():
        assert torch.equal(parameter, before[name])
        start, end = buffer.layout.ranges[buffer.names.index(name)]
        buffer.values[start:end] = 3.0
        assert bool((parameter == 3.0).all())
        parameter.main_grad.fill_(2.0)
        assert bool((buffer.gradients[start:end] == 2.0).all())
    used = torch.zeros(buffer.layout.numel, dtype=torch.bool)
    for start, end in buffer.layout.ranges:
        used[start:end] = True
    assert not buffer.values[~used].any() and not buffer.gradients[~used].any()


def test_own_shard_is_that_of_the_rank() -> None:
    linear = nn.Linear(40, 40)
    buffer = ParamAndGradBuffer(list(linear.named_parameters()), torch.float32, ONE_BUCKET, axis(4, 2))
    (bucket,) = buffer.buckets
    assert buffer.own_shard(bucket) == bucket.shard(2, 4)
