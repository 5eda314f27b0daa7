"""The kept buffer: values of the call, pages that stay, bounds."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from megalite.dist_checkpointing.strategies.staging import HostBuffer, KeptStaging

TENSORS = [
    torch.arange(10.0).view(2, 5),
    torch.rand(3, 4).t(),
    torch.tensor(7, dtype=torch.int64),
    torch.rand(1000, 1000).bfloat16(),
    torch.empty(0, 3),
    torch.rand(7).to(torch.float8_e4m3fn),
    torch.tensor([True, False]),
]


@pytest.mark.parametrize("shared", [False, True])
def test_copies_keep_the_values_of_the_call(shared: bool) -> None:
    staging = KeptStaging(shared=shared)
    live = [tensor.clone(memory_format=torch.preserve_format) for tensor in TENSORS]
    staged = list(staging.stage(iter(live)))
    for tensor in live:
        tensor.zero_()
    for copy, tensor in zip(staged, TENSORS, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0 and torch.equal(copy.float(), tensor.float())


def test_the_buffer_stays_until_it_is_too_small() -> None:
    staging = KeptStaging()
    (first,) = staging.stage([torch.rand(1000)])
    place = staging.buffer.bytes.data_ptr()
    (second,) = staging.stage([torch.ones(2000)])
    assert staging.buffer.bytes.data_ptr() == place and first.data_ptr() == second.data_ptr()
    list(staging.stage([torch.ones(2 << 20)]))
    assert staging.buffer.size == 8 << 20


def test_its_pages_exist_before_anything_is_copied() -> None:
    buffer = HostBuffer(16 << 20)
    faults = _page_faults()
    buffer.bytes.fill_(1)
    assert _page_faults() - faults < 64


def _page_faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_another_process_can_map_what_is_shared() -> None:
    staging = KeptStaging(shared=True)
    list(staging.stage([torch.arange(4, dtype=torch.uint8)]))
    with mmap.mmap(staging.buffer.handle, 4) as other:
        assert other[:] == bytes(range(4))


def test_nothing_is_left_behind() -> None:
    handles = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        staging = KeptStaging(shared=True)
        list(staging.stage([torch.rand(100)]))
        staging.close()
        assert staging.buffer is None
    dropped = KeptStaging(shared=True)
    list(dropped.stage([torch.rand(100)]))
    del dropped
    assert len(os.listdir("/proc/self/fd")) == handles


def test_more_than_the_bound_is_one_clear_error() -> None:
    staging = KeptStaging(max_bytes=1000)
    list(staging.stage([torch.rand(100)]))
    with pytest.raises(MemoryError, match="takes 4032 bytes of host memory, the bound is 1000"):
        staging.stage([torch.rand(1000)])
    assert staging.buffer.size == 2 << 20
