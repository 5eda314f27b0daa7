"""Memory of a rank, on the host and on its device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_MIB = 2.0**20


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return MiB by name: resident host memory now and at most, and on CUDA what is and was allocated and reserved."""
    # getrusage counts kibibytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
    resident = _resident_bytes(peak)
    # The system updates the two at different moments.
    report = {"host_mib": resident / _MIB, "host_peak_mib": max(peak, resident) / _MIB}
    if device.type == "cuda":
        report |= {
            "device_mib": torch.cuda.memory_allocated(device) / _MIB,
            "device_peak_mib": torch.cuda.max_memory_allocated(device) / _MIB,
            "device_reserved_mib": torch.cuda.memory_reserved(device) / _MIB,
        }
    return report


def _resident_bytes(peak: float) -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        # Not Linux: the peak is the nearest thing that is known.
        return peak
    return float(pages * resource.getpagesize())
