"""How much memory a call needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> float | None:
    """MiB that a call needs at its peak beyond what is held before it; None where the system cannot say."""
    peak = PeakMemory(device)
    run()
    return peak.so_far()


def allocated(device: torch.device | str) -> float | None:
    """MiB that the allocator of a GPU has given out; None for other devices."""
    device = torch.device(device)
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else None


class PeakMemory:
    """MiB needed at the peak since it was made, beyond what was held then: of a GPU's allocator, else of the process.

    There is one peak per process: of two of these at a time, the older one sees what the newer one does.

    Args:
        device: whose memory.
        held: `allocated` of an earlier time, beyond which to count.
    """

    def __init__(self, device: torch.device | str = "cpu", held: float | None = None):
        self.device = torch.device(device)
        self.held = allocated(self.device) if held is None else held
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what is taken
            _RESET.write_text("5")  # the peak starts anew
            self.held = _mib("VmRSS")
        except (OSError, AttributeError, StopIteration):
            return

    def so_far(self) -> float | None:
        """None where the system cannot say."""
        if self.held is None:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.held
        return max(0.0, _mib("VmHWM") - self.held)


def _mib(name: str) -> float:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name)) / 1024
