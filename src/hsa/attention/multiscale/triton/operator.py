"""Backend "triton" of multiscale attention and of the choice: from nodes of the forest to rows of the plan and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hsa.attention.kernels.levels import Levels, levels
from hsa.attention.multiscale.cluster import KeyClusters
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.select import Opening
from hsa.attention.multiscale.selection import Selection
from hsa.attention.multiscale.triton.attend import attend_lists
from hsa.attention.multiscale.triton.pyramid import pyramid
from hsa.attention.multiscale.triton.ranking import search_tables
from hsa.attention.multiscale.triton.search import search_families
from hsa.tree.hierarchy import Hierarchy


def multiscale_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hierarchy: Hierarchy,
    *,
    selection: Selection,
    limit: Tensor | None,
    clusters: KeyClusters | None,
    positions: Tensor | None,
    include_self: bool,
    pooled_bias: Tensor | None,
    mixing: None,
    normalizer: None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """See `hsa.multiscale_attention`; the forest is rooted, the arguments are checked. Refused: positions, dropout."""
    plan = _plan(hierarchy)
    order = None if clusters is None else clusters.order
    queries = selection.queries
    rows, _ = _rows_and_nodes(hierarchy)
    return attend_lists(
        q,
        _pooled(k, plan, order),
        _pooled(v, plan, order),
        torch.where(selection.families < 0, -1, rows[selection.families]).to(torch.int32),
        queries.offsets,
        queries.tree,
        plan,
        limit=limit,
        leaves=queries.leaves,
        order=order,
        include_self=include_self,
        pooled_bias=pooled_bias,
        scale=scale,
        most_queries=queries.most,
    )


def search(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    queries: Queries,
    opening: Opening,
    clusters: KeyClusters | None,
    positions: Tensor | None,
    limit: Tensor | None,
    scale: float,
    top_k: int,
    width: int | None,
) -> tuple[Tensor, Tensor]:
    """[groups, heads, top_k] nodes of the best leaf families, and products taken, to sum. `width` None: exact."""
    tables = search_tables(hierarchy)
    assert tables is not None
    keys = _pooled(k, _plan(hierarchy), None if clusters is None else clusters.order)
    low, high = opening.bounds or (None, None)
    options: dict[str, Any] = {"limit": limit, "scale": scale, "top_k": top_k, "width": width}
    groups = (queries.offsets, queries.tree, low, high)
    rows, counted = search_families(q, keys, tables, *groups, **options, most_queries=queries.most)
    _, nodes = _rows_and_nodes(hierarchy)
    return torch.where(rows < 0, -1, nodes[rows]), counted


def pooled_rows(x: Tensor, hierarchy: Hierarchy, nodes: Tensor) -> Tensor:
    """`[nodes, heads, dim]` the means of `x` over the leaves below some nodes of a rooted forest."""
    rows, _ = _rows_and_nodes(hierarchy)
    return _pooled(x, _plan(hierarchy), None)[:, rows[nodes]].transpose(0, 1)


_RECENT: Any = WeakIdKeyDictionary()


def _pooled(x: Tensor, plan: Levels, order: Tensor | None) -> Tensor:
    """The pyramid of `x`, kept for as long as `x` lives and is not written to.

    The choice, the attention and the cache of one layer all pool the same keys. What is written to in inference mode leaves
    no trace, so nothing is kept there.
    """
    if torch.compiler.is_compiling() or x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
        return pyramid(x, plan, order)
    known = _RECENT.get(x)
    if known is None or known[0] != x._version or known[1] is not plan or known[2] is not order:
        known = _RECENT[x] = x._version, plan, order, pyramid(x, plan, order)
    return known[3]


def _plan(hierarchy: Hierarchy) -> Levels:
    plan = levels(hierarchy)
    assert plan is not None
    return plan


def _rows_and_nodes(hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """The lowest row of every node, and the node of every row."""

    def build() -> tuple[Tensor, Tensor]:
        plan = _plan(hierarchy)
        rows, nodes = torch.from_numpy(plan.row_of_node), torch.from_numpy(plan.node)
        return rows.to(hierarchy.device), nodes.to(hierarchy.device)

    return hierarchy.cached("rows and nodes", build)
