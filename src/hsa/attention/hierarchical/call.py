"""`HierarchicalCall`: one call of hierarchical attention, as its backends see it."""

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
    """A call of `hierarchical_attention` or of `energy`, checked. k and v have the heads of q."""

    q: Tensor
    v: Tensor  # of width 0 where only the energy is asked for
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    include_self: bool
    causal: bool  # the paper's mask, which leaks
    entmax: Entmax | None  # None: softmax
    family_attention: FamilyAttention = exact
    mixing: HeadMixing | None = None
    scale: float
