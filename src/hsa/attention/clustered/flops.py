"""Operation counts of clustered attention: everything that tiles load and multiply, masked or not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hsa.attention.clustered.keys import clustering_operations, scored_dim
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.selection import NEVER, TileSelection
from hsa.attention.flops import Flops, entry_operations


def operations(
    selection: TileSelection,
    width: int,
    heads: int,
    *,
    value_width: int | None = None,
    kv_heads: int | None = None,
    spread: float = 1.0,
    top_k: int | None = None,
) -> Flops:
    """Count the operations of `hsa.clustered_attention`, with the selection, the clustering and the pooling.

    A tile multiplies each row of its list with all of its queries, also with those for which the row is not active, and each
    exact key that its last query sees.

    Args:
        selection: Result of `hsa.select_groups`.
        width: Width of the queries, over all heads.
        heads: Number of query heads.
        value_width: Width of the values, if every query head had its own; `width` by default.
        kv_heads: Number of key/value heads; `heads` by default.
        spread, top_k: Options of the selection: without a spread there are fewer products, and `top_k` needs no normaliser.

    >>> from hsa import cluster, select_groups
    >>> q, k, v = torch.randn(3, 1024, 2, 16).unbind(0)
    >>> selection = select_groups(q, k, cluster(k, v, [1024]), [1024], causal=True)
    >>> count = operations(selection, 32, 2)
    >>> count.total == count.attention + count.pooling + count.selection + count.clustering
    True
    """
    layout, shape = selection.layout, selection.layout.shape
    dim, value_dim = width // heads, (value_width or width) // heads
    kv_heads = kv_heads or heads
    queries, chunks = np.diff(layout.tile_row), layout.tile_chunks
    exact = layout.tile_end - layout.tile_exact + (queries - 1 if layout.causal else 0)
    per_list = torch.from_numpy(np.repeat(queries, chunks * selection.lists)).to(selection.first.device)
    listed = int((listed_rows(selection) * per_list).sum()) * (heads // selection.lists)
    entries = listed + heads * int((queries * exact).sum())
    products = chunks * selection_operations(shape, dim, spread, top_k)
    if top_k is None:
        products = products + np.where(chunks > 0, exact, 0) * (2 * dim + 1)
    members = layout.num_chunks * (sum(shape.rows) - 1)  # of groups, nodes and chunks
    return Flops(
        attention=entry_operations(width, heads, value_width=value_width) * entries // heads,
        pooling=2 * kv_heads * (dim + value_dim) * members,
        selection=heads * int((queries * products).sum()),
        clustering=clustering_operations(layout.num_chunks, kv_heads, dim, shape),
    )


def selection_operations(shape: Shape, dim: int, spread: float, top_k: int | None) -> int:
    """Count the operations with which a query estimates the groups of a chunk and, without `top_k`, sums its nodes."""
    whole = 1 + (shape.rows[2] if top_k is None else 0)
    return shape.groups * (2 if spread else 1) * (2 * scored_dim(dim) + 1) + whole * (2 * dim + 1)


def listed_rows(selection: TileSelection) -> Tensor:
    """Return the number of listed rows of each visible chunk: tile by tile, list by list, chunk by chunk."""
    shape = selection.layout.shape
    group = selection.first.view(-1, shape.branching[2], shape.branching[1])
    node = group.amin(2)
    chunk = node.amin(1)
    # A mean is listed if it is active before its own first key is, as `selection.intervals_of` has it.
    keys = shape.group * (group != NEVER).sum((1, 2))
    means = (node[..., None] < group).sum((1, 2)) + (chunk[:, None] < node).sum(1) + (chunk > 0)
    return keys + means
