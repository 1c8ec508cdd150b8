"""Whether the Triton kernels can run here, on such tensors and forests, and why not. Imports no Triton."""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hsa.attention.kernels.levels import levels
from hsa.tree.hierarchy import Hierarchy

INSTALLED = find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
WIDEST_CLUSTERED = 128
"""Widest keys that are clustered: their covariance has to fit the registers of one program."""
WIDEST_THREE_WAY = 128
"""Widest rows of three-way attention: a program keeps rows of queries, keys and values and their gradients."""
CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs with the matrix products that the kernels use (Ampere)."""


def why_not(q: Tensor, v: Tensor, backend: str, widest: int = WIDEST) -> list[str]:
    """Return the reasons against the kernels that hold for any operator.

    On the CPU they run only under Triton's interpreter (TRITON_INTERPRET=1), and only if asked for by name: it is for tests.
    """
    if not INSTALLED:
        return ["triton is not installed: pip install triton"]
    reasons = []
    if torch.version.hip is not None:
        reasons.append("its kernels are written for CUDA, not for ROCm")
    elif q.device.type == "cuda":
        if capability(q.device) < CAPABILITY:
            reasons.append("the GPU is older than compute capability 8.0")
    elif not (q.device.type == "cpu" and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        reasons.append(f"its kernels run on CUDA, the tensors are on {q.device.type}")
    if q.dtype not in DTYPES:
        reasons.append(f"it has no {q.dtype}")
    for width in {q.shape[-1], v.shape[-1]}:
        if not 1 <= width <= widest:
            reasons.append(f"head dims must be 1 to {widest}, not {width}")
    return reasons


def why_not_forest(forest: Hierarchy) -> list[str]:
    """Return the reasons against a rooted forest (`rounds.rooted`) that hold for any operator."""
    if forest.num_leaves == 0:
        return ["there are no leaves"]
    if levels(forest) is None:
        return ["leaves hang at very different depths, so that equal depths would take too many rows"]
    return []


def padded(width: int) -> int:
    """Return the width in kernels: a power of two, and no less than tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())


def device_of(x: Tensor) -> Any:
    """Inside this context kernels are launched on the device of `x`; compilers see to that themselves."""
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x)


_capabilities: dict[torch.device, tuple[int, int]] = {}


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, asked for once."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]
