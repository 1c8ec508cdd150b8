"""Three-way attention: queries attend to pairs of leaves."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from hsa.attention.checks import check_count, check_inputs, check_type, scale_or_default, without_autocast
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.errors import InvalidInput
from hsa.research.decomposition import CP
from hsa.research.trilinear import dense, streaming
from hsa.research.trilinear.causal_tree import own_rows
from hsa.research.trilinear.forms import check_form, core_dim, is_full, to_core
from hsa.research.trilinear.hierarchical import tied_rows
from hsa.tree.hierarchy import Hierarchy


def _run_triton(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    hierarchy: Hierarchy,
    *,
    first: Hierarchy,
    second: Hierarchy,
    tensor: None,
    left: int | None,
    right: int | None,
    scale: float,
) -> Tensor:
    from hsa.research.trilinear.triton.operator import trilinear_core

    del tensor  # q, k1 and k2 are in core form
    offsets = (forest.tensor("leaf_offsets") for forest in (hierarchy, first, second))
    with available.device_of(q):
        return trilinear_core(q, k1, k2, v1, v2, *offsets, left=left, right=right, scale=scale)


def _why_not_triton(arguments: dict[str, Any]) -> list[str]:
    q, tensor = arguments["q"], arguments["tensor"]
    core = q[..., :1].expand(*q.shape[:2], core_dim(q, tensor))
    reasons = available.why_not(core, arguments["v1"], arguments["backend"], available.WIDEST_THREE_WAY)
    if is_full(tensor):
        reasons.append("it takes the core only: T must be a diagonal, a CP or None")
    if arguments["hierarchy"].num_leaves == 0:
        reasons.append("there are no leaves")
    return reasons


TRILINEAR = (
    Backend("triton", _run_triton, _why_not_triton),
    Backend("streaming", streaming.trilinear_attention),
    Backend("dense", dense.trilinear_attention, dense.why_not),
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
    """Softmax attention of every query over all pairs (j, k) of leaves of its tree.

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
            `[heads, dim, dim, dim]`; or an `hsa.research.decomposition.CP` with factors `[rank, dim]` or `[heads, rank, dim]`.
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
    left, right = limits(hierarchy, first, second, causal, window)
    first, second = first or hierarchy, second or hierarchy
    _check_rows(q, k1, k2, v1, v2, hierarchy, first, second)
    check_form(tensor, q)
    scale = scale_or_default(scale, q)
    asked_of_backend = {
        "q": q,
        "v1": v1,
        "hierarchy": hierarchy,
        "first": first,
        "second": second,
        "tensor": tensor,
        "backend": backend,
    }
    chosen = choose("trilinear_attention", TRILINEAR, backend, asked_of_backend)
    with without_autocast(q):
        q, k1, k2, full = to_core(q, k1, k2, tensor)
        return chosen.run(
            q, k1, k2, v1, v2, hierarchy, first=first, second=second, tensor=full, left=left, right=right, scale=scale
        )


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
    """Three-way attention on a tree: each leaf attends to pairs of its siblings, and through its ancestors to theirs.

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
        causal: nothing later is used, at all. Then every leaf has its own row, `mean(q, A)` becomes q_i, and its pairs
            are those of the siblings before it at every ancestor, in one softmax: O(leaves · depth · size²).
        scale: of the logits; 1/√dim by default.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit; a CP of more than dim² terms.

    >>> import torch
    >>> q, k1, k2, v1, v2 = torch.randn(5, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> hierarchical_trilinear_attention(q, k1, k2, v1, v2, Hierarchy.from_nested([[3, 2], [4]])).shape
    torch.Size([9, 2, 4])
    """
    _check_rows(q, k1, k2, v1, v2, hierarchy, hierarchy, hierarchy)
    check_form(tensor, q)
    scale = scale_or_default(scale, q)
    with without_autocast(q):
        q, k1, k2, full = to_core(q, k1, k2, tensor)
        attend = own_rows if causal else tied_rows
        return attend(q, k1, k2, v1, v2, hierarchy, tensor=full, scale=scale)


def limits(
    hierarchy: Hierarchy, first: Hierarchy | None, second: Hierarchy | None, causal: bool, window: int | None
) -> tuple[int | None, int | None]:
    """How far before and after a query a leaf may lie; None for no limit."""
    if window is not None:
        window = check_count("window", window, "1 or more leaves to each side, the query's own included", minimum=1)
    elif not causal:
        return None, None
    for name, other in (("first", first), ("second", second)):
        if other is not None and other is not hierarchy:
            raise InvalidInput(
                name,
                given="another set of leaves, with causal or window",
                expected="the queries' own, None",
                fix="before, after and near have a meaning inside one sequence only: leave causal and window out",
            )
    reach = None if window is None else window - 1
    return reach, 0 if causal else reach


def check_trees(hierarchy: Hierarchy, first: Hierarchy, second: Hierarchy) -> None:
    """Each set has as many trees."""
    for name, forest in (("first", first), ("second", second)):
        if forest.num_trees != hierarchy.num_trees:
            raise InvalidInput(
                name,
                given=f"{forest.num_trees} trees",
                expected=f"{hierarchy.num_trees}, as the hierarchy of q",
                fix="tree t of the queries sees the pairs of tree t of both other sets",
            )


def _check_rows(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    hierarchy: Hierarchy,
    first: Hierarchy,
    second: Hierarchy,
) -> None:
    """All fit their forests and each other."""
    check_inputs({"q": q}, hierarchy)
    check_inputs({"k1": k1, "v1": v1}, first)
    check_inputs({"k2": k2, "v2": v2}, second)
    check_trees(hierarchy, first, second)
    heads, dim = q.shape[1:]
    for name, x, width, of in (("k1", k1, dim, "q"), ("k2", k2, dim, "q"), ("v2", v2, v1.shape[2], "v1")):
        if x.shape[2] != width:
            raise InvalidInput(name, given=f"a width of {x.shape[2]}", expected=f"{width}, as {of}")
    for name, x in (("k1", k1), ("k2", k2), ("v1", v1), ("v2", v2)):
        if x.shape[1] != heads:
            raise InvalidInput(name, given=f"{x.shape[1]} heads", expected=f"{heads}, as q")
        if x.dtype != q.dtype:
            raise InvalidInput(
                name, given=f"dtype {x.dtype}", expected=f"{q.dtype}, as q", fix="cast them to one dtype"
            )
        if x.device != q.device:
            raise InvalidInput(name, given=f"device {x.device}", expected=f"{q.device}, as q")
