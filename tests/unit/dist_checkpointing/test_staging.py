"""The kept buffer: values of the call, pages that stay, bounds."""

from __future__ import annotations

import errno
import gc
import mmap
import resource
from pathlib import Path

import pytest
import torch

from megalite.dist_checkpointing.strategies import staging
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


def test_copies_keep_the_values_of_the_call() -> None:
    kept = KeptStaging()
    live = [tensor.clone(memory_format=torch.preserve_format) for tensor in TENSORS]
    staged = list(kept.stage(iter(live)))
    for tensor in live:
        tensor.zero_()
    for copy, tensor in zip(staged, TENSORS, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0 and torch.equal(copy.float(), tensor.float())


def test_the_buffer_stays_until_it_is_too_small() -> None:
    kept = KeptStaging()
    (first,) = kept.stage([torch.rand(1000)])
    place = kept.buffer.bytes.data_ptr()
    (second,) = kept.stage([torch.ones(2000)])
    assert kept.buffer.bytes.data_ptr() == place and first.data_ptr() == second.data_ptr()
    list(kept.stage([torch.ones(2 << 20)]))
    assert kept.buffer.size == 8 << 20


@pytest.mark.parametrize("knows_the_advice", [True, False])
def test_its_pages_exist_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch, knows_the_advice: bool) -> None:
    if not knows_the_advice:
        monkeypatch.setattr(staging, "_POPULATE_WRITE", 10_000)
    buffer = HostBuffer(16 << 20)
    faults = _page_faults()
    buffer.bytes.fill_(1)
    assert _page_faults() - faults < 64


def test_without_populating_only_what_is_used_is_made() -> None:
    before = _resident()
    buffer = HostBuffer(256 << 20, populate=False)
    buffer.bytes[100 << 20] = 1
    assert _resident() - before < 16 << 20


def test_its_pages_are_huge_where_the_system_permits() -> None:
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("the system makes no huge pages")

    def in_huge_pages() -> int:
        return int(Path("/proc/self/smaps_rollup").read_text().partition("AnonHugePages:")[2].split()[0]) << 10

    before = in_huge_pages()
    buffer = HostBuffer(64 << 20)
    # Not all of it: the system gives what it has in one piece.
    assert buffer.size == 64 << 20 and in_huge_pages() - before >= 2 << 20


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_nothing_is_left_behind() -> None:
    def once() -> None:
        kept = KeptStaging()
        list(kept.stage([torch.rand(4 << 20)]))
        kept.close()
        assert kept.buffer is None

    once()
    gc.collect()
    before = _mapped()
    for _ in range(20):
        once()
    gc.collect()
    # Address space and not memory: what the tests before have freed goes back to the system at any time.
    assert _mapped() - before < 160 << 20, "each of the 20 buffers takes 16 MiB"


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Full(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", _Full)
    with pytest.raises(MemoryError, match="no memory for 2097152 bytes"):
        list(KeptStaging().stage([torch.rand(1000)]))
