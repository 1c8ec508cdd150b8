"""Multiscale attention: every query keeps its own row, exact near by, pooled far away."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention.arguments import check_inputs, check_positions, scale_or_default, without_autocast
from hsa.attention.dispatch import Backend, choose, only_softmax
from hsa.attention.multiscale import gathered, reference
from hsa.attention.multiscale.choice import check_key_order_options, open_families
from hsa.attention.multiscale.find_keys import KeyOrder
from hsa.attention.multiscale.partition import Opened
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.hierarchy import Hierarchy


def _run_gathered(q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, *, opened: Opened, **options: Any) -> Tensor:
    return gathered.multiscale_attention(q, k, v, hierarchy, partition=opened.partition(hierarchy), **options)


MULTISCALE = (
    Backend("torch", _run_gathered, only_softmax),
    Backend("reference", reference.multiscale_attention, only_softmax),
)


def multiscale_attention(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    v: Float[Tensor, "leaves kv_heads value_dim"],
    hierarchy: Hierarchy,
    *,
    queries: Queries | None = None,
    opened: Opened | None = None,
    key_order: KeyOrder | None = None,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: bool = False,
    normalizer: Any = "softmax",
    pooled_bias: float | Tensor = 0.0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_dim"]:
    """Softmax attention of every query over its own list of nodes, which together hold every key once.

        logit(i→B) = scale · q_i · mean(k, B) + log leaf_count(B) + ε(i')·ε(B') [+ pooled_bias if B is no leaf]
        out(i)     = softmax over the list, applied to mean(v, B)

    i' and B' are the highest distinct ancestors of i and B. For its lists this is the closest matrix to softmax attention;
    with every family open it is softmax attention.

    Args:
        q: one row per query; without `queries`, per leaf.
        k, v: one row per leaf. Key/value heads may be fewer than query heads; v may have another width.
        hierarchy: the forest of the keys.
        queries: another set of queries (cross-attention, a decode step); by default the leaves themselves.
        opened: from `open_families`: which leaf families are exact. By default each leaf's own.
        key_order: from `find_key_order`: the keys' places in the tree, per key/value head. Needs `opened`.
        positions: ε, one row per node: `[nodes, dim]` or `[nodes, heads, dim]`.
        include_self: False hides each leaf from itself.
        causal: drop every node that is not wholly at or before the query. Nothing later is used, at all.
        normalizer: "softmax".
        pooled_bias: added to the logits of pooled nodes, a number or one per head: 0 is closest to softmax, −∞ drops them.
        dropout_p: dropout on (query, node) weights.
        scale: of the dot products; 1/√head_dim by default.
        backend: "auto", "torch" or "reference".

    Raises:
        InvalidInput: shapes, dtypes, devices or heads that do not fit; options without meaning under a key order.

    >>> q, k, v = torch.randn(3, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> opened = open_families(q, k, tree, near=1, refine=2)
    >>> multiscale_attention(q, k, v, tree, opened=opened).shape
    torch.Size([64, 2, 8])
    """
    asked = opened.queries if opened is not None else queries
    if queries is not None and opened is not None and queries is not opened.queries:
        raise InvalidInput(
            "queries", given="other queries than those of opened", expected="the same object", fix="leave queries out"
        )
    num_queries = hierarchy.num_leaves if asked is None else asked.checked(hierarchy).num_queries
    check_inputs({"q": q, "k": k, "v": v}, hierarchy, rows={"q": num_queries})
    positions = check_positions(positions, q, hierarchy)
    _check_options(hierarchy, asked, opened, key_order, positions, include_self, dropout_p, k)
    if opened is None and queries is None:
        opened = hierarchy.cached("own families", lambda: open_families(q, k, hierarchy))
    elif opened is None:
        opened = open_families(q, k, hierarchy, queries=queries, causal=causal)
    chosen = choose("multiscale_attention", MULTISCALE, backend, {"normalizer": normalizer})
    hierarchy, positions = rooted(hierarchy, positions)
    options = {
        "opened": opened,
        "limit": key_limit(opened.queries, hierarchy, causal),
        "key_order": key_order,
        "positions": positions,
        "include_self": include_self,
        "pooled_bias": _per_head(pooled_bias, q),
        "dropout_p": dropout_p,
        "scale": scale_or_default(scale, q),
    }
    with without_autocast(q):
        return chosen.run(q, k, v, hierarchy, **options)


def _per_head(pooled_bias: float | Tensor, q: Tensor) -> Tensor:
    bias = torch.as_tensor(pooled_bias, device=q.device)
    bias = bias if bias.is_floating_point() else bias.to(torch.float32)
    if bias.ndim > 1 or (bias.ndim == 1 and len(bias) not in (1, q.shape[1])):
        raise InvalidInput(
            "pooled_bias", given=f"shape {tuple(bias.shape)}", expected=f"a number or ({q.shape[1]},), one per head"
        )
    return bias.reshape(-1)


def _check_options(
    hierarchy: Hierarchy,
    asked: Queries | None,
    opened: Opened | None,
    key_order: KeyOrder | None,
    positions: Tensor | None,
    include_self: bool,
    dropout_p: float,
    k: Tensor,
) -> None:
    if not 0 <= dropout_p < 1:
        raise InvalidInput("dropout_p", given=dropout_p, expected="0 or more and less than 1")
    if key_order is not None:
        check_key_order_options(positions=positions, include_self=include_self)
        if key_order.order.shape != (k.shape[1], len(k)):
            raise InvalidInput(
                "key_order",
                given=f"shape {tuple(key_order.order.shape)}",
                expected=f"[{k.shape[1]} key/value heads, {len(k)} leaves]",
                fix="find it from the same keys with hsa.find_key_order(k, hierarchy)",
            )
    if opened is None and (key_order is not None or (asked is not None and asked.leaves is None)):
        raise InvalidInput(
            "opened",
            given="None with a key order or with queries that are no leaves",
            expected="a choice: there is no own family",
            fix="pass opened=hsa.open_families(q, k, hierarchy, refine=…, …) with the same options",
        )
    if asked is not None and asked.leaves is None and (positions is not None or not include_self):
        raise InvalidInput(
            "queries",
            given="queries that are no leaves, with positions or include_self=False",
            expected="queries.leaves",
            fix="a query outside the tree has neither a place in it nor a self",
        )
    if positions is not None and asked is not None and asked.leaves is not None:
        parent = hierarchy.structure.parent[hierarchy.structure.leaf_nodes[asked.leaves.cpu().numpy()]]
        starts = asked.host_offsets[:-1][np.diff(asked.host_offsets) > 0]
        one_family = (
            len(starts) == 0 or (np.maximum.reduceat(parent, starts) == np.minimum.reduceat(parent, starts)).all()
        )
        if not one_family:
            raise InvalidInput(
                "queries",
                given="groups that span several leaf families, with positions",
                expected="groups inside one leaf family",
                fix="use Queries.families(hierarchy) or Queries.windows(hierarchy, 1)",
            )
