"""Memory on the host that a save copies to, kept from save to save.

A copy into pages that exist runs at the speed of memory; into fresh 4 KiB pages it is up to 20 times slower, since the
kernel makes and clears each one on the way. So there is one buffer: asked for in huge pages, touched once when it is
made or grows, and reused by every later save. For a worker process it lies in shared memory, where the worker finds the
bytes without pickling them. On CUDA it is pinned, and the copies of a save run side by side.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator

import torch

_ALIGNMENT = 64
"""What torch gives its own tensors: kernels then take any view of a type."""
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it."""


class HostBuffer:
    """Pages on the host that exist; ``handle`` is a file descriptor that another process can map, if shared."""

    def __init__(self, num_bytes: int, *, shared: bool = False) -> None:
        # Rounded up, so that a state that grows a little fits the next time.
        self.size = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
        self.handle: int | None = None
        if shared:
            self.handle = os.memfd_create("megalite_staging", os.MFD_CLOEXEC)
            os.ftruncate(self.handle, self.size)
            self._finalizer = weakref.finalize(self, os.close, self.handle)
        self._pages = mmap.mmap(-1 if self.handle is None else self.handle, self.size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(self._pages, mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        if not _advise(self._pages, _POPULATE_WRITE):
            self.bytes[::_PAGE] = 0
        self.is_pinned = False

    def pin(self) -> None:
        """Register the pages with CUDA, so that copies from the device run beside computation."""
        if not self.is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0))
            self.is_pinned = True

    def close(self) -> None:
        """Give the pages back; views of them must not be used any more."""
        if self.is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))
            self.is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.handle is not None:
            self._finalizer()
            self.handle = None


def _advise(pages: mmap.mmap, advice: int) -> bool:
    """Return whether the kernel took the advice; not knowing one is no error."""
    try:
        pages.madvise(advice)
    except (OSError, ValueError):
        return False
    return True


class KeptStaging:
    """Copies tensors into one kept buffer; what it yields holds the values of the call, whatever training does next.

    A later call overwrites what an earlier one has yielded: the owner begins it when the save before has been written.
    ``max_bytes`` bounds the buffer; a state that needs more is a MemoryError that says so.
    """

    def __init__(self, *, shared: bool = False, max_bytes: int | None = None) -> None:
        self.shared, self.max_bytes = shared, max_bytes
        self.buffer: HostBuffer | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stage(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield a contiguous host copy of each tensor; all copies are complete when the first is yielded."""
        sources = [tensor.detach() for tensor in tensors]
        starts, end = [], 0
        for source in sources:
            starts.append(end)
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.reserve(end, pinned=any(source.is_cuda for source in sources))
        copies = [
            self.buffer.bytes[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(starts, sources, strict=True)
        ]
        for copy, source in zip(copies, sources, strict=True):
            if source.is_cuda:
                with torch.cuda.stream(self._stream_of(source.device)):
                    copy.copy_(source, non_blocking=True)
            else:
                copy.copy_(source)
        for stream in self._streams.values():
            stream.synchronize()
        return iter(copies)

    def reserve(self, num_bytes: int, *, pinned: bool = False) -> None:
        """Have a buffer of at least this size, as before the first save, when nobody waits."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise MemoryError(
                f"the copy of the state takes {num_bytes} bytes of host memory, the bound is {self.max_bytes}; raise "
                "the bound, or save synchronously"
            )
        if self.buffer is None or self.buffer.size < num_bytes:
            self.close()
            self.buffer = HostBuffer(num_bytes, shared=self.shared)
        if pinned:
            self.buffer.pin()

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream of our own that begins when what is queued on the present one is done."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def close(self) -> None:
        """Give the buffer back."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer = None
