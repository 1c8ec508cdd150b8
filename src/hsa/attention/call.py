"""`Call`: the arguments of one call of an operator, as passed to its backends.

The public function of an operator checks its arguments, fills in defaults, and stores them in a frozen dataclass derived
from `Call`. Nothing is checked again after that: a backend is a function `run(call) → result`, with a function
`why_not(call) → reasons` for the calls that it cannot run (`hsa.attention.dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """Base class of the calls of all operators."""

    k: Tensor
    hierarchy: Hierarchy
    backend: str  # "auto" or the name of a backend, as the user passed it


def needs_gradient(*values: object) -> bool:
    """Return whether autograd records the operations on any of the values; those that are not tensors are ignored."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
