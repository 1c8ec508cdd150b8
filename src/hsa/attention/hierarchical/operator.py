"""The paper's operator: softmax attention generalised to a tree, with tied rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.checks import check_inputs, check_positions, repeat_heads, scale_or_default
from hsa.attention.dispatch import Backend
from hsa.attention.hierarchical import reference, torch_sweeps
from hsa.attention.hierarchical.call import HierarchicalCall, repeated
from hsa.attention.hierarchical.entmax import reference as entmax_reference
from hsa.attention.hierarchical.entmax import torch_sweeps as entmax_sweeps
from hsa.attention.hierarchical.entmax.inside import inside_weights
from hsa.attention.hierarchical.family import FamilyAttention, FamilyAttentionName, family_attention_named
from hsa.attention.hierarchical.triton.plan import SIZES, tiles
from hsa.attention.hierarchical.why_not import (
    largest_family,
    why_not_alpha,
    why_not_reference,
    why_not_torch,
    why_not_triton,
)
from hsa.attention.kernels import available
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.attention.normalizers import Entmax, resolve_normalizer
from hsa.attention.rounds import rooted, rounds
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


def _run_triton(call: HierarchicalCall) -> Tensor:
    from hsa.attention.hierarchical.triton.operator import attend

    with available.device_of(call.q):
        return attend(call)


def _either(
    softmax: Callable[[HierarchicalCall], Tensor], entmax: Callable[[HierarchicalCall], Tensor]
) -> Callable[[HierarchicalCall], Tensor]:
    """Return a function that runs calls with softmax by the first function and calls with entmax by the second."""
    return lambda call: softmax(call) if call.entmax is None else entmax(call)


HIERARCHICAL = (
    Backend("triton", _run_triton, why_not_triton),
    Backend("torch", _either(torch_sweeps.attend, entmax_sweeps.attend), why_not_torch),
    Backend("reference", _either(reference.attend, entmax_reference.attend), why_not_reference),
)
ENERGY = (
    Backend("torch", _either(torch_sweeps.energy, entmax_sweeps.energy), why_not_torch),
    Backend("reference", _either(reference.energy, entmax_reference.energy), why_not_reference),
)


def hierarchical_attention(
    q: Float[Tensor, "leaves heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    v: Float[Tensor, "leaves kv_heads value_dim"],
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: Literal["paper-mask"] | None = None,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    family_attention: FamilyAttentionName | FamilyAttention = "exact",
    mixing: HeadMixing | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "leaves heads value_dim"]:
    """Compute hierarchical self-attention: each leaf attends to its siblings, and to the siblings of its ancestors.

    A node A attends to a sibling B with the logit

        logit(A→B) = scale · mean(q, A) · mean(k, B) + ε(A)·ε(B) + log leaf_count(B)

    where means are over the leaves below a node. Among all attention matrices whose entries are tied for each pair of
    siblings, this one is the closest to softmax attention in total KL divergence. The cost is O(families · size²). On a
    tree of a single family it is softmax attention.

    Args:
        q: Queries, one row per leaf, trees one after another, `[leaves, heads, dim]`.
        k: Keys, `[leaves, kv_heads, dim]`. `kv_heads` divides `heads` (grouped-query attention).
        v: Values, `[leaves, kv_heads, value_dim]`.
        hierarchy: Tree or forest over the leaves.
        positions: Position embedding ε of every node, `[nodes, dim]` or `[nodes, heads, dim]`.
        include_self: Whether leaves attend to themselves, as in transformers. The paper's experiments pass False.
        causal: "paper-mask" hides siblings to the right, as in the paper's appendix G.1. **It leaks** and is meant for
            study only: pooled queries and the masses inside a node average over later leaves, so that the weights of
            earlier leaves depend on them. For causal attention use `multiscale_attention(causal=True)`.
        normalizer: "softmax", or an `hsa.Entmax`, which gives small logits a weight of exactly 0.
        family_attention: Attention within a family: "exact", "flex" (FlexAttention), "linear" (random features;
            approximate, linear in the size of the family), or a function `(q, k, v, bias, mask, *, scale) → (out, lse)`
            as described in `hsa.attention.hierarchical.family`.
        mixing: Talking heads within every family. Logits are mixed across heads before the softmax, and whole rows after
            it: the weights of the siblings and the share that is passed down.
        scale: Factor of the dot products; 1/√dim by default.
        backend: "auto", "triton" (CUDA), "torch" or "reference".

    Returns:
        `[leaves, heads, value_dim]`, with zeros for a leaf that has nothing to attend to.

    Raises:
        InvalidInput: Shapes, dtypes, devices or heads do not match, or `causal` is combined with `include_self=False`.
        Unsupported: No backend can run this combination of arguments; the message says why.

    >>> import torch
    >>> q, k, v = torch.randn(3, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> tree = Hierarchy.from_nested([[3, 2], [4]])  # two documents: sentences of 3 and 2 tokens, and one of 4
    >>> hierarchical_attention(q, k, v, tree).shape
    torch.Size([9, 2, 4])
    """
    is_default = positions is None and causal is None and mixing is None
    is_default = is_default and normalizer == "softmax" and family_attention == "exact"
    if is_default and (out := repeated(q, k, v, hierarchy, include_self, scale, backend)) is not None:
        return out
    check_inputs({"q": q, "k": k, "v": v}, hierarchy)
    check_mixing(mixing, q)
    call = HierarchicalCall(
        q=q,
        k=repeat_heads(k, q.shape[1]),
        v=repeat_heads(v, q.shape[1]),
        hierarchy=hierarchy,
        positions=check_positions(positions, q, hierarchy),
        include_self=include_self,
        causal=check_paper_mask(causal, include_self),
        entmax=resolve_normalizer(normalizer, q),
        family_attention=family_attention_named(family_attention),
        mixing=mixing,
        scale=scale_or_default(scale, q),
        backend=backend,
    )
    return dispatch.run("hierarchical_attention", HIERARCHICAL, call)


def energy(
    q: Float[Tensor, "leaves heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: Literal["paper-mask"] | None = None,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    family_attention: FamilyAttentionName | FamilyAttention = "exact",
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "trees heads"]:
    """Return the energy whose gradient is hierarchical attention: minus the log-mass of every tree, `[trees, heads]`.

    In each tree, `dense_weights @ k = −(leaves / scale) · ∂energy/∂q`. A tree of one leaf that does not attend to itself
    has no mass; its energy is +∞.

    Args:
        q: Queries, `[leaves, heads, dim]`.
        k: Keys, `[leaves, kv_heads, dim]`.
        hierarchy: Tree or forest over the leaves.
        positions, include_self, causal, normalizer, family_attention, scale, backend: See `hierarchical_attention`.

    >>> import torch
    >>> q, k = torch.randn(2, 5, 3, 4).unbind(0)
    >>> logits = torch.einsum("ihd,jhd->hij", q, k) / 2
    >>> flat = -logits.logsumexp(-1).mean(-1)  # one family: minus the mean log-sum-exp
    >>> torch.allclose(energy(q, k, Hierarchy.flat([5]))[0], flat, atol=1e-6)
    True
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    k = repeat_heads(k, q.shape[1])
    call = HierarchicalCall(
        q=q,
        k=k,
        v=k[..., :0],
        hierarchy=hierarchy,
        positions=check_positions(positions, q, hierarchy),
        include_self=include_self,
        causal=check_paper_mask(causal, include_self),
        entmax=resolve_normalizer(normalizer, q),
        family_attention=family_attention_named(family_attention),
        scale=scale_or_default(scale, q),
        backend=backend,
    )
    return dispatch.run("energy", ENERGY, call)


def check_paper_mask(causal: Any, include_self: bool) -> bool:
    """Return whether the paper's mask, which hides siblings to the right, applies."""
    if causal is None:
        return False
    if not isinstance(causal, str) or causal != "paper-mask":
        raise InvalidInput(
            "causal",
            got=repr(causal),
            expected="None, or 'paper-mask' for the mask of the paper's appendix G.1, which leaks later leaves",
            fix="For causal attention use multiscale_attention(causal=True)",
        )
    if not include_self:
        raise InvalidInput(
            "causal",
            got="'paper-mask' with include_self=False",
            expected="include_self=True",
            fix="Pass include_self=True, without which the first leaf has nothing to attend to, or use "
            "multiscale_attention(causal=True)",
        )
    return True


def prepare(
    hierarchy: Hierarchy, normalizer: Literal["softmax"] | Entmax = "softmax", *, include_self: bool = True
) -> None:
    """Build the plan that the first call on this forest would build: on a GPU that of the kernels if they can run it."""
    forest = rooted(hierarchy)[0]
    entmax = None if isinstance(normalizer, str) or normalizer.is_softmax else normalizer
    for_kernels = forest.device.type == "cuda" and not why_not_alpha(entmax) and not available.why_not_forest(forest)
    if for_kernels and largest_family(forest) <= SIZES[-1]:
        tiles(forest)
        if entmax is not None:
            inside_weights(forest, entmax.counts == "weighted", include_self, causal=False)
    elif entmax is not None:
        entmax_sweeps.prepare(forest, include_self)
    else:
        rounds(forest)
