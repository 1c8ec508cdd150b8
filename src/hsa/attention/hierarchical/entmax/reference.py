"""Backend "reference" with entmax: the recursion of the definition, one node at a time. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.entmax import deformed_log, entmax, value
from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.reference import Nodes


def attend(call: HierarchicalCall) -> Tensor:
    """Run `hsa.hierarchical_attention`."""
    return _Recursion(call).run().to(call.v.dtype)


def energy(call: HierarchicalCall) -> Tensor:
    """Return −inner(root), `[trees, heads]`."""
    recursion = _Recursion(call)
    no_mass = recursion.q.new_full((call.q.shape[1],), math.inf)
    wholes = [recursion.up(root) for root in recursion.roots]
    return torch.stack([no_mass if whole is None else -whole[0] for whole in wholes]) if wholes else no_mass[None][:0]


class _Recursion(Nodes):
    """Recursion with entmax. All tensors are `[heads]` or `[heads, dim]`; None stands for a node with nothing inside."""

    def __init__(self, call: HierarchicalCall):
        super().__init__(call)
        assert call.entmax is not None
        self.entmax, self.weighted = call.entmax, call.entmax.counts == "weighted"
        self.p: dict[int, Tensor] = {}  # weights of the siblings, and of the inside if there is one, [entries, heads]
        self.has_inside: dict[int, bool] = {}

    def logit(self, a: int, b: int) -> Tensor:
        similarity = self.similarity(a, b)
        return similarity if self.weighted else similarity + math.log(self.count(b))

    def up(self, node: int) -> tuple[Tensor, Tensor, float] | None:
        """Return inner, inner for logits 0, and the number of keys that a leaf of the node sees inside it.

        None if some leaf sees nothing inside the node.
        """
        children = self.children(node)
        if not children:
            own = self.logit(node, node)
            return (own, torch.zeros_like(own), 1.0) if self.include_self else None
        alpha = self.entmax.at_height(int(self.structure.height[node]), self.q.dtype).expand(self.q.shape[1])
        inner = of_zeros = torch.zeros_like(alpha)
        log_keys, nothing = 0.0, False
        for child in children:
            inside = self.up(child)
            siblings = self.visible(child, children)
            logits = [self.logit(child, b) for b in siblings]
            counts = [float(self.count(b)) for b in siblings]
            if inside is not None:
                logits.append(inside[0] - inside[1])
                counts.append(inside[2])
            self.has_inside[child] = inside is not None
            if not logits:
                nothing = True
                self.p[child] = self.q.new_zeros(0, self.q.shape[1])
                continue
            z = torch.stack(logits, -1)
            n = z.new_tensor(counts) if self.weighted else torch.ones_like(z)
            p = entmax(z, n, alpha[:, None])
            self.p[child] = p.T
            share = self.count(child) / self.count(node)
            inner = inner + share * value(p, z, n, alpha[:, None])
            if self.weighted:
                of_zeros = of_zeros + share * deformed_log(z.new_tensor(sum(counts)), alpha) / alpha
            log_keys += share * math.log(sum(counts))
        return None if nothing else (inner, of_zeros, math.exp(log_keys))

    def down(self, node: int, weight: Tensor, out: Tensor) -> None:
        for share, sibling in zip(self.p.get(node, ()), self.siblings.get(node, ()), strict=False):
            out = out + (weight * share)[:, None] * self.mean(self.v, sibling)
        if node in self.p:  # a root passes everything down
            weight = weight * self.p[node][-1] if self.has_inside[node] else torch.zeros_like(weight)
        children = self.children(node)
        if not children:
            self.finish(node, weight, out)
        for child in children:
            self.down(child, weight, out)
