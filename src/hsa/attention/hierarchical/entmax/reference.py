"""Backend "reference" with entmax: the recursion as written, one node at a time. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.entmax import deformed_log, entmax, value
from hsa.attention.normalizers import Entmax
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
    normalizer: Entmax,
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_attention`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    leaves = q.to(dtype), k.to(dtype), v.to(dtype)
    return _Recursion(leaves, hierarchy, positions, include_self, causal, normalizer, scale).run().to(v.dtype)


def energy(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    normalizer: Entmax,
    scale: float,
) -> Tensor:
    """−inner(root), `[trees, heads]`."""
    recursion = _Recursion((q, k, k), hierarchy, positions, include_self, causal, normalizer, scale)
    return recursion.energy()


class _Recursion:
    """Every number is one per head: `[heads]`, `[heads, dim]`. None: there is nothing inside a node."""

    def __init__(
        self,
        leaves: tuple[Tensor, ...],
        hierarchy: Hierarchy,
        positions: Tensor | None,
        include_self: bool,
        causal: bool,
        normalizer: Entmax,
        scale: float,
    ):
        self.q, self.k, self.v = leaves
        self.structure, self.trees = hierarchy.structure, hierarchy.num_trees
        self.include_self, self.causal, self.normalizer, self.scale = include_self, causal, normalizer, scale
        self.weighted = normalizer.counts == "weighted"
        self.positions = None if positions is None else positions.to(self.q.dtype)
        self.siblings: dict[int, list[int]] = {}
        self.p: dict[int, Tensor] = {}  # of the siblings, and of the inside if there is one, [entries, heads]
        self.has_inside: dict[int, bool] = {}
        self.out: dict[int, Tensor] = {}

    def run(self) -> Tensor:
        zero, one = self.v.new_zeros(self.v.shape[1:]), self.v.new_ones(self.v.shape[1])
        for root in range(self.trees):
            self.up(root)
            self.down(root, one, zero)
        leaves = [self.out[node] for node in self.structure.leaf_nodes.tolist()]
        return torch.stack(leaves) if leaves else self.v

    def energy(self) -> Tensor:
        found = []
        for root in range(self.trees):
            whole = self.up(root)
            found.append(self.q.new_full((self.q.shape[1],), math.inf) if whole is None else -whole[0])
        return torch.stack(found) if found else self.q.new_zeros(0, self.q.shape[1])

    def children(self, node: int) -> list[int]:
        first = int(self.structure.first_child[node])
        return list(range(first, first + int(self.structure.num_children[node])))

    def count(self, node: int) -> int:
        return int(self.structure.leaf_count[node])

    def mean(self, x: Tensor, node: int) -> Tensor:
        first = int(self.structure.first_leaf[node])
        return x[first : first + self.count(node)].mean(0)

    def logit(self, a: int, b: int) -> Tensor:
        own = self.scale * (self.mean(self.q, a) * self.mean(self.k, b)).sum(-1)
        if self.positions is not None:
            own = own + (self.positions[a] * self.positions[b]).sum(-1)
        return own if self.weighted else own + math.log(self.count(b))

    def up(self, node: int) -> tuple[Tensor, Tensor, float] | None:
        """inner, inner of logits 0, and the keys that a leaf of the node sees inside it; None where it sees none."""
        children = self.children(node)
        if not children:
            own = self.logit(node, node)
            return (own, torch.zeros_like(own), 1.0) if self.include_self else None
        alpha = self.normalizer.at_height(int(self.structure.height[node]), self.q.dtype).expand(self.q.shape[1])
        inner = of_zeros = torch.zeros_like(alpha)
        log_keys, nothing = 0.0, False
        for child in children:
            inside = self.up(child)
            siblings = [b for b in children if b != child and not (self.causal and b > child)]
            logits = [self.logit(child, b) for b in siblings]
            counts = [float(self.count(b)) for b in siblings]
            if inside is not None:
                logits.append(inside[0] - inside[1])
                counts.append(inside[2])
            self.siblings[child], self.has_inside[child] = siblings, inside is not None
            if not logits:
                nothing = True
                self.p[child] = self.q.new_zeros(0, self.q.shape[1])
                continue
            z = torch.stack(logits, -1)
            n = z.new_tensor(counts) if self.weighted else torch.ones_like(z)
            p = entmax(z, n, alpha[:, None])
            self.p[child] = p.T
            share = self.count(child) / self.count(node)
            keys = z.new_tensor(sum(counts))
            inner = inner + share * value(p.detach(), z, n, alpha[:, None])
            if self.weighted:
                of_zeros = of_zeros + share * deformed_log(keys, alpha) / alpha
            log_keys += share * math.log(sum(counts))
        return None if nothing else (inner, of_zeros, math.exp(log_keys))

    def down(self, node: int, weight: Tensor, out: Tensor) -> None:
        for share, sibling in zip(self.p.get(node, ()), self.siblings.get(node, ()), strict=False):
            out = out + (weight * share)[:, None] * self.mean(self.v, sibling)
        if node in self.p:  # a root hands everything down
            weight = weight * self.p[node][-1] if self.has_inside[node] else torch.zeros_like(weight)
        children = self.children(node)
        if not children:
            own = self.v[int(self.structure.first_leaf[node])]
            self.out[node] = out + weight[:, None] * own * float(self.include_self)
        for child in children:
            self.down(child, weight, out)
