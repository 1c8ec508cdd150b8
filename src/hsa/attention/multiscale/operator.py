"""Multiscale attention: every query keeps its own row, exact near by, pooled far away."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.checks import check_inputs, check_positions, check_type, scale_or_default
from hsa.attention.dispatch import Backend
from hsa.attention.kernels import available
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.attention.multiscale import reference, torch_lists
from hsa.attention.multiscale.call import MultiscaleCall
from hsa.attention.multiscale.cluster import KeyClusters, check_chunked, check_clusters
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.select import select
from hsa.attention.multiscale.selection import Selection
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.multiscale.why_not import why_not_triton
from hsa.attention.normalizers import Entmax, resolve_normalizer
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


def _run_triton(call: MultiscaleCall) -> Tensor:
    from hsa.attention.multiscale.triton.operator import attend

    with available.device_of(call.q):
        return attend(call)


MULTISCALE = (
    Backend("triton", _run_triton, why_not_triton),
    Backend("torch", torch_lists.attend),
    Backend("reference", reference.attend),
)


def multiscale_attention(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    v: Float[Tensor, "leaves kv_heads value_dim"],
    hierarchy: Hierarchy,
    *,
    queries: Queries | None = None,
    selection: Selection | None = None,
    clusters: KeyClusters | None = None,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: bool = False,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    pooled_bias: float | Tensor = 0.0,
    mixing: HeadMixing | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_dim"]:
    """Attention of every query over a list of nodes that together hold every key once.

        logit(i→B) = scale · q_i · mean(k, B) + log leaf_count(B) + ε(i')·ε(B') [+ pooled_bias if B is no leaf]
        out(i)     = softmax over the list, applied to mean(v, B)

    i' and B' are the highest distinct ancestors of i and B. For given lists this is the closest matrix to softmax attention;
    with every family selected it is softmax attention. `normalizer=Entmax(…)` is the same for sparse attention: leaf counts
    are then weights of the entries in place of log leaf_count.

    Args:
        q: one row per query; without `queries`, per leaf.
        k, v: one row per leaf. Key/value heads may be fewer than query heads; v may have another width.
        hierarchy: the forest of the keys.
        queries: another set of queries (cross-attention, a decode step); by default the leaves themselves.
        selection: from `select`: which leaf families are exact. By default each leaf's own.
        clusters: from `cluster_keys`: the order of the keys in the tree, per key/value head. Needs `selection`.
        positions: ε, one row per node: `[nodes, dim]` or `[nodes, heads, dim]`.
        include_self: whether leaves attend to themselves.
        causal: drop every node that is not wholly at or before the query. Nothing later is used: this does not leak.
        normalizer: "softmax", or an `hsa.Entmax`. If it has an α per level, a node takes that of the family it is a member
            of.
        pooled_bias: added to the logits of pooled nodes, a number or one per head: 0 is closest to softmax, −∞ drops them.
        mixing: talking heads: logits are mixed across heads before the softmax, weights after it. All heads must have the
            same lists: no selection per head and no clusters.
        dropout_p: dropout on (query, node) weights.
        scale: factor of the dot products; 1/√head_dim by default.
        backend: "auto", "triton" (CUDA), "torch" or "reference".

    Raises:
        InvalidInput: shapes, dtypes, devices or heads do not fit; options that have no meaning for clustered keys.
        NonFinite: entmax of a logit that is +∞ or no number, inside `hsa.checking`.

    >>> q, k, v = torch.randn(3, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> selection = select(q, k, tree, near=1, top_k=2)
    >>> multiscale_attention(q, k, v, tree, selection=selection).shape
    torch.Size([64, 2, 8])
    """
    check_type("queries", queries, Queries, "see hsa.Queries")
    check_type("selection", selection, Selection, "use hsa.select(q, k, hierarchy, …)")
    check_type("clusters", clusters, KeyClusters, "use hsa.cluster_keys(k, hierarchy)")
    given = selection.queries if selection is not None else queries
    check_inputs({"k": k, "v": v}, hierarchy)
    rows = None if given is None else {"q": given.checked(hierarchy).num_queries}
    check_inputs({"q": q, "k": k, "v": v}, hierarchy, rows)
    positions = check_positions(positions, q, hierarchy)
    if clusters is not None:
        check_clusters(clusters, k, hierarchy, positions=positions, include_self=include_self)
    _check_queries(hierarchy, queries, selection, clusters, positions, include_self)
    if selection is None and queries is None:
        selection = hierarchy.cached("own families", lambda: select(q, k, hierarchy))
    elif selection is None:
        selection = select(q, k, hierarchy, queries=queries, causal=causal)
    limit = key_limit(selection.queries, hierarchy, causal)
    _check_selection(hierarchy, selection, clusters, limit, q)
    check_mixing(mixing, q)
    _check_shared_lists(mixing, selection, clusters)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise InvalidInput("dropout_p", given=repr(dropout_p), expected="0 or more and less than 1")
    forest, positions = rooted(hierarchy, positions)
    call = MultiscaleCall(
        q=q,
        k=k,
        v=v,
        hierarchy=forest,
        selection=selection,
        limit=limit,
        clusters=clusters,
        positions=positions,
        include_self=include_self,
        pooled_bias=per_head(pooled_bias, q),
        mixing=mixing,
        entmax=resolve_normalizer(normalizer, q),
        dropout_p=dropout_p,
        scale=scale_or_default(scale, q),
        backend=backend,
    )
    return dispatch.run("multiscale_attention", MULTISCALE, call)


def _check_shared_lists(mixing: HeadMixing | None, selection: Selection, clusters: KeyClusters | None) -> None:
    if mixing is not None and (clusters is not None or selection.families.shape[1] > 1):
        raise InvalidInput(
            "mixing",
            given="heads with different lists (from top_k or clusters)",
            expected="heads that look at the same nodes: else there is nothing to mix entry by entry",
            fix="use select without top_k and without clusters, or hierarchical_attention",
        )


def per_head(pooled_bias: float | Tensor, q: Tensor) -> Tensor | None:
    """Return the bias as `[1 or heads]`; None for nothing to add."""
    if not isinstance(pooled_bias, Tensor):
        is_number = isinstance(pooled_bias, (int, float)) and not isinstance(pooled_bias, bool)
        if not is_number or not pooled_bias < math.inf:
            raise InvalidInput(
                "pooled_bias",
                given=repr(pooled_bias),
                expected="a number below +∞ (−∞ drops pooled nodes), or a tensor",
            )
        if pooled_bias == 0:
            return None
        return torch.full((1,), float(pooled_bias), dtype=torch.float32, device=q.device)
    bias = pooled_bias.to(q.device)
    bias = bias if bias.is_floating_point() else bias.to(torch.float32)
    if bias.ndim > 1 or (bias.ndim == 1 and len(bias) not in (1, q.shape[1])):
        raise InvalidInput(
            "pooled_bias", given=f"shape {tuple(bias.shape)}", expected=f"a number or ({q.shape[1]},), one per head"
        )
    return bias.reshape(-1)


def _check_queries(
    hierarchy: Hierarchy,
    queries: Queries | None,
    selection: Selection | None,
    clusters: KeyClusters | None,
    positions: Tensor | None,
    include_self: bool,
) -> None:
    """Check that queries, selection and options fit each other."""
    if queries is not None and selection is not None and queries is not selection.queries:
        raise InvalidInput(
            "queries",
            given="other queries than those of the selection",
            expected="the same object",
            fix="leave queries out",
        )
    given = selection.queries if selection is not None else queries
    if selection is None and (clusters is not None or (given is not None and given.leaves is None)):
        raise InvalidInput(
            "selection",
            given="None with clusters or with queries that are no leaves",
            expected="a selection: there is no own family",
            fix="pass selection=hsa.select(q, k, hierarchy, top_k=…, …) with the same options",
        )
    if given is not None and given.leaves is None and not include_self:
        raise InvalidInput(
            "include_self",
            given="False for queries that are no leaves",
            expected="include_self=True",
            fix="a query outside the tree has no self in it",
        )
    if given is not None and positions is not None:
        given.check_one_family(hierarchy)


def _check_selection(
    hierarchy: Hierarchy, selection: Selection, clusters: KeyClusters | None, limit: Tensor | None, q: Tensor
) -> None:
    """Check that the selection was made for this hierarchy, these heads and clusters, and for no more than may be seen."""
    if selection.families.shape[1] not in (1, q.shape[1]):
        raise InvalidInput(
            "selection",
            given=f"a selection for {selection.families.shape[1]} heads",
            expected=f"1 or {q.shape[1]}, as q has",
        )
    check_chunked(clusters, limit)
    if selection.made_for is None:
        return
    same = "call hsa.select with the hierarchy, clusters and causal that attention gets"
    if selection.made_for != hierarchy.digest:
        raise InvalidInput("selection", given="one made for another hierarchy", expected="one for this", fix=same)
    if selection.clusters is not clusters:
        raise InvalidInput(
            "selection", given="one made with other clusters", expected="one made with the same object", fix=same
        )
    depends_on_queries = selection.depends_on_queries or clusters is not None
    if limit is not None and selection.limit is None and depends_on_queries:
        raise InvalidInput(
            "selection",
            given="one made with causal=False, for causal attention",
            expected="one that looks at nothing later",
            fix=same,
        )
