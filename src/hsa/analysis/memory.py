"""How much memory a call needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def extra_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> float | None:
    """MiB that a call needs at its peak beyond what is held before it; None where the system cannot say."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kib(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what is taken
        reset.write_text("5")  # the peak starts anew
        held = kib("VmRSS")
        run()
        return max(0, kib("VmHWM") - held) / 1024
    except (OSError, AttributeError, StopIteration):
        return None
