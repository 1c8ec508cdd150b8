"""Backend "triton" of multiscale attention and of `select`. Converts nodes of the forest to rows of the plan and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hsa.attention.kernels.levels import Levels, levels
from hsa.attention.multiscale.call import MultiscaleCall, SelectCall
from hsa.attention.multiscale.cluster import KeyClusters
from hsa.attention.multiscale.triton.attend import attend_lists
from hsa.attention.multiscale.triton.pyramid import pyramid
from hsa.attention.multiscale.triton.ranking import search_tables
from hsa.attention.multiscale.triton.search import search_families
from hsa.tree.hierarchy import Hierarchy


def attend(call: MultiscaleCall) -> Tensor:
    """Compute `hsa.multiscale_attention` from checked arguments."""
    plan, order = _plan(call.hierarchy), _order(call.clusters)
    queries, families = call.selection.queries, call.selection.families
    rows, _ = _rows_and_nodes(call.hierarchy)
    return attend_lists(
        call.q,
        _pooled(call.k, plan, order),
        _pooled(call.v, plan, order),
        torch.where(families < 0, -1, rows[families]).to(torch.int32),
        queries.offsets,
        queries.tree,
        plan,
        limit=call.limit,
        leaves=queries.leaves,
        include_self=call.include_self,
        pooled_bias=call.pooled_bias,
        scale=call.scale,
        most_queries=queries.largest_group,
    )


def search(call: SelectCall) -> tuple[Tensor, Tensor]:
    """Return the nodes of the best leaf families `[groups, heads, top_k]`, padded with −1, and counts of products to sum."""
    tables = search_tables(call.hierarchy)
    assert tables is not None
    keys = _pooled(call.k, _plan(call.hierarchy), _order(call.clusters))
    low, high = call.neighbourhood.bounds or (None, None)
    queries = call.queries
    rows, counted = search_families(
        call.q,
        keys,
        tables,
        queries.offsets,
        queries.tree,
        low,
        high,
        limit=call.limit,
        scale=call.scale,
        top_k=call.top_k,
        width=call.width,
        most_queries=queries.largest_group,
    )
    _, nodes = _rows_and_nodes(call.hierarchy)
    return torch.where(rows < 0, -1, nodes[rows]), counted


def pooled_rows(x: Tensor, hierarchy: Hierarchy, nodes: Tensor) -> Tensor:
    """Return the means of `x` over the leaves below some nodes of a rooted forest, `[nodes, heads, dim]`."""
    rows, _ = _rows_and_nodes(hierarchy)
    return _pooled(x, _plan(hierarchy), None)[:, rows[nodes]].transpose(0, 1)


_RECENT: Any = WeakIdKeyDictionary()
"""Latest pyramid of each tensor, with the tensor's version, plan and order."""


def _pooled(x: Tensor, plan: Levels, order: Tensor | None) -> Tensor:
    """Return the pyramid of `x`, which is kept for as long as `x` lives and is not written to.

    The selection, the attention and the cache of one layer all pool the same keys. Writes to inference tensors cannot be
    detected, so their pyramids are not kept.
    """
    if torch.compiler.is_compiling() or x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
        return pyramid(x, plan, order)
    recent = _RECENT.get(x)
    if recent is None or recent[0] != x._version or recent[1] is not plan or recent[2] is not order:
        recent = _RECENT[x] = x._version, plan, order, pyramid(x, plan, order)
    return recent[3]


def _order(clusters: KeyClusters | None) -> Tensor | None:
    return None if clusters is None else clusters.order


def _plan(hierarchy: Hierarchy) -> Levels:
    plan = levels(hierarchy)
    assert plan is not None
    return plan


def _rows_and_nodes(hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Return the lowest row of every node, and the node of every row."""

    def build() -> tuple[Tensor, Tensor]:
        plan = _plan(hierarchy)
        rows, nodes = torch.from_numpy(plan.row_of_node), torch.from_numpy(plan.node)
        return rows.to(hierarchy.device), nodes.to(hierarchy.device)

    return hierarchy.cached("rows and nodes", build)
