"""Backend "reference": the recursion as written, one node at a time. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.hierarchical.torch_sweeps import FamilyAttention
from hsa.attention.mixing import HeadMixing
from hsa.tree.hierarchy import Hierarchy


def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    family_attention: FamilyAttention,
    mixing: HeadMixing | None,
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_attention`."""
    del family_attention  # the definition is the exact one
    dtype = torch.promote_types(q.dtype, torch.float32)
    leaves = q.to(dtype), k.to(dtype), v.to(dtype)
    return _Recursion(leaves, hierarchy, positions, include_self, causal, scale, mixing).run().to(v.dtype)


def energy(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    family_attention: FamilyAttention,
    scale: float,
) -> Tensor:
    """−inner(root), `[trees, heads]`."""
    del family_attention
    recursion = _Recursion((q, k, k), hierarchy, positions, include_self, causal, scale, None)
    roots = [-recursion.up(root) for root in range(hierarchy.num_trees)]
    return torch.stack(roots) if roots else q.new_zeros(0, q.shape[1])


class _Recursion:
    """Algorithms 2 and 3 of the paper with the errata applied. Every number is one per head: `[heads]`, `[heads, dim]`."""

    def __init__(
        self,
        leaves: tuple[Tensor, ...],
        hierarchy: Hierarchy,
        positions: Tensor | None,
        include_self: bool,
        causal: bool,
        scale: float,
        mixing: HeadMixing | None,
    ):
        self.q, self.k, self.v = leaves
        self.structure = hierarchy.structure
        self.include_self, self.causal, self.scale = include_self, causal, scale
        self.positions = None if positions is None else positions.to(self.q.dtype)
        self.mixing = HeadMixing.identity(self.q.shape[1], device=self.q.device) if mixing is None else mixing
        self.nothing = self.q.new_full((self.q.shape[1],), -math.inf)
        self.inner: dict[int, Tensor] = {}
        self.outer: dict[int, Tensor] = {}
        self.siblings: dict[int, list[int]] = {}
        self.weights: dict[int, Tensor] = {}  # of the siblings, [siblings, heads]
        self.out: dict[int, Tensor] = {}

    def run(self) -> Tensor:
        zero, one = self.v.new_zeros(self.v.shape[1:]), self.v.new_ones(self.v.shape[1])
        for root in range(len(self.structure.leaf_offsets) - 1):
            self.up(root)
            self.down(root, one, zero)
        leaves = [self.out[node] for node in self.structure.leaf_nodes.tolist()]
        return torch.stack(leaves) if leaves else self.v

    def children(self, node: int) -> list[int]:
        first = int(self.structure.first_child[node])
        return list(range(first, first + int(self.structure.num_children[node])))

    def mean(self, x: Tensor, node: int) -> Tensor:
        first, count = int(self.structure.first_leaf[node]), int(self.structure.leaf_count[node])
        return x[first : first + count].mean(0)

    def place(self, a: int, b: int) -> Tensor | float:
        return 0.0 if self.positions is None else (self.positions[a] * self.positions[b]).sum(-1)

    def logit(self, a: int, b: int) -> Tensor:
        similarity = (self.mean(self.q, a) * self.mean(self.k, b)).sum(-1)
        own = self.scale * similarity + self.place(a, b)
        return self.mixing.logits.to(own.dtype) @ own + math.log(self.structure.leaf_count[b])

    def up(self, node: int) -> Tensor:
        """inner(node), after the same for everything below it."""
        children = self.children(node)
        if not children:
            self.inner[node] = self.logit(node, node) if self.include_self else self.nothing
            return self.inner[node]
        mass = []
        for child in children:
            self.up(child)
            siblings = [b for b in children if b != child and not (self.causal and b > child)]
            logits = torch.stack([self.logit(child, b) for b in siblings]) if siblings else self.nothing[None][:0]
            self.siblings[child] = siblings
            self.outer[child] = logits.logsumexp(0) if siblings else self.nothing
            self.weights[child] = logits.softmax(0)
            mass.append(self.mass(child))
        share = [int(self.structure.leaf_count[c]) / int(self.structure.leaf_count[node]) for c in children]
        self.inner[node] = sum((s * m for s, m in zip(share, mass, strict=True)), start=torch.zeros_like(mass[0]))
        return self.inner[node]

    def mass(self, node: int) -> Tensor:
        inner, outer = self.inner[node], self.outer[node]
        if _is_nothing(outer):
            return inner
        return outer if _is_nothing(inner) else torch.logaddexp(inner, outer)

    def shares(self, node: int) -> tuple[Tensor, Tensor]:
        """How a row divides: (to the siblings, to the own children)."""
        inner, outer = self.inner[node], self.outer[node]
        one, zero = torch.ones_like(self.nothing), torch.zeros_like(self.nothing)
        if _is_nothing(outer):
            return zero, zero if _is_nothing(inner) else one
        if _is_nothing(inner):
            return one, zero
        return torch.sigmoid(outer - inner), torch.sigmoid(inner - outer)

    def down(self, node: int, weight: Tensor, out: Tensor) -> None:
        children = self.children(node)
        if node in self.outer:  # not a root: it has a row in its family
            weight, out = self.row(node, weight, out)
        elif not children:  # a tree of one leaf: a row with nothing in it but the leaf itself
            weight = self.mixing.weights.to(weight.dtype) @ weight
        if not children:
            own = self.v[self.structure.first_leaf[node]]
            self.out[node] = out + weight[:, None] * own * float(self.include_self)
        for child in children:
            self.down(child, weight, out)

    def row(self, node: int, weight: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """What is left for below the node, and what it has got, after its siblings."""
        side, own = self.shares(node)
        mix = self.mixing.weights.to(own.dtype)
        for sibling, share in zip(self.siblings[node], self.weights[node], strict=True):
            out = out + (weight * (mix @ (side * share)))[:, None] * self.mean(self.v, sibling)
        passes_all = _is_nothing(self.outer[node]) and bool(self.structure.num_children[node])
        return weight * (own if passes_all else mix @ own), out


def _is_nothing(mass: Tensor) -> bool:
    """A matter of structure: the same in every head."""
    return bool((mass == -math.inf).all())
