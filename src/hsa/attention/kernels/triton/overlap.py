"""Launches that overlap: on Hopper and newer GPUs a kernel can start while the one before it still runs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hsa.attention.kernels import available
from hsa.attention.kernels.triton.launch import INTERPRETED

HOPPER = (9, 0)
"""Smallest compute capability at which launches can overlap."""


def overlap(device: torch.device) -> dict[str, Any]:
    """Return the compile-time constant and the launch option of kernels that call `wait_for_previous_launch`."""
    overlaps = not INTERPRETED and available.capability(device) >= HOPPER
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


@triton.jit
def wait_for_previous_launch(OVERLAP: tl.constexpr):
    """Let the next launch start, and wait until the previous one has finished (`launch_pdl`) before any load or store."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
