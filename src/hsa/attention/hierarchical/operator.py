"""The paper's operator: softmax attention generalised to a tree, rows and columns tied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from hsa.attention.arguments import check_inputs, check_positions, repeat_heads, scale_or_default, without_autocast
from hsa.attention.dispatch import Backend, choose
from hsa.attention.hierarchical import reference
from hsa.attention.hierarchical import torch_sweeps as levelwise
from hsa.attention.hierarchical.entmax import reference as sparse_reference
from hsa.attention.hierarchical.entmax import sweeps as sparse
from hsa.attention.hierarchical.family import family_attention_named
from hsa.attention.hierarchical.triton.plan import SIZES, inside_weights, tiles
from hsa.attention.kernels import available
from hsa.attention.kernels.reasons import entmax_reasons, forest_reasons, hierarchical_reasons, largest_family
from hsa.attention.mixing import HeadMixing, check_mixing, no_mixing
from hsa.attention.normalizers import Entmax, resolve_normalizer
from hsa.attention.rounds import rooted, rounds
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


def _entmax_reasons(arguments: dict[str, Any]) -> list[str]:
    """Entmax is one attention inside families, and heads do not talk in it."""
    if resolve_normalizer(arguments["normalizer"], arguments["q"]) is None:
        return []
    reasons = [] if arguments["family_attention"] == "exact" else ["entmax needs family_attention 'exact'"]
    return reasons if arguments.get("mixing") is None else [*reasons, "heads that talk need softmax"]


def _only_exact(arguments: dict[str, Any]) -> list[str]:
    family = arguments["family_attention"]
    reasons = [] if family == "exact" else ["it is the definition: family_attention must be 'exact'"]
    return _entmax_reasons(arguments) + reasons


def _why_not_torch(arguments: dict[str, Any]) -> list[str]:
    exact = arguments["family_attention"] == "exact" or arguments.get("mixing") is None
    reasons = [] if exact else ["mixed heads have an attention of their own inside families: it must be 'exact'"]
    return _entmax_reasons(arguments) + reasons


def _either(softmax: Callable[..., Tensor], entmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A backend of two: `entmax` takes its normalizer, and neither a family attention nor a mixing."""

    def run(*arguments: Any, normalizer: Entmax | None, **options: Any) -> Tensor:
        if normalizer is None:
            return softmax(*arguments, **options)
        del options["family_attention"]
        options.pop("mixing", None)
        return entmax(*arguments, normalizer=normalizer, **options)

    return run


def _run_triton(*arguments: Any, **options: Any) -> Tensor:
    from hsa.attention.hierarchical.triton.operator import hierarchical_attention

    with available.device_of(arguments[0]):
        return hierarchical_attention(*arguments, **options)


def _why_not_triton(arguments: dict[str, Any]) -> list[str]:
    reasons = available.why_not(arguments["q"], arguments["v"], arguments["backend"])
    reasons += entmax_reasons(arguments["normalizer"]) + no_mixing(arguments)
    if arguments["family_attention"] != "exact":
        reasons.append("it has its own attention inside families: family_attention must be 'exact'")
    if reasons:
        return reasons
    return hierarchical_reasons(
        rooted(arguments["hierarchy"])[0], arguments["q"], arguments["v"], arguments["positions"]
    )


HIERARCHICAL = (
    Backend("triton", _run_triton, _why_not_triton),
    Backend("torch", _either(levelwise.hierarchical_attention, sparse.hierarchical_attention), _why_not_torch),
    Backend(
        "reference", _either(reference.hierarchical_attention, sparse_reference.hierarchical_attention), _only_exact
    ),
)
ENERGY = (
    Backend("torch", _either(levelwise.energy, sparse.energy), _why_not_torch),
    Backend("reference", _either(reference.energy, sparse_reference.energy), _only_exact),
)
FamilyAttentionName = Literal["exact", "flex", "linear"]


def prepare(
    hierarchy: Hierarchy, normalizer: Literal["softmax"] | Entmax = "softmax", *, include_self: bool = False
) -> None:
    """Build ahead what the first call on this forest builds: on a GPU the plan of the kernels, if they take the forest."""
    forest = rooted(hierarchy)[0]
    for_kernels = forest.device.type == "cuda" and not entmax_reasons(normalizer) and not forest_reasons(forest)
    if for_kernels and largest_family(forest) <= SIZES[-1]:
        tiles(forest)
        if isinstance(normalizer, Entmax) and not normalizer.is_softmax:
            inside_weights(forest, normalizer.counts == "weighted", include_self, causal=False)
    elif isinstance(normalizer, Entmax):
        sparse.prepare(hierarchy, include_self=include_self)
    else:
        rounds(forest)


def hierarchical_attention(
    q: Float[Tensor, "leaves heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    v: Float[Tensor, "leaves kv_heads value_dim"],
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None = None,
    include_self: bool = False,
    causal: bool = False,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    family_attention: FamilyAttentionName | Callable[..., tuple[Tensor, Tensor]] = "exact",
    mixing: HeadMixing | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "leaves heads value_dim"]:
    """Hierarchical self-attention: each leaf attends to its siblings, and through its ancestors to theirs.

    For siblings A and B, with means over the leaves below them,

        logit(A→B) = scale · mean(q, A) · mean(k, B) + ε(A)·ε(B) + log leaf_count(B)

    and the matrix that results is the closest, in total KL divergence, to softmax attention among all whose entries are
    tied over pairs of siblings. It costs O(families · size²). One family is softmax attention.

    Args:
        q, k, v: one row per leaf, trees one after another. Key/value heads may be fewer than query heads; v may have
            another width.
        hierarchy: the forest.
        positions: ε, one row per node: `[nodes, dim]` or `[nodes, heads, dim]`.
        include_self: leaves attend to themselves too, as in pre-trained transformers; the paper's operator does not.
        causal: the paper's appendix G.1: hide siblings to the right. **It leaks**: pooled queries and the masses inside a
            node average over later leaves, so weights of earlier leaves depend on them. For real causality use
            `multiscale_attention(causal=True)`.
        normalizer: "softmax", or an `hsa.Entmax`, which gives small logits no weight at all. Without a gradient, on a
            CPU, what is below a node that gets no weight is not visited (`hsa.attention.hierarchical.entmax.sweeps.visited` says
            how much).
        family_attention: attention inside a family: "exact", "flex" (FlexAttention), "linear" (random features,
            approximate, linear in the family's size), or a function `(q, k, v, bias, mask, *, scale) → (out, lse)` as
            described in `hsa.attention.hierarchical.family`.
        mixing: talking heads, in every family: logits are mixed across heads before its softmax; after it, whole rows are:
            the weights of siblings together with the share that is handed down.
        scale: of the dot products; 1/√head_dim by default.
        backend: "auto", "triton" (CUDA), "torch" or "reference".

    Returns:
        `[leaves, heads, value_dim]`. A leaf with nothing to attend to gets zeros.

    Raises:
        InvalidInput: shapes, dtypes, devices or heads that do not fit; `causal` without `include_self`.
        Unsupported: no backend runs this combination; the message says why.

    >>> import torch
    >>> q, k, v = torch.randn(3, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> hierarchical_attention(q, k, v, Hierarchy.from_nested([[3, 2], [4]])).shape
    torch.Size([9, 2, 4])
    """
    arguments = _arguments(locals())
    chosen = choose("hierarchical_attention", HIERARCHICAL, backend, arguments)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    with without_autocast(q):
        return chosen.run(q, k, v, hierarchy, mixing=mixing, **_resolved(arguments, q))


def energy(
    q: Float[Tensor, "leaves heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None = None,
    include_self: bool = False,
    causal: bool = False,
    normalizer: Literal["softmax"] | Entmax = "softmax",
    family_attention: FamilyAttentionName | Callable[..., tuple[Tensor, Tensor]] = "exact",
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "trees heads"]:
    """The energy that hierarchical attention descends: minus the log-mass of every tree, per head.

    The gradient gives the operator back: `dense_weights @ k = −(leaves / scale) · ∂energy/∂q` in each tree.
    A tree of one leaf that does not see itself has no mass: its energy is +∞.

    >>> import torch
    >>> q, k = torch.randn(2, 5, 3, 4).unbind(0)
    >>> logits = torch.einsum("ihd,jhd->hij", q, k) / 2
    >>> flat = -logits.logsumexp(-1).mean(-1)  # one family: minus the mean log-sum-exp
    >>> torch.allclose(energy(q, k, Hierarchy.flat([5]), include_self=True)[0], flat, atol=1e-6)
    True
    """
    arguments = _arguments(locals())
    chosen = choose("energy", ENERGY, backend, arguments)
    with without_autocast(q):
        return chosen.run(q, repeat_heads(k, q.shape[1]), hierarchy, **_resolved(arguments, q))


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The checked arguments of both functions."""
    tensors: dict[str, Tensor] = {name: given[name] for name in ("q", "k", "v") if name in given}
    check_inputs(tensors, given["hierarchy"])
    check_mixing(given.get("mixing"), given["q"])
    resolve_normalizer(given["normalizer"], given["q"])
    if given["causal"] and not given["include_self"]:
        raise InvalidInput(
            "causal",
            given="causal=True with include_self=False",
            expected="include_self=True",
            fix="without itself the leftmost leaf has no mass and nothing flows down; pass include_self=True, or use "
            "multiscale_attention(causal=True)",
        )
    return {**given, "positions": check_positions(given["positions"], given["q"], given["hierarchy"])}


def _resolved(arguments: dict[str, Any], q: Tensor) -> dict[str, Any]:
    return {
        "normalizer": resolve_normalizer(arguments["normalizer"], q),
        "positions": arguments["positions"],
        "include_self": arguments["include_self"],
        "causal": arguments["causal"],
        "family_attention": family_attention_named(arguments["family_attention"]),
        "scale": scale_or_default(arguments["scale"], q),
    }
