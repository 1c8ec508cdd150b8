"""Repeated calls: the layout of tensors by which a call is recognised, and whether it may be repeated without checks.

An operator whose launches were recorded (`triton/recording.py`) repeats them for other tensors of the same layout. Checks of
shapes, dtypes and devices were passed then. Does not import Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hsa.attention.checks import is_checking

PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor) -> bool:
    """Return whether a call with these tensors runs as it is: not traced, transformed, intercepted or checked."""
    if torch.compiler.is_compiling() or is_checking() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(x) in PLAIN for x in tensors)


def with_types(*options: Any) -> tuple[Any, ...]:
    """Return options and their types, because 1 and True are equal, but not the same option."""
    return *options, *map(type, options)


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return everything that determines the launches of a call with these tensors, besides its options."""
    a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, a % 16 == 0, b % 16 == 0, c % 16 == 0, a == b, b == c, a == c,
    )  # fmt: skip
