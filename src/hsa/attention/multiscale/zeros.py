"""How much entmax leaves out of the lists of multiscale attention, level by level."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.arguments import check_inputs, check_positions, scale_or_default
from hsa.attention.hierarchical.entmax.zeros import Zeros
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import pyramid
from hsa.attention.multiscale.selection import Selection
from hsa.attention.multiscale.torch_lists import Lists, chunk_weights, chunks
from hsa.attention.normalizers import Entmax, resolve_entmax
from hsa.attention.rounds import rooted, rounds
from hsa.tree.hierarchy import Hierarchy


@torch.no_grad()
def zeros(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    selection: Selection,
    normalizer: Entmax,
    positions: Tensor | None = None,
    pooled_bias: float | Tensor = 0.0,
    scale: float | None = None,
) -> Zeros:
    """Of the entries of all rows that `hsa.multiscale_attention` makes of the same arguments, which are exactly 0.

    An entry counts for the height of the family that its node is a member of.
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    entmax = resolve_entmax(normalizer, q)
    forest, positions = rooted(hierarchy, check_positions(positions, q, hierarchy))
    partition, plan, heads = selection.partition(hierarchy), rounds(forest), q.shape[1]
    keys = pyramid(k, plan)
    lists = Lists(forest, partition, plan.slot_of_node, selection.limit, None, True, heads, k.shape[1], keys.dtype)
    bias, scale = per_head(pooled_bias, q), scale_or_default(scale, q)
    heights = int(forest.structure.height.max(initial=0))
    found = torch.zeros(2, heights + 1, dtype=torch.int64, device=q.device)
    for groups, num_queries, longest_list in chunks(partition, heads * q.shape[2]):
        chunk = lists.chunk(groups, num_queries, longest_list)
        p = chunk_weights(q, keys, bias, positions, forest, chunk, None, entmax, scale)
        seen = chunk.seen().expand(p.shape)
        height = forest.tensor("height")[forest.parent[chunk.nodes]][:, :, None].expand(p.shape)
        for row, counted in enumerate((seen & (p == 0), seen)):
            found[row] += torch.bincount(height[counted], minlength=heights + 1)
    zero, of = found[:, 1:].tolist()
    return Zeros(tuple(zero), tuple(of))
