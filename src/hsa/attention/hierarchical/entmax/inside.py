"""Number of keys that the inside of a node stands for, as an entry of the node's row in its family."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hsa.attention.kernels.levels import levels
from hsa.tree.hierarchy import Hierarchy


def keys_inside(hierarchy: Hierarchy, include_self: bool, causal: bool) -> np.ndarray:
    """Return m(A) of every node, `[nodes]`: the number of leaves of A that a leaf of A sees inside A.

    It is a geometric mean over the leaves of A:

        log m(P) = Σ over children C:  leaf_count(C)/leaf_count(P) · log(m(C) + leaves of C's visible siblings)

    with m(leaf) = 1 if `include_self`, else 0. Without the causal mask this is leaf_count or leaf_count − 1. The recursion
    is that of the softmax operator's `inner` for logits of 0, so that entmax tends to softmax as α → 1.

    >>> keys_inside(Hierarchy.from_nested([[3, 2]]), include_self=False, causal=False).tolist()
    [4.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    s = hierarchy.structure
    inside = s.leaf_count.astype(np.float64) - (not include_self)
    if not causal:
        return inside
    below = np.flatnonzero(s.parent >= 0)
    height = s.height[s.parent[below]]
    for h in range(1, int(s.height.max(initial=0)) + 1):  # members come before their parents
        members = below[height == h]
        parents = s.parent[members]
        seen = inside[members] + s.first_leaf[members] - s.first_leaf[parents]
        share = s.leaf_count[members] / s.leaf_count[parents]
        mean = np.zeros(len(inside))
        np.add.at(mean, parents, share * np.log(seen))
        inside[parents] = np.exp(mean[parents])
    return inside


def inside_weights(forest: Hierarchy, weighted: bool, include_self: bool, causal: bool) -> Tensor:
    """Return the weight of the inside of each row above the leaves of the kernels' plan: 0 if there is nothing inside.

    It is the number of keys if `weighted`, else 1.
    """

    def build() -> Tensor:
        plan = levels(forest)
        assert plan is not None
        inside = keys_inside(forest, include_self, causal)[plan.node[plan.num_leaves :]]
        inside = inside if weighted else inside > 0
        return torch.from_numpy(inside.astype(np.float32)).to(plan.device)

    return forest.cached(("inside", weighted, include_self, causal), build)
