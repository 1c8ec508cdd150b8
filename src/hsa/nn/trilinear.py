"""Three-way attentions a layer can be given: every leaf attends to pairs of leaves.

They take `(q, k1, k2, v1, v2, hierarchy, positions, mixing)`. A diagonal or low-rank T is part of the layer's projections.
"""

from __future__ import annotations

from torch import Tensor

from hsa.attention.mixing import HeadMixing
from hsa.attention.trilinear.counts import flops_hierarchical_trilinear, flops_trilinear
from hsa.attention.trilinear.operator import hierarchical_trilinear_attention, trilinear_attention
from hsa.hierarchy import Hierarchy
from hsa.nn.attention import Attention, is_counting, note_flops


class _ThreeWay(Attention):
    parts = ("q", "k1", "k2", "v1", "v2")
    uses_positions = False
    mixes = False


class Trilinear(_ThreeWay):
    """All pairs of leaves of a tree, or those within a window."""

    def __init__(self, *, window: int | None = None):
        super().__init__()
        self.window = window

    def forward(
        self,
        q: Tensor,
        k1: Tensor,
        k2: Tensor,
        v1: Tensor,
        v2: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        if is_counting():
            note_flops(flops_trilinear(hierarchy, q[0].numel(), q.shape[1], window=self.window))
        return trilinear_attention(q, k1, k2, v1, v2, hierarchy, window=self.window)


class HierarchicalTrilinear(_ThreeWay):
    """Pairs of siblings at every level of the tree; pairs of different scales are dropped."""

    def forward(
        self,
        q: Tensor,
        k1: Tensor,
        k2: Tensor,
        v1: Tensor,
        v2: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        if is_counting():
            note_flops(flops_hierarchical_trilinear(hierarchy, q[0].numel(), q.shape[1]))
        return hierarchical_trilinear_attention(q, k1, k2, v1, v2, hierarchy)
