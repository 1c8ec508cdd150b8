"""`Call`: one call of an operator, as its backends see it.

The public function of an operator checks its arguments, fills in what they leave open, and describes the call once, as a
frozen dataclass derived from `Call`. From there on nothing is checked again: every backend is `run(call) → result`, and says
what it cannot run by `why_not(call) → reasons` (`hsa.attention.dispatch`).
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
    backend: str  # as asked for: "auto", or the name of a backend


def needs_gradient(*values: object) -> bool:
    """Return whether a gradient will be asked for, by way of any of the values that are tensors."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
