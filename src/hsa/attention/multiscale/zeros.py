"""Count of the zero weights of multiscale attention with entmax, by level of the tree."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.checks import check_inputs, check_positions, scale_or_default
from hsa.attention.hierarchical.entmax.zeros import Zeros
from hsa.attention.multiscale.call import MultiscaleCall
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import pyramid
from hsa.attention.multiscale.selection import Selection
from hsa.attention.multiscale.torch_lists import chunk_weights, chunks_of_call
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
    """Count the zeros among the weights of `hsa.multiscale_attention` with the same arguments.

    An entry is counted at the height of the family that its node belongs to.
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    forest, positions = rooted(hierarchy, check_positions(positions, q, hierarchy))
    call = MultiscaleCall(
        q=q,
        k=k,
        v=k[..., :0],
        hierarchy=forest,
        selection=selection,
        limit=selection.limit,
        clusters=None,
        positions=positions,
        include_self=True,
        pooled_bias=per_head(pooled_bias, q),
        mixing=None,
        entmax=resolve_entmax(normalizer, q),
        dropout_p=0.0,
        scale=scale_or_default(scale, q),
        backend="torch",
    )
    keys = pyramid(k, rounds(forest))
    heights = int(forest.structure.height.max(initial=0))
    counts = torch.zeros(2, heights + 1, dtype=torch.int64, device=q.device)
    for chunk in chunks_of_call(call, keys.dtype):
        p = chunk_weights(call, chunk, keys)
        seen = chunk.seen().expand(p.shape)
        height = forest.tensor("height")[forest.parent[chunk.nodes]][:, :, None].expand(p.shape)
        for row, counted in enumerate((seen & (p == 0), seen)):
            counts[row] += torch.bincount(height[counted], minlength=heights + 1)
    zero, entries = counts[:, 1:].tolist()
    return Zeros(tuple(zero), tuple(entries))
