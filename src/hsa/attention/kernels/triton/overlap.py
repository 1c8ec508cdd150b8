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
ALONE, FIRST, LATER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Turn of a launch among launches that need nothing of each other."""


def turns(number: int) -> list[int]:
    """Return the turn of each of a number of launches that need nothing of each other."""
    return [ALONE.value] if number == 1 else [FIRST.value] + [LATER.value] * (number - 1)


def overlap(device: torch.device) -> dict[str, Any]:
    """Return the compile-time constant and the launch option of kernels that call `wait_for_previous_launch`."""
    overlaps = not INTERPRETED and available.capability(device) >= HOPPER
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


@triton.jit
def wait_for_previous_launch(OVERLAP: tl.constexpr, TURN: tl.constexpr = ALONE):
    """Let the next launch start, and wait until the previous one has finished (`launch_pdl`) before any load or store.

    Launches that need nothing of each other fill the GPU together: the first of them (`FIRST`) waits before the others may
    start, and these (`LATER`) start at once, but finish after it (`finish_after_previous_launch`).
    """
    if OVERLAP:
        if TURN == FIRST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        if TURN == ALONE:
            tl.extra.cuda.gdc_wait()


@triton.jit
def finish_after_previous_launch(OVERLAP: tl.constexpr, TURN: tl.constexpr):
    """Wait at the end of a `LATER` launch for the previous one, so that whatever waits for this launch waits for both."""
    if OVERLAP and TURN == LATER:
        tl.extra.cuda.gdc_wait()
