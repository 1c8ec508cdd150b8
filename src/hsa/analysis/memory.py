"""Measurement of peak memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> float | None:
    """Return the peak memory of a call beyond what was in use before, in MiB; None if it cannot be measured."""
    peak = PeakMemory(device)
    run()
    return peak.so_far()


def allocated(device: torch.device | str) -> float | None:
    """Return the memory that is allocated on a GPU, in MiB; None for other devices."""
    device = torch.device(device)
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else None


class PeakMemory:
    """Peak memory since this object was created, beyond what was in use then: of the GPU's allocator or of the process.

    A process has only one peak counter: creating a second object resets the counter of the first.

    Args:
        device: Device to measure.
        held: Result of `allocated` at an earlier time, to count from; by default the current one.
    """

    def __init__(self, device: torch.device | str = "cpu", held: float | None = None):
        self.device = torch.device(device)
        self.held = allocated(self.device) if held is None else held
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, where its reuse would go unnoticed
            _RESET.write_text("5")  # reset the peak
            self.held = _mib("VmRSS")
        except (OSError, AttributeError, StopIteration):
            return

    def so_far(self) -> float | None:
        """Return the peak so far in MiB; None if it cannot be measured."""
        if self.held is None:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.held
        return max(0.0, _mib("VmHWM") - self.held)


def _mib(name: str) -> float:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name)) / 1024
