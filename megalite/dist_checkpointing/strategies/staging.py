"""Memory on the host that a save copies to, kept from save to save.

A copy into pages that exist runs at the speed of memory; into fresh 4 KiB pages it is up to 20 times slower, since the
kernel makes and clears each one on the way. So there is one buffer: asked for in huge pages, made once, and used again
by every later save; it grows when the state does, and never holds more than one copy of it. On CUDA it is pinned.
"""

from __future__ import annotations

import errno
import mmap
import weakref
from collections.abc import Iterable, Iterator

import torch

_ALIGNMENT = 64
"""What torch gives its own tensors: kernels then take any view of a type."""
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it."""


class HostBuffer:
    """Private pages of this process: with ``populate`` they exist at once, else each is made when it is first used."""

    def __init__(self, num_bytes: int, *, populate: bool = True) -> None:
        # Rounded up, so that a state that grows a little fits the next time.
        self.size = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
        # Shared anonymous pages, which Python makes by default, are huge only where the system says so for them alone.
        self._pages: mmap.mmap | None = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(self._pages, mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        if populate and not _advise(self._pages, _POPULATE_WRITE):
            self.bytes[:: mmap.PAGESIZE] = 0
        self._unpin: weakref.finalize | None = None

    def pin(self) -> None:
        """Register the pages with CUDA, so that copies from the device run beside computation."""
        if self._unpin is None:
            runtime, place = torch.cuda.cudart(), self.bytes.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(place, self.size, 0))
            # Also where nobody closes it: memory that is still registered must not be mapped again.
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, place)

    def close(self) -> None:
        """Give the pages back, once no view of them is left."""
        if self._unpin is not None:
            self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pages = None


def _advise(pages: mmap.mmap, advice: int) -> bool:
    """Return whether the kernel knows the advice; MemoryError when it cannot follow it."""
    try:
        pages.madvise(advice)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise MemoryError(f"the host has no memory for {len(pages)} bytes: {error}") from error
    return True


class KeptStaging:
    """Copies tensors into one kept buffer; what it yields holds the values of the call, whatever training does next.

    A later call overwrites what an earlier one has yielded: the owner begins it when the save before has been written.
    """

    def __init__(self) -> None:
        self.buffer: HostBuffer | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stage(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield a contiguous host copy of each tensor; all copies are complete when the first is yielded.

        Raises MemoryError when the host has not enough memory.
        """
        sources = [tensor.detach() for tensor in tensors]
        starts, end = [], 0
        for source in sources:
            starts.append(end)
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._reserve(end)
        if any(source.is_cuda for source in sources):
            buffer.pin()
        copies = [
            buffer.bytes[start : start + source.nbytes].view(source.dtype).view(source.shape)
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

    def _reserve(self, num_bytes: int) -> HostBuffer:
        if self.buffer is None or self.buffer.size < num_bytes:
            self.close()
            self.buffer = HostBuffer(num_bytes)
        return self.buffer

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream of our own that begins when what is queued on the present one is done."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def close(self) -> None:
        """Give the buffer back."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer = None
