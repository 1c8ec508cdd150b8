"""Search for the best leaf families of every group of queries, with kernels."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.multiscale.triton import beam, exact
from hsa.attention.multiscale.triton.ranking import SearchTables


def search_families(
    q: Tensor,
    keys: Tensor,
    tables: SearchTables,
    group_offsets: Tensor,
    group_tree: Tensor,
    near_low: Tensor | None,
    near_high: Tensor | None,
    *,
    limit: Tensor | None,
    scale: float,
    top_k: int,
    width: int | None,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    """Return the rows of the best leaf families `[groups, heads, top_k]`, and the number of products `[groups, heads]`.

    Rows are in descending order of score, padded with −1. Both results are int32.

    Args:
        q: `[queries, heads, dim]` queries.
        keys: `[kv_heads, rows, dim]` pyramid of the keys.
        tables: Tables of the forest.
        group_offsets, group_tree: `[groups + 1]`, `[groups]`, as in `Queries`.
        near_low, near_high: `[groups]` range of families that are selected anyway, (0, 0) if empty; None if all are.
        limit: `[queries]` leaf number at or before which the leaves of a candidate must end; None for no limit.
        scale: Factor of the dot products.
        top_k: Number of families to select.
        width: Number of candidates to keep in each round of the beam search, at least `top_k`; None to score all families.
        most_queries: Number of queries of the largest group.
    """
    groups = (group_offsets, group_tree, near_low, near_high, limit, scale, top_k)
    if width is None:
        families = (tables.family_rows, tables.family_start, tables.tree_families)
        return exact.operator(q, keys, tables.rows, *families, *groups, most_queries)
    near = near_low is not None
    paths = tables.paths if near else tables.paths[:, :0]
    sizes = (width, most_queries, beam.num_parents(tables, width, near), tables.most_slots, tables.first_root)
    return beam.operator(q, keys, tables.rows, paths, *groups, *sizes)
