"""Three-way attention modules for a layer, in which every leaf attends to pairs of leaves.

They take `(q, k1, k2, v1, v2, hierarchy, positions, mixing)`. A diagonal or low-rank T is part of the layer's projections.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hsa.attention.flops import Flops
from hsa.attention.mixing import HeadMixing
from hsa.nn.attention import Attention, is_counting, note_flops
from hsa.nn.attention_kinds import AttentionKind
from hsa.research.trilinear.counts import flops_hierarchical_trilinear, flops_trilinear
from hsa.research.trilinear.operator import hierarchical_trilinear_attention, trilinear_attention
from hsa.tree.hierarchy import Hierarchy


class ThreeWay(Attention):
    """Base class of three-way attention modules."""

    parts = ("q", "k1", "k2", "v1", "v2")
    uses_positions = False
    mixes = False

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
            note_flops(self.count(hierarchy, q.shape[1] * q.shape[2], q.shape[1]))
        return self.attend(q, k1, k2, v1, v2, hierarchy)

    def attend(self, *inputs: Any) -> Tensor:
        """Compute attention from q, k1, k2, v1, v2 and the hierarchy."""
        raise NotImplementedError

    def count(self, hierarchy: Hierarchy, width: int, heads: int) -> Flops:
        """Return the number of operations of `attend`."""
        raise NotImplementedError


class Trilinear(ThreeWay):
    """Attention to all pairs of leaves of a tree, or to those within a window.

    Args:
        window: Largest distance plus one; None for no limit. See `hsa.research.trilinear_attention`.
    """

    def __init__(self, *, window: int | None = None):
        super().__init__()
        self.window = window

    def attend(self, *inputs: Any) -> Tensor:
        return trilinear_attention(*inputs, window=self.window)

    def count(self, hierarchy: Hierarchy, width: int, heads: int) -> Flops:
        return flops_trilinear(hierarchy, width, heads, window=self.window)


class HierarchicalTrilinear(ThreeWay):
    """Attention to pairs of siblings at every level of the tree; pairs of different scales are dropped."""

    def attend(self, *inputs: Any) -> Tensor:
        return hierarchical_trilinear_attention(*inputs)

    def count(self, hierarchy: Hierarchy, width: int, heads: int) -> Flops:
        return flops_hierarchical_trilinear(hierarchy, width, heads)


TRILINEAR = AttentionKind(lambda config: Trilinear(), on_flat_trees=True, has_matrix=False)
HIERARCHICAL_TRILINEAR = AttentionKind(lambda config: HierarchicalTrilinear(), has_matrix=False)
