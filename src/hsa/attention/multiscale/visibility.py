"""Visibility: how many keys of its tree a query may see, counted in the order of the leaves."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


def key_limit(queries: Queries, hierarchy: Hierarchy, causal: bool) -> Tensor | None:
    """[queries] keys before this leaf number may be seen; None: all."""
    if queries.visible is not None:
        return hierarchy.tensor("leaf_offsets")[queries.tree][queries.group] + queries.visible
    if not causal:
        return None
    if queries.leaves is None:
        raise InvalidInput(
            "causal",
            given="causal=True with queries that are no leaves",
            expected="queries.visible or queries.leaves",
            fix="say how many keys each query may see: Queries(offsets, tree, visible=…)",
        )
    return queries.leaves + 1


def anchors(queries: Queries, limit: Tensor | None) -> Tensor | None:
    """[queries] the leaf at which a query stands: itself, or the last key it may see; None: nowhere."""
    if queries.leaves is not None:
        return queries.leaves
    return None if limit is None else limit - 1
