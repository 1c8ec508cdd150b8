"""Visibility: the number of keys of its tree that each query may see, in leaf order."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


def key_limit(queries: Queries, hierarchy: Hierarchy, causal: bool) -> Tensor | None:
    """Return `[queries]` the end of the keys that each query may see, as a leaf number; None for no limit."""
    if queries.visible is not None:
        return hierarchy.tensor("leaf_offsets")[queries.tree][queries.group] + queries.visible
    if not causal:
        return None
    if queries.leaves is None:
        raise InvalidInput(
            "causal",
            got="neither",
            expected="queries with `visible` or `leaves`",
            fix="Pass the number of keys that each query may see: Queries(offsets, tree, visible=…)",
        )
    return queries.leaves + 1


def anchors(queries: Queries, limit: Tensor | None) -> Tensor | None:
    """Return `[queries]` the leaf at which each query is: its own, or the last it may see; None if it has neither."""
    if queries.leaves is not None:
        return queries.leaves
    return None if limit is None else limit - 1
