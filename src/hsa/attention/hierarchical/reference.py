"""Backend "reference": the recursion as written, one node and one head at a time. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.hierarchical.levelwise import FamilyAttention
from hsa.hierarchy import Hierarchy


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
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_attention`."""
    del family_attention  # the definition is the exact one
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = [
        _Recursion(x, hierarchy, positions, include_self, causal, scale, head).run()
        for head, x in enumerate(zip(*(t.to(dtype).unbind(1) for t in (q, k, v)), strict=True))
    ]
    return torch.stack(out, 1).to(v.dtype)


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
    heads = []
    for head in range(q.shape[1]):
        recursion = _Recursion(
            (q[:, head], k[:, head], k[:, head]), hierarchy, positions, include_self, causal, scale, head
        )
        heads.append(torch.stack([-recursion.up(root) for root in range(hierarchy.num_trees)]))
    return torch.stack(heads, 1)


class _Recursion:
    """Algorithms 2 and 3 of the paper with the errata applied, for one head."""

    def __init__(
        self,
        leaves: tuple[Tensor, ...],
        hierarchy: Hierarchy,
        positions: Tensor | None,
        include_self: bool,
        causal: bool,
        scale: float,
        head: int,
    ):
        self.q, self.k, self.v = leaves
        self.structure = hierarchy.structure
        self.include_self, self.causal, self.scale = include_self, causal, scale
        self.positions = None if positions is None else positions[:, min(head, positions.shape[1] - 1)].to(self.q.dtype)
        self.nothing = self.q.new_tensor(-math.inf)
        self.inner: dict[int, Tensor] = {}
        self.outer: dict[int, Tensor] = {}
        self.average: dict[int, Tensor] = {}
        self.out: dict[int, Tensor] = {}

    def run(self) -> Tensor:
        zero, one = self.v.new_zeros(self.v.shape[1:]), self.v.new_ones(())
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
        return 0.0 if self.positions is None else self.positions[a] @ self.positions[b]

    def logit(self, a: int, b: int) -> Tensor:
        similarity = self.mean(self.q, a) @ self.mean(self.k, b)
        return self.scale * similarity + self.place(a, b) + math.log(self.structure.leaf_count[b])

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
            logits = torch.stack([self.logit(child, b) for b in siblings]) if siblings else self.q.new_empty(0)
            self.outer[child] = logits.logsumexp(0) if siblings else self.nothing
            values = [self.mean(self.v, b) for b in siblings]
            self.average[child] = logits.softmax(0) @ torch.stack(values) if siblings else torch.zeros_like(self.v[0])
            mass.append(self.mass(child))
        share = [int(self.structure.leaf_count[c]) / int(self.structure.leaf_count[node]) for c in children]
        self.inner[node] = sum((s * m for s, m in zip(share, mass, strict=True)), start=self.q.new_zeros(()))
        return self.inner[node]

    def mass(self, node: int) -> Tensor:
        inner, outer = self.inner[node], self.outer[node]
        if outer == -math.inf:
            return inner
        return outer if inner == -math.inf else torch.logaddexp(inner, outer)

    def shares(self, node: int) -> tuple[Tensor, Tensor]:
        """How a row divides: (to the siblings, to the own children)."""
        inner, outer = self.inner[node], self.outer[node]
        one, zero = torch.ones_like(self.nothing), torch.zeros_like(self.nothing)
        if outer == -math.inf:
            return zero, zero if inner == -math.inf else one
        if inner == -math.inf:
            return one, zero
        return torch.sigmoid(outer - inner), torch.sigmoid(inner - outer)

    def down(self, node: int, weight: Tensor, out: Tensor) -> None:
        children = self.children(node)
        if not children:
            self.out[node] = out + weight * self.v[self.structure.first_leaf[node]] * float(self.include_self)
            return
        for child in children:
            side, own = self.shares(child)
            self.down(child, weight * own, out + weight * side * self.average[child])
