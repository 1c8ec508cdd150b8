"""The search for the best leaf families of every group of queries, by kernels."""

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
    """Return the rows of the best leaf families, best first and then −1, and the number of products per search.

    Args:
        q: [queries, heads, dim].
        keys: [kv_heads, rows, dim], the pyramid of the keys.
        group_offsets, group_tree: [groups + 1], [groups], as in `Queries`.
        near_low, near_high: [groups] range of families that are selected anyway, (0, 0) for none; None: no group has any.
        limit: [queries] candidates end before this leaf number; None: anywhere.
        top_k: Number of families to select.
        width: Candidates to keep on the way, at least `top_k`; None: the exact search, which scores all families.
        most_queries: Queries of the largest group.

    Returns:
        [groups, heads, top_k] int32; [groups, heads] int32.
    """
    groups = (group_offsets, group_tree, near_low, near_high, limit, scale, top_k)
    if width is None:
        families = (tables.family_rows, tables.family_start, tables.tree_families)
        return exact.operator(q, keys, tables.rows, *families, *groups, most_queries)
    near = near_low is not None
    paths = tables.paths if near else tables.paths[:, :0]
    sizes = (width, most_queries, beam.num_parents(tables, width, near), tables.most_slots, tables.first_root)
    return beam.operator(q, keys, tables.rows, paths, *groups, *sizes)
