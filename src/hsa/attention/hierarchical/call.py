"""`HierarchicalCall`: the arguments of one call of hierarchical attention, as passed to its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.attention.call import Call, needs_gradient
from hsa.attention.hierarchical.family import FamilyAttention
from hsa.attention.kernels.repeat import is_plain, layout_of, with_types
from hsa.attention.mixing import HeadMixing
from hsa.attention.normalizers import Entmax
from hsa.attention.softmax import exact
from hsa.tree.hierarchy import Hierarchy

REPEATED = "repeated calls"
"""Key of the repeated calls in the cache of a hierarchy."""
MOST_REPEATED = 16
"""Maximum number of repeated calls per hierarchy."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HierarchicalCall(Call):
    """Checked arguments of `hierarchical_attention` or of `energy`; k and v have as many heads as q."""

    q: Tensor
    v: Tensor  # of width 0 for `energy`
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    include_self: bool
    causal: bool  # the paper's mask, which leaks
    entmax: Entmax | None  # None: softmax
    family_attention: FamilyAttention = exact
    mixing: HeadMixing | None = None
    scale: float

    @property
    def is_repeatable(self) -> bool:
        """Whether kernels may record their launches, for other calls with such tensors (`repeated`)."""
        is_default = self.positions is None and self.entmax is None and not self.causal
        return is_default and self.q.shape[1] == self.k.shape[1] and is_plain(self.q, self.k, self.v)

    def keep(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], keeps_gradient: bool) -> None:
        """Keep a function that repeats this call for other tensors of the same layout."""
        runs: dict[Any, Callable[[Tensor, Tensor, Tensor], Tensor]] = self.hierarchy.cached(REPEATED, dict)
        if len(runs) >= MOST_REPEATED:
            runs.pop(next(iter(runs)))
        options = with_types(self.include_self, self.scale, self.backend, keeps_gradient)
        runs[layout_of(self.q, self.k, self.v), options] = run


def repeated(
    q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, include_self: bool, scale: float | None, backend: str
) -> Tensor | None:
    """Repeat a recorded call of softmax attention without positions; None if there is no such call.

    Nothing is checked: an earlier call with tensors of this layout has passed all checks.
    """
    runs = hierarchy.peek(REPEATED) if isinstance(hierarchy, Hierarchy) else None
    if not runs or not is_plain(q, k, v):
        return None
    scale = q.shape[-1] ** -0.5 if scale is None and q.ndim else scale
    options = with_types(include_self, scale, backend, needs_gradient(q, k, v))
    run = runs.get((layout_of(q, k, v), options))
    if run is None:
        return None
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return run(q, k, v)
    return run(q, k, v)
