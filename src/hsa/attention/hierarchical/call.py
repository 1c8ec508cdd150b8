"""`HierarchicalCall`: the arguments of one call of hierarchical attention, as passed to its backends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hsa.attention.call import Call
from hsa.attention.hierarchical.family import FamilyAttention
from hsa.attention.mixing import HeadMixing
from hsa.attention.normalizers import Entmax
from hsa.attention.softmax import exact


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
