"""Multiscale attention: each query attends exactly to the keys that matter to it and to pooled nodes for the rest."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.checks import check_dropout, check_inputs, check_positions, check_type, scale_or_default
from hsa.attention.dispatch import Backend
from hsa.attention.kernels import available
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.attention.multiscale import reference, torch_lists
from hsa.attention.multiscale.call import MultiscaleCall
from hsa.attention.multiscale.cluster import KeyClusters, check_clusters
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
    near: int = 0,
    top_k: int = 0,
    beam: int | Literal["exact"] | None = None,
    causal: bool = False,
    clusters: KeyClusters | None = None,
    queries: Queries | None = None,
    selection: Selection | None = None,
    positions: Tensor | None = None,
    include_self: bool = True,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    pooled_bias: float | Tensor = 0.0,
    mixing: HeadMixing | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_dim"]:
    """Attend from every query to a list of nodes that together contain every key exactly once.

    The list of a query holds the leaves of the leaf families that are selected for it (its own, `near` neighbours on each
    side, the `top_k` best of the others) and the largest nodes that contain none of them. For query i and node B,

        logit(i→B) = scale · q_i · mean(k, B) + log leaf_count(B) + ε(i')·ε(B') [+ pooled_bias if B is not a leaf]
        out(i)     = softmax over the list, applied to mean(v, B)

    where i' and B' are the highest distinct ancestors of i and B. For given lists this is the closest matrix to softmax
    attention in KL divergence; with every family selected it is softmax attention. With `normalizer=Entmax(…)`, leaf
    counts weigh the entries in place of log leaf_count.

    Args:
        q: `[queries, heads, dim]`, one row per leaf unless `queries` is given.
        k: `[leaves, kv_heads, dim]`. There may be fewer key/value heads than query heads.
        v: `[leaves, kv_heads, value_dim]`.
        hierarchy: Forest of the keys.
        near: Number of neighbouring leaf families on each side to attend to exactly.
        top_k: Number of further leaf families to attend to exactly: the best for the queries of a group, per head.
        beam: Width of the search for them; see `select`.
        causal: Hide every node that is not entirely at or before the query. Nothing later leaks.
        clusters: Order of the keys in the tree, from `cluster_keys`. Leaf families are then groups of similar keys, and
            `top_k` must be positive. For causal attention over clustered keys, see `clustered_attention`.
        queries: Other queries than the leaves (cross-attention, a decoding step), or other groups of them.
        selection: The selected leaf families, from `select`, in place of `near`, `top_k` and `beam`: to share them between
            layers, count their cost or select by other means.
        positions: ε, `[nodes, dim]` or `[nodes, heads, dim]`.
        include_self: Whether leaves attend to themselves.
        normalizer: "softmax" or an `hsa.Entmax`. Where that has one α per level, a node takes the α of the family that it
            is a member of.
        pooled_bias: Number, or one per head, added to the logits of pooled nodes. 0 is closest to softmax; −∞ drops them.
        mixing: Talking heads: mix logits across heads before the softmax and weights after it. All heads need the same
            lists: neither `top_k` nor `clusters`.
        dropout_p: Dropout on the weights of (query, node) pairs.
        scale: Factor of the dot products, 1/√dim by default.
        backend: "auto", "triton" (CUDA), "torch" or "reference".

    Returns:
        `[queries, heads, value_dim]`.

    Raises:
        InvalidInput: Shapes, dtypes, devices or options do not fit each other.
        NonFinite: Inside `hsa.checking`, an entmax of a logit that is +∞ or NaN.

    >>> q, k, v = torch.randn(3, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> multiscale_attention(q, k, v, tree, near=1, top_k=2).shape
    torch.Size([64, 2, 8])

    In two steps, to look at the selection or to use it again:

    >>> selection = select(q, k, tree, near=1, top_k=2)
    >>> multiscale_attention(q, k, v, tree, selection=selection).shape
    torch.Size([64, 2, 8])
    """
    check_type("queries", queries, Queries, "See hsa.Queries")
    check_type("selection", selection, Selection, "Use hsa.select(q, k, hierarchy, …)")
    check_type("clusters", clusters, KeyClusters, "Use hsa.cluster_keys(k, hierarchy)")
    _check_selects_once(selection, near, top_k, beam)
    given = selection.queries if selection is not None else queries
    check_inputs({"k": k, "v": v}, hierarchy)
    rows = None if given is None else {"q": given.checked(hierarchy).num_queries}
    check_inputs({"q": q, "k": k, "v": v}, hierarchy, rows)
    positions = check_positions(positions, q, hierarchy)
    if clusters is not None:
        check_clusters(
            clusters, k, hierarchy, positions=positions, include_self=include_self, causal=causal, queries=given
        )
    _check_queries(hierarchy, queries, selection, clusters, positions, include_self, top_k, causal)
    if selection is None:
        options: dict[str, Any] = {"near": near, "top_k": top_k, "beam": beam, "clusters": clusters}
        options |= {"queries": queries, "positions": positions, "causal": causal, "scale": scale}
        if queries is None and clusters is None and not top_k:  # depends on the tree alone
            selection = hierarchy.cached(("selection", near, causal), lambda: select(q, k, hierarchy, **options))
        else:
            selection = select(q, k, hierarchy, **options)
    limit = key_limit(selection.queries, hierarchy, causal)
    _check_selection(hierarchy, selection, clusters, limit, q)
    check_mixing(mixing, q)
    _check_shared_lists(mixing, selection, clusters)
    check_dropout(dropout_p)
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


def _check_selects_once(selection: Selection | None, near: int, top_k: int, beam: Any) -> None:
    if selection is None:
        return
    for name, value in (("near", near), ("top_k", top_k), ("beam", beam)):
        if value:
            raise InvalidInput(
                name,
                expected="no value together with a selection",
                got=repr(value),
                fix=f"Pass {name} to hsa.select, or leave selection out",
            )


def _check_shared_lists(mixing: HeadMixing | None, selection: Selection, clusters: KeyClusters | None) -> None:
    if mixing is not None and (clusters is not None or selection.families.shape[1] > 1):
        raise InvalidInput(
            "mixing",
            expected="heads with the same lists of nodes, whose entries can be mixed",
            got="lists that differ between heads (from top_k or clusters)",
            fix="Leave out top_k and clusters, or use hierarchical_attention",
        )


def per_head(pooled_bias: float | Tensor, q: Tensor) -> Tensor | None:
    """Return the bias as `[1 or heads]`, or None if it is 0."""
    if not isinstance(pooled_bias, Tensor):
        is_number = isinstance(pooled_bias, (int, float)) and not isinstance(pooled_bias, bool)
        if not is_number or not pooled_bias < math.inf:
            raise InvalidInput(
                "pooled_bias",
                got=repr(pooled_bias),
                expected="a number below +∞ (−∞ drops pooled nodes), or a tensor",
            )
        if pooled_bias == 0:
            return None
        return torch.full((1,), float(pooled_bias), dtype=torch.float32, device=q.device)
    bias = pooled_bias.to(q.device)
    bias = bias if bias.is_floating_point() else bias.to(torch.float32)
    if bias.ndim > 1 or (bias.ndim == 1 and len(bias) not in (1, q.shape[1])):
        raise InvalidInput(
            "pooled_bias", got=f"shape {tuple(bias.shape)}", expected=f"a number or ({q.shape[1]},), one per head"
        )
    return bias.reshape(-1)


def _check_queries(
    hierarchy: Hierarchy,
    queries: Queries | None,
    selection: Selection | None,
    clusters: KeyClusters | None,
    positions: Tensor | None,
    include_self: bool,
    top_k: int,
    causal: bool,
) -> None:
    """Check that queries, selection and options fit each other."""
    if queries is not None and selection is not None and queries is not selection.queries:
        raise InvalidInput(
            "queries",
            expected="the queries of the selection",
            got="another object",
            fix="Leave queries out",
        )
    given = selection.queries if selection is not None else queries
    sees_all = not causal and (given is None or given.visible is None)
    is_outside = given is not None and given.leaves is None
    if selection is None and not top_k and sees_all and (clusters is not None or is_outside):
        what = "clustered keys" if clusters is not None else "queries that are not leaves"
        raise InvalidInput(
            "top_k",
            expected=f"1 or more for {what}: there is no own family to attend to exactly",
            got=repr(top_k),
            fix="Pass top_k=8, for example",
        )
    if is_outside and not include_self:
        raise InvalidInput(
            "include_self",
            expected="True for queries that are not leaves: they have no key of their own to leave out",
            got="False",
        )
    if given is not None and positions is not None:
        given.check_one_family(hierarchy)


def _check_selection(
    hierarchy: Hierarchy, selection: Selection, clusters: KeyClusters | None, limit: Tensor | None, q: Tensor
) -> None:
    """Check that the selection was made for this hierarchy, these heads and clusters, and respects causality."""
    if selection.families.shape[1] not in (1, q.shape[1]):
        raise InvalidInput(
            "selection",
            expected=f"a selection for 1 or {q.shape[1]} heads, as in q",
            got=f"one for {selection.families.shape[1]}",
        )
    if selection.made_for is None:
        return
    same = "Call hsa.select with the hierarchy, clusters and causal that attention gets"
    if selection.made_for != hierarchy.digest:
        raise InvalidInput("selection", expected="one made for this hierarchy", got="one for another", fix=same)
    if selection.clusters is not clusters:
        raise InvalidInput(
            "selection", expected="one made with the same clusters", got="one made with others", fix=same
        )
    if limit is not None and selection.limit is None and selection.depends_on_queries:
        raise InvalidInput(
            "selection",
            expected="one made with causal=True, for causal attention",
            got="one made with causal=False, which depends on later keys",
            fix=same,
        )
