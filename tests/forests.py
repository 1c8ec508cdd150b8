"""Random forests and inputs for property tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from hsa import Hierarchy

SIGHTS = ({"include_self": False}, {"include_self": True}, {"include_self": True, "causal": "paper-mask"})
"""Combinations of the options of hierarchical attention that determine which leaves are visible."""
sights = st.sampled_from(SIGHTS)


@st.composite
def parent_vectors(draw, max_nodes: int = 36, max_depth: int = 6) -> list[int]:
    """Draw any forest: mixed families, one-child chains, single leaves, unequal depths."""
    number = draw(st.integers(1, max_nodes))
    parent, depth = [-1], [0]
    for node in range(1, number):
        # A low number makes a tree wider, the newest node makes a chain longer.
        above = draw(st.one_of(st.integers(-1, node - 1), st.just(node - 1)))
        if above >= 0 and depth[above] >= max_depth:
            above = parent[above]
        parent.append(above)
        depth.append(0 if above < 0 else depth[above] + 1)
    return parent


@st.composite
def nested_lists(draw, depth: int = 3):
    if depth == 0 or draw(st.booleans()):
        return draw(st.integers(1, 5))
    return draw(st.lists(nested_lists(depth - 1), min_size=1, max_size=4))


@st.composite
def forests(draw) -> Hierarchy:
    """Draw a forest from any constructor."""
    kind = draw(st.sampled_from(["parents", "nested", "regular", "flat"]))
    if kind == "parents":
        return Hierarchy.from_parents(draw(parent_vectors()))
    if kind == "nested":
        trees = draw(st.lists(nested_lists(), min_size=1, max_size=3))
        return Hierarchy.from_nested(trees, sinks=draw(st.sampled_from([None, 1, (0,), (-1,), (0, -1)])))
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    if kind == "flat":
        return Hierarchy.flat(lengths)
    return draw(windows(lengths))


@st.composite
def windows(draw, lengths: list[int] | None = None) -> Hierarchy:
    """Draw a forest of windows, as clustered keys need it."""
    lengths = lengths or draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))
    branching = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    return Hierarchy.regular(
        lengths, branching, repeat_last=draw(st.booleans()), sinks=draw(st.sampled_from([None, 1, (-1,)]))
    )


def random_inputs(
    hierarchy: Hierarchy,
    seed: int,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 3,
    value_dim: int = 5,
    queries: int | None = None,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = hierarchy.num_leaves
    shapes = [(n if queries is None else queries, heads, dim), (n, kv_heads, dim), (n, kv_heads, value_dim)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in (q, k, v))


def random_positions(hierarchy: Hierarchy, seed: int, heads: int = 6, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (hierarchy.num_nodes, heads, 2)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def gradients(out: Tensor, inputs: list[Tensor | None], seed: int = 7) -> list[Tensor]:
    """Return the gradients of a random scalar function of `out`; zeros for inputs that it does not depend on."""
    wanted = [x for x in inputs if x is not None]
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    return list(torch.autograd.grad(out, wanted, weight, allow_unused=True, materialize_grads=True))


def softmax_weights(q: Tensor, k: Tensor, hierarchy: Hierarchy, *, include_self: bool = True) -> Tensor:
    """Return the matrix of softmax attention within every tree, [heads, leaves, leaves]; rows without a key are 0."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    tree = torch.repeat_interleave(torch.arange(hierarchy.num_trees), torch.tensor(hierarchy.lengths))
    allowed = tree[:, None] == tree
    if not include_self:
        allowed = allowed & ~torch.eye(len(q), dtype=torch.bool)
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0)


def total_kl(weights: Tensor, flat: Tensor) -> float:
    """Return Σ over rows of KL(weights ‖ flat)."""
    positive = weights > 0
    return float((weights[positive] * (weights[positive] / flat[positive]).log()).sum())
