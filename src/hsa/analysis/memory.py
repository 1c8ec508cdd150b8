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


class PeakMemory:
    """MiB needed at the peak since it was made, beyond what was held then: of a GPU's allocator, else of the process.

    There is one peak per process: of two of these at a time, the older one sees what the newer one does.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.held: float | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.held = torch.cuda.memory_allocated(self.device) / 2**20
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
