"""Operation counts of three-way attention.

A triple (query i, leaves j and k) costs 2·width for the product of pair(i, j) with k2_k, 2·value_width for weight · v2_k and
an exponential per head. A pair (i, j) costs width for q_i∘k1_j and 2·value_width for the product with v1_j and its sum.
"""

from __future__ import annotations

import numpy as np

from hsa.attention.checks import check_count
from hsa.attention.flops import Flops, entry_operations, pooling_operations
from hsa.attention.rounds import rooted
from hsa.research.trilinear.call import Forests, check_trees, limits
from hsa.tree.hierarchy import Hierarchy


def flops_trilinear(
    hierarchy: Hierarchy,
    width: int,
    heads: int,
    *,
    value_width: int | None = None,
    first: Hierarchy | None = None,
    second: Hierarchy | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Flops:
    """Return the number of operations of `trilinear_attention`, which grows as Σ over queries of (visible leaves)².

    Args:
        hierarchy, first, second, causal, window: See `trilinear_attention`.
        width: Width of queries and keys of all heads together; rank · heads for a CP. A full tensor costs more than this.
        heads: Number of heads.
        value_width: Width of the values; that of queries and keys by default.

    >>> flops_trilinear(Hierarchy.flat([100]), width=64, heads=4).attention == 100**3 * (4 * 64 + 4) + 100**2 * 3 * 64
    True
    """
    forests = Forests(hierarchy, first or hierarchy, second or hierarchy)
    left, right = limits(forests, causal, window)
    check_trees(forests)
    if left is None and right is None:
        queries, others, further = (np.array(forest.lengths, np.int64) for forest in forests)
        return _attention(width, heads, value_width, (queries * others * further).sum(), (queries * others).sum())
    length = np.repeat(hierarchy.lengths, hierarchy.lengths).astype(np.int64)
    start = np.repeat(hierarchy.structure.leaf_offsets[:-1], hierarchy.lengths)
    before = np.arange(hierarchy.num_leaves) - start
    after = length - 1 - before
    seen = 1 + (before if left is None else np.minimum(before, left))
    seen = seen + (after if right is None else np.minimum(after, right))
    return _attention(width, heads, value_width, (seen**2).sum(), seen.sum())


def flops_hierarchical_trilinear(
    hierarchy: Hierarchy, width: int, heads: int, *, value_width: int | None = None, causal: bool = False
) -> Flops:
    """Return the number of operations of `hierarchical_trilinear_attention`, which grows as Σ over families of size³.

    If causal, it grows as Σ over leaves and levels of (visible siblings)². For the arguments, see `flops_trilinear`.

    >>> tree = Hierarchy.regular([4096], (16, 16))
    >>> flat, on_tree = flops_trilinear(tree, 64, 4), flops_hierarchical_trilinear(tree, 64, 4)
    >>> round(flat.total / on_tree.total)
    58219
    """
    values = value_width or width
    if not causal:
        sizes = hierarchy.structure.num_children.astype(np.int64)
        count = _attention(width, heads, value_width, (sizes**3).sum(), (sizes**2).sum())
        return Flops(count.attention, pooling=pooling_operations(hierarchy, 3 * width + 2 * values))
    s = rooted(hierarchy)[0].structure
    nodes = np.flatnonzero(s.parent >= 0)
    seen = nodes - s.first_child[s.parent[nodes]] + s.is_leaf[nodes]  # siblings before; a leaf sees itself too
    leaves = s.leaf_count[nodes]
    count = _attention(width, heads, value_width, (leaves * seen**2).sum(), (leaves * seen).sum())
    return Flops(count.attention, pooling=pooling_operations(hierarchy, 2 * width + 2 * values))


def _attention(width: int, heads: int, value_width: int | None, triples: int, pairs: int) -> Flops:
    for name, value in (("width", width), ("heads", heads), ("value_width", value_width or width)):
        check_count(name, value, "a positive integer", minimum=1)
    triple = entry_operations(width, heads, value_width=value_width)
    return Flops(attention=int(triples) * triple + int(pairs) * (width + 2 * (value_width or width)), pooling=0)
