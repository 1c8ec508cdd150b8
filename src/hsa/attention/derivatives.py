"""Derivatives that the operators do not have, refused with an error instead of a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from hsa.errors import Unsupported

_SECOND = (
    "create_graph=True: there are first derivatives only. hsa.multiscale_attention and hsa.hierarchical_attention have "
    'higher ones with backend="reference", three-way attention with backend="dense"'
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward function raise `Unsupported` if its result is to be differentiated again.

    PyTorch's `once_differentiable` raises only if the incoming gradient itself needs a gradient. Without that,
    `torch.autograd.grad(out.sum(), q, create_graph=True)` would return a constant, and a penalty on it would be dropped.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise Unsupported(_SECOND)
        return once(*arguments)

    return checked


def check_no_transform(name: str, x: Tensor) -> None:
    """Raise `Unsupported` for a tensor inside `torch.func` transforms or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise Unsupported(
            f"{name}: expected a tensor outside torch.func transforms (vmap, grad, jvp, …), got one inside. Pass a batch as "
            "trees of one hierarchy, in one call; take gradients with torch.autograd.grad"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise Unsupported(
            f"{name}: expected a tensor without a tangent, got a dual tensor: there is no forward-mode differentiation. "
            "Use torch.autograd.grad"
        )
