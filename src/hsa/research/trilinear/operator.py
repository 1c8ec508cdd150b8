"""Three-way attention: queries attend to pairs of leaves."""

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
        reasons.append("it takes the core only: T must be a diagonal, a CP or None")
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
    """Let every query attend to all pairs (j, k) of leaves of its tree.

        logit(i; j, k) = scale · Σ_abc T_abc q_ia k1_jb k2_kc
        out(i)         = softmax over pairs of logit(i; ·), applied to v1_j∘v2_k

    Time is cubic in the length of a tree; memory is that of the inputs. See `hierarchical_trilinear_attention` for trees.

    Args:
        q, k1, k2: one row per leaf, trees one after another.
        v1, v2: likewise; both have one width, which may be another.
        hierarchy: the forest of q's rows; only where trees begin and end matters.
        first, second: the forests of k1, v1 and of k2, v2, tree by tree, if they are others than q's (a question and
            two documents).
        tensor: T. None for Σ_a q_a k1_a k2_a; a diagonal `[dim]` or `[heads, dim]`; all of it, `[dim, dim, dim]` or
            `[heads, dim, dim, dim]`; or a `CP` of `hsa.research.decomposition` with factors `[rank, dim]` or
            `[heads, rank, dim]`.
        causal: only pairs with j ≤ i and k ≤ i.
        window: only pairs with |i − j| < window and |i − k| < window.
        scale: of the logits; 1/√dim by default.
        backend: "auto", "triton" (CUDA, every T but a full one), "streaming", or "dense" (everything at once, for small
            trees).

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit; a CP of more than dim² terms; forests with different
            numbers of trees; `causal` or `window` where the sets are not one.
        Unsupported: the backend cannot run this, such as "dense" where it would take too much memory.

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
    """Let each leaf attend to pairs of its siblings and, through its ancestors, to pairs of theirs.

    For siblings B and C of A (a leaf counts as its own sibling), with means over the leaves below them,

        logit(A; B, C) = scale · T(mean(q, A), mean(k1, B), mean(k2, C)) + log leaf_count(B) + log leaf_count(C)

    and rows are put together as in `hierarchical_attention`. A leaf sees the pairs (j, k) that meet it at the same node;
    pairs of different scales, j in its own sentence and k in another, are dropped. Values v1_j∘v2_k are bilinear, so that
    pooling them is exact. Time is O(Σ over families of size³). One family is `trilinear_attention`.

    Args:
        q, k1, k2: one row per leaf, trees one after another.
        v1, v2: likewise; both have one width, which may be another.
        hierarchy: the forest.
        tensor: T, as in `trilinear_attention`.
        causal: use nothing that comes later. Every leaf then has a row of weights: `mean(q, A)` becomes q_i, and its pairs
            are those of the siblings before it at every ancestor, in one softmax: O(leaves · depth · size²).
        scale: of the logits; 1/√dim by default.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit; a CP of more than dim² terms.

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
