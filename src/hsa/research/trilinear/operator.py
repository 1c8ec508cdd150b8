"""Three-way attention, in which queries attend to pairs of leaves."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hsa.attention.checks import check_type, scale_or_default, without_autocast
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.research.decomposition import CP
from hsa.research.trilinear import causal_hierarchical, dense, hierarchical, streaming
from hsa.research.trilinear.call import Forests, Rows, TrilinearCall, check_rows, limits
from hsa.research.trilinear.forms import check_form, core_dim, is_full
from hsa.tree.hierarchy import Hierarchy


def _run_triton(call: TrilinearCall) -> Tensor:
    from hsa.research.trilinear.triton.operator import trilinear_core

    offsets = tuple(forest.tensor("leaf_offsets") for forest in call.forests)
    return trilinear_core(call.rows, offsets, left=call.left, right=call.right, scale=call.scale)


def _why_not_triton(call: TrilinearCall) -> list[str]:
    q = call.rows.q
    core = q[..., :1].expand(*q.shape[:2], core_dim(q, call.tensor))
    reasons = available.why_not(core, call.rows.v1, call.backend, available.WIDEST_THREE_WAY)
    if is_full(call.tensor):
        reasons.append("it needs T to be a diagonal, a CP or None, not a full tensor")
    if call.forests.queries.num_leaves == 0:
        reasons.append("there are no leaves")
    return reasons


TRILINEAR = (
    Backend("triton", _run_triton, _why_not_triton),
    Backend("streaming", streaming.run),
    Backend("dense", dense.run, dense.why_not),
)


def trilinear_attention(
    q: Float[Tensor, "queries heads dim"],
    k1: Float[Tensor, "first heads dim"],
    k2: Float[Tensor, "second heads dim"],
    v1: Float[Tensor, "first heads value_dim"],
    v2: Float[Tensor, "second heads value_dim"],
    hierarchy: Hierarchy,
    *,
    first: Hierarchy | None = None,
    second: Hierarchy | None = None,
    tensor: Tensor | CP | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "queries heads value_dim"]:
    """Compute attention of every query to all pairs (j, k) of leaves of its tree.

        logit(i; j, k) = scale · Σ_abc T_abc q_ia k1_jb k2_kc
        out(i)         = softmax over pairs of logit(i; ·), applied to v1_j∘v2_k

    Time is cubic in the length of a tree; memory is linear. See `hierarchical_trilinear_attention` for a faster operator.

    Args:
        q, k1, k2: `[leaves, heads, dim]` Query and keys, packed.
        v1, v2: `[leaves, heads, value_dim]` Values, packed.
        hierarchy: Forest of the rows of q. Only the lengths of its trees matter.
        first, second: Forests of k1, v1 and of k2, v2, with as many trees, if they differ from that of q (a question about
            two documents, for example).
        tensor: Tensor T: None for Σ_a q_a k1_a k2_a; a diagonal `[dim]` or `[heads, dim]`; a full tensor `[dim, dim, dim]`
            or `[heads, dim, dim, dim]`; or an `hsa.research.CP` with factors `[rank, dim]` or `[heads, rank, dim]`.
        causal: Whether to use only pairs with j ≤ i and k ≤ i.
        window: Limit of distances: only pairs with |i − j| < window and |i − k| < window are used. None for no limit.
        scale: Factor of the logits; 1/√dim by default.
        backend: "auto", "triton" (CUDA, any T but a full tensor), "streaming", or "dense" (all triples at once, for small
            trees).

    Returns:
        `[leaves of q, heads, value_dim]` A row per query.

    Raises:
        InvalidInput: If shapes, dtypes or devices do not match, a CP has more than dim² terms, forests have different
            numbers of trees, or `causal` or `window` is used with several forests.
        Unsupported: If the backend cannot run the call, such as "dense" with too little memory.

    >>> import torch
    >>> q, k1, k2, v1, v2 = torch.randn(5, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> trilinear_attention(q, k1, k2, v1, v2, Hierarchy.flat([5, 4]), causal=True).shape
    torch.Size([9, 2, 4])
    """
    check_type("first", first, Hierarchy, "the forest of k1 and v1, or None for that of q")
    check_type("second", second, Hierarchy, "the forest of k2 and v2, or None for that of q")
    rows, forests = Rows(q, k1, k2, v1, v2), Forests(hierarchy, first or hierarchy, second or hierarchy)
    left, right = limits(forests, causal, window)
    check_rows(rows, forests)
    check_form(tensor, q)
    call = TrilinearCall(rows, forests, tensor, scale_or_default(scale, q), left, right, backend)
    chosen = choose("trilinear_attention", TRILINEAR, backend, call)
    with without_autocast(q):
        return chosen.run(call.in_core_form())


def hierarchical_trilinear_attention(
    q: Float[Tensor, "leaves heads dim"],
    k1: Float[Tensor, "leaves heads dim"],
    k2: Float[Tensor, "leaves heads dim"],
    v1: Float[Tensor, "leaves heads value_dim"],
    v2: Float[Tensor, "leaves heads value_dim"],
    hierarchy: Hierarchy,
    *,
    tensor: Tensor | CP | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "leaves heads value_dim"]:
    """Compute attention of each leaf to pairs of its siblings and, through its ancestors, to pairs of their siblings.

    For siblings B and C of A (a leaf counts as its own sibling), with means over the leaves below them,

        logit(A; B, C) = scale · T(mean(q, A), mean(k1, B), mean(k2, C)) + log leaf_count(B) + log leaf_count(C)

    and rows are combined as in `hierarchical_attention`. A leaf sees the pairs (j, k) that meet it at the same node; pairs
    of different scales, such as j in its own sentence and k in another, are dropped. Values v1_j∘v2_k are bilinear, so
    pooling them is exact. Time is O(Σ over families of size³). For a single family, this is `trilinear_attention`.

    Args:
        q, k1, k2: `[leaves, heads, dim]` Query and keys, packed.
        v1, v2: `[leaves, heads, value_dim]` Values, packed.
        hierarchy: Forest of the leaves.
        tensor: Tensor T, as in `trilinear_attention`.
        causal: Whether to use only earlier leaves. Each leaf then has its own row of weights: q_i replaces `mean(q, A)`, and
            one softmax runs over the pairs of siblings before it at all ancestors. Time is O(leaves · depth · size²).
        scale: Factor of the logits; 1/√dim by default.

    Returns:
        `[leaves, heads, value_dim]` A row per leaf.

    Raises:
        InvalidInput: If shapes, dtypes or devices do not match, or a CP has more than dim² terms.

    >>> import torch
    >>> q, k1, k2, v1, v2 = torch.randn(5, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> hierarchical_trilinear_attention(q, k1, k2, v1, v2, Hierarchy.from_nested([[3, 2], [4]])).shape
    torch.Size([9, 2, 4])
    """
    rows, forests = Rows(q, k1, k2, v1, v2), Forests(hierarchy, hierarchy, hierarchy)
    check_rows(rows, forests)
    check_form(tensor, q)
    call = TrilinearCall(rows, forests, tensor, scale_or_default(scale, q))
    with without_autocast(q):
        return (causal_hierarchical if causal else hierarchical).run(call.in_core_form())
