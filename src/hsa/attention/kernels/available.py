"""Reasons why the Triton kernels cannot run: installation, device, tensors, forest. Does not import Triton."""

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
"""Largest head dim of the kernels."""
WIDEST_CLUSTERED = 128
"""Largest head dim of clustered keys: their covariance must fit the registers of one program."""
WIDEST_THREE_WAY = 128
"""Largest head dim of three-way attention: a program keeps rows of queries, keys and values and their gradients."""
CAPABILITY = (8, 0)
"""Smallest compute capability with the matrix products that the kernels use (Ampere)."""


def why_not(q: Tensor, v: Tensor, backend: str, widest: int = WIDEST) -> list[str]:
    """Return the reasons why the kernels of any operator cannot run on these tensors.

    On the CPU, kernels run only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests, and only with
    backend="triton".
    """
    if not INSTALLED:
        return ["triton is not installed; install it with: pip install 'hsa[gpu]'"]
    reasons = []
    if torch.version.hip is not None:
        reasons.append("the kernels are written for CUDA, not for ROCm")
    elif q.device.type == "cuda":
        if capability(q.device) < CAPABILITY:
            reasons.append("the GPU has a compute capability below 8.0")
    elif not (q.device.type == "cpu" and backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        reasons.append(f"the kernels run on CUDA, but the tensors are on {q.device.type}")
    if q.dtype not in DTYPES:
        reasons.append(f"the kernels do not support {q.dtype}")
    for width in {q.shape[-1], v.shape[-1]}:
        if not 1 <= width <= widest:
            reasons.append(f"head dims must be 1 to {widest}, not {width}")
    return reasons


def why_not_forest(forest: Hierarchy) -> list[str]:
    """Return the reasons why the kernels of any operator cannot run on a rooted forest (`rounds.rooted`)."""
    if forest.num_leaves == 0:
        return ["there are no leaves"]
    if levels(forest) is None:
        return ["leaves have very different depths, and extending them to one depth would take too many rows"]
    return []


def padded(width: int) -> int:
    """Return the padded width in kernels: a power of two, at least 16 for tensor cores."""
    return max(16, 1 << (width - 1).bit_length())


def device_of(x: Tensor) -> Any:
    """Return a context in which kernels are launched on the device of `x`. Compiled code does not need it."""
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x)


_capabilities: dict[torch.device, tuple[int, int]] = {}


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, queried once."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]


SHARED_MEMORY = 99 * 2**10
"""Shared memory of a block, in bytes, where it is not known: that of Ampere and Ada cards."""
_shared_memory: dict[torch.device, int] = {}


def shared_memory(device: torch.device) -> int:
    """Return the shared memory that a block of threads may use, in bytes."""
    if device.type != "cuda":
        return SHARED_MEMORY
    if device not in _shared_memory:
        properties = torch.cuda.get_device_properties(device)
        _shared_memory[device] = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY)
    return _shared_memory[device]
