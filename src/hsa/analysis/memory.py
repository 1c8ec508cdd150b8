"""Measurement of peak memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

_MEMORY = Path("/proc/meminfo")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> float | None:
    """Return the peak memory of a call beyond what was in use before, in MiB; None if it cannot be measured."""
    peak = PeakMemory(device)
    run()
    return peak.so_far()


def free_memory(device: torch.device | str = "cpu") -> float | None:
    """Return the memory that can still be allocated on a device, in MiB; None if it cannot be measured."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0] / 2**20
    try:
        return _mib("MemAvailable", _MEMORY)
    except (OSError, StopIteration):
        return None


def format_mib(mib: float) -> str:
    """Return an amount of memory in GiB.

    >>> format_mib(52_000), format_mib(700)
    ('51 GiB', '0.7 GiB')
    """
    gib = mib / 1024
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"


@dataclass(frozen=True)
class MemoryNeed:
    """Estimate of the memory that a text needs.

    Args:
        needed: Memory in MiB, beyond what is in use.
        free: Memory in MiB that is free.
        fits: Number of tokens for which the free memory suffices.
    """

    needed: float
    free: float
    fits: int


def estimate_need(run: Callable[[int], Any], tokens: int, device: torch.device | str = "cpu") -> MemoryNeed | None:
    """Estimate the memory that `run(tokens)` needs, from runs with an eighth and a quarter of the tokens.

    Beyond these, memory is taken to grow linearly, as that of attention in tiles does. None if these runs fail too, or if
    memory cannot be measured.
    """
    few, more = tokens // 8, tokens // 4
    try:
        run(few)  # what the first run allocates for good
        free = free_memory(device)
        low, high = (extra_memory(partial(run, n), device) for n in (few, more))
    except (RuntimeError, MemoryError):
        return None
    if free is None or low is None or high is None or few == 0:
        return None
    each = max(high - low, 0.0) / (more - few)
    fits = more + (int((free - high) / each) if each and free > high else 0)
    return MemoryNeed(high + each * (tokens - more), free, min(fits, tokens))


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


def _mib(name: str, file: Path = _STATUS) -> float:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name)) / 1024
