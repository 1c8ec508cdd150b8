"""`select`: the choice of the leaf families that each group of queries attends to leaf by leaf.

The neighbourhood of a group (`neighbourhood.py`) is always selected. The `top_k` best of the other families join it, by

    score(F) = Σ over the queries of the group of softmax over the candidates of the logit of F's pooled key

The search scores all candidates, or descends from the root with a beam. Gradients do not flow through a selection.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.checks import check_count, check_inputs, check_positions, check_type, scale_or_default
from hsa.attention.dispatch import Backend
from hsa.attention.kernels import available
from hsa.attention.multiscale.call import SelectCall
from hsa.attention.multiscale.cluster import KeyClusters, check_clusters
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.neighbourhood import empty_neighbourhood, neighbourhood
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.search import search
from hsa.attention.multiscale.selection import Selection
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.multiscale.why_not import why_not_triton_search
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

EXACT_FAMILIES = {"cuda": 1024, "cpu": 4096}
"""Maximum number of leaf families per tree that are all scored by default: where that is as fast as a beam.

Larger trees are searched with a beam, and so are causal ones of any size: the families that a query selects must not
depend on the final length of its tree.
"""


def _search_triton(call: SelectCall) -> tuple[Tensor, Tensor | int]:
    from hsa.attention.multiscale.triton.operator import search

    with available.device_of(call.q):
        return search(call)


SELECT: tuple[Backend[SelectCall, tuple[Tensor, Tensor | int]], ...] = (
    Backend("triton", _search_triton, why_not_triton_search),
    Backend("torch", search),
)


@torch.no_grad()
@torch.compiler.disable
def select(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    hierarchy: Hierarchy,
    *,
    queries: Queries | None = None,
    near: int = 0,
    top_k: int = 0,
    beam: int | str | None = None,
    clusters: KeyClusters | None = None,
    positions: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Selection:
    """Select the leaf families that each group of queries attends to exactly.

    Pass the result to `multiscale_attention(selection=…)`. Each group selects its own leaf family, the `near` families
    on each side, and, per head, the `top_k` other families that its queries score highest.

    Args:
        q, k: Queries `[queries, heads, dim]` and keys `[leaves, kv_heads, dim]`, as for `multiscale_attention`.
        hierarchy: Forest of the keys.
        queries: Groups of queries that share a selection. By default one group per leaf family; with `causal` and
            `top_k` one per query, because a selection shared with later queries would leak them.
        near: Number of neighbouring leaf families on each side.
        top_k: Number of further families, chosen by the queries of the group, per head.
        beam: Width of the search from the root down; "exact" scores every family. None means a beam of max(32, 2·top_k)
            for causal queries and for trees of more than 1,024 leaf families (4,096 on a CPU), and "exact" otherwise.
        clusters: Result of `cluster_keys`. Clustered leaf families have no neighbours, so `near` must be 0; `causal` must
            be False.
        positions, causal, scale: See `multiscale_attention`.
        backend: "auto", "triton" (CUDA) or "torch".

    Returns:
        The selected families, with the groups and clusters they were made for.

    Raises:
        InvalidInput: Arguments that do not fit together, or a selection that would leak later queries.

    >>> q, k = torch.randn(2, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> selection = select(q, k, tree, near=1, top_k=2)
    >>> selection.families.shape  # groups, heads, own + 2 near + 2 best
    torch.Size([16, 2, 5])
    """
    check_type("queries", queries, Queries, "See hsa.Queries")
    check_type("clusters", clusters, KeyClusters, "Use hsa.cluster_keys(k, hierarchy)")
    check_inputs({"k": k}, hierarchy)
    near, top_k, beam = _check_counts(near, top_k, beam)
    if clusters is not None:
        check_clusters(clusters, k, hierarchy, near=near, positions=positions, causal=causal, queries=queries)
    are_leaves = queries is None
    queries = _check_queries(queries, hierarchy, top_k, causal)
    check_inputs({"q": q, "k": k}, hierarchy, rows=None if are_leaves else {"q": queries.num_queries})
    positions = check_positions(positions, q, hierarchy)
    if positions is not None:
        queries.check_one_family(hierarchy)
    forest, positions = rooted(hierarchy, positions)
    limit = key_limit(queries, forest, causal)
    always = neighbourhood(queries, forest, near, limit) if clusters is None else empty_neighbourhood(queries, forest)
    families = leaf_families(forest)
    scale = scale_or_default(scale, q)
    if top_k == 0 or len(q) == 0 or len(families.nodes) == 0:
        return Selection(always.nodes, queries, 0, limit, clusters, hierarchy.digest)
    widest = int(np.diff(families.tree_offsets).max())
    top_k = min(top_k, widest)
    exact = beam == "exact" or (beam is None and limit is None and widest <= EXACT_FAMILIES.get(q.device.type, 4096))
    call = SelectCall(
        q=q,
        k=k,
        hierarchy=forest,
        queries=queries,
        neighbourhood=always,
        clusters=clusters,
        positions=positions,
        limit=limit,
        top_k=top_k,
        width=None if exact else int(beam) if isinstance(beam, int) else default_width(top_k),
        scale=scale,
        backend=backend,
    )
    best, counted = dispatch.run("select", SELECT, call)
    both = torch.cat([always.nodes.expand(-1, q.shape[1], -1), best], -1)
    return Selection(both, queries, counted, limit, clusters, hierarchy.digest)


def default_width(top_k: int) -> int:
    """Return the default width of a beam that searches for `top_k` families."""
    return max(32, 2 * top_k)


def _check_queries(queries: Queries | None, hierarchy: Hierarchy, top_k: int, causal: bool) -> Queries:
    if queries is None:
        return Queries.windows(hierarchy, 1) if causal and top_k else Queries.families(hierarchy)
    queries = queries.checked(hierarchy)
    if causal and top_k and (np.diff(queries.host_offsets) > 1).any():
        raise InvalidInput(
            "queries",
            got="groups of several queries",
            expected="one query per group, with causal=True and top_k",
            fix="A shared selection would leak later queries; use Queries.windows(hierarchy, 1)",
        )
    return queries


def _check_counts(near: int, top_k: int, beam: int | str | None) -> tuple[int, int, int | str | None]:
    families = "a number of leaf families, 0 or more"
    near, top_k = check_count("near", near, families), check_count("top_k", top_k, families)
    if beam is None or (isinstance(beam, str) and beam == "exact"):
        return near, top_k, beam
    least = max(top_k, 1)
    return near, top_k, check_count("beam", beam, f"'exact', None, or a width of at least {least} (top_k)", least)
