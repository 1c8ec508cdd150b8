"""The neighbourhood of a group of queries: the leaf families that are always selected, whatever the queries are.

It consists of the group's own family and its `near` neighbours on each side. Clustered keys have no neighbourhood.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.attention.multiscale.leaf_families import LeafFamilies, leaf_families
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.visibility import anchors
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Range of families of every group, from `low` to `high` − 1; (0, 0) if it has none."""

    low: np.ndarray
    high: np.ndarray
    nodes: Tensor  # [groups, 1, width] parents of these families, padded with −1
    bounds: tuple[Tensor, Tensor] | None  # low and high on the device; None if all ranges are empty


def neighbourhood(queries: Queries, hierarchy: Hierarchy, near: int, limit: Tensor | None) -> Neighbourhood:
    """Return the neighbourhood of every group, built once per set of queries: it depends on the structure only."""
    families = leaf_families(hierarchy)

    def build() -> Neighbourhood:
        low, high = _ranges(queries, hierarchy, families, near, limit)
        device = hierarchy.device
        bounds = torch.as_tensor(low).to(device), torch.as_tensor(high).to(device)
        return Neighbourhood(low, high, _range_table(low, high, families), bounds if (high > low).any() else None)

    return queries.cached(("neighbourhood", hierarchy.digest, near, limit is None), build)


def empty_neighbourhood(queries: Queries, hierarchy: Hierarchy) -> Neighbourhood:
    """Return a neighbourhood without any family, as for clustered keys."""
    low, high = np.zeros((2, queries.num_groups), np.int64)
    return Neighbourhood(low, high, leaf_families(hierarchy).nodes.new_empty(queries.num_groups, 1, 0), None)


def _ranges(
    queries: Queries, hierarchy: Hierarchy, families: LeafFamilies, near: int, limit: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of families, low and high, of every group."""
    anchor = anchors(queries, limit)
    low, high = np.zeros((2, queries.num_groups), np.int64)
    sizes = np.diff(queries.host_offsets)
    filled = np.flatnonzero(sizes > 0)
    if anchor is None or len(families.nodes) == 0 or len(filled) == 0:
        return low, high
    leaf = anchor.cpu().numpy()
    tree = np.repeat(queries.host_tree, sizes)
    sees = leaf >= hierarchy.structure.leaf_offsets[tree]  # a query that may see no key has no neighbourhood
    leaf = np.where(sees, leaf, 0)
    own, before = families.own[leaf], families.before[leaf]
    first = np.where(own < 0, before, own) - near
    last = np.where(own < 0, before, own + 1) + (near if limit is None else 0)  # later families are not visible
    first = np.where(sees, np.maximum(first, families.tree_offsets[tree]), len(families.nodes))
    last = np.where(sees, np.minimum(last, families.tree_offsets[tree + 1]), 0)
    starts = queries.host_offsets[filled]
    low[filled], high[filled] = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
    empty = high <= low
    low[empty], high[empty] = 0, 0
    return low, high


def _range_table(low: np.ndarray, high: np.ndarray, families: LeafFamilies) -> Tensor:
    """Return `[groups, 1, width]` the nodes of the families from low to high − 1, padded with −1."""
    device = families.nodes.device
    width = int((high - low).max(initial=0))
    number = torch.as_tensor(low).to(device)[:, None] + torch.arange(width, device=device)
    inside = number < torch.as_tensor(high).to(device)[:, None]
    nodes = torch.cat([families.nodes, families.nodes.new_full((1,), -1)])
    return nodes[number.where(inside, len(families.nodes))][:, None]
