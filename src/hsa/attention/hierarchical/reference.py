"""Backend "reference": the recursion of the definition, one node at a time. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.mixing import HeadMixing


def attend(call: HierarchicalCall) -> Tensor:
    """Run `hsa.hierarchical_attention`."""
    return _Recursion(call).run().to(call.v.dtype)


def energy(call: HierarchicalCall) -> Tensor:
    """Return −inner(root), `[trees, heads]`."""
    recursion = _Recursion(call)
    roots = [-recursion.up(root) for root in recursion.roots]
    return torch.stack(roots) if roots else recursion.nothing[None][:0]


class Nodes:
    """Base class of the recursions: access to queries, keys and values node by node, in float32 or better."""

    def __init__(self, call: HierarchicalCall):
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.q, self.k, self.v = call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)
        self.positions = None if call.positions is None else call.positions.to(dtype)
        self.include_self, self.causal, self.scale = call.include_self, call.causal, call.scale
        self.structure = call.hierarchy.structure
        self.roots = range(call.hierarchy.num_trees)
        self.siblings: dict[int, list[int]] = {}  # visible siblings of each node
        self.out: dict[int, Tensor] = {}  # output of each leaf

    def run(self) -> Tensor:
        """Return the output of all leaves."""
        zero, one = self.v.new_zeros(self.v.shape[1:]), self.v.new_ones(self.v.shape[1])
        for root in self.roots:
            self.up(root)
            self.down(root, one, zero)
        leaves = [self.out[node] for node in self.structure.leaf_nodes.tolist()]
        return torch.stack(leaves) if leaves else self.v

    def up(self, node: int) -> object:
        raise NotImplementedError

    def down(self, node: int, weight: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def children(self, node: int) -> list[int]:
        first = int(self.structure.first_child[node])
        return list(range(first, first + int(self.structure.num_children[node])))

    def visible(self, child: int, children: list[int]) -> list[int]:
        """Return the siblings that a member of a family sees."""
        self.siblings[child] = [b for b in children if b != child and not (self.causal and b > child)]
        return self.siblings[child]

    def count(self, node: int) -> int:
        return int(self.structure.leaf_count[node])

    def mean(self, x: Tensor, node: int) -> Tensor:
        first = int(self.structure.first_leaf[node])
        return x[first : first + self.count(node)].mean(0)

    def similarity(self, a: int, b: int) -> Tensor:
        """Return scale · q·k + ε·ε, `[heads]`."""
        similarity = self.scale * (self.mean(self.q, a) * self.mean(self.k, b)).sum(-1)
        return similarity if self.positions is None else similarity + (self.positions[a] * self.positions[b]).sum(-1)

    def finish(self, node: int, weight: Tensor, out: Tensor) -> None:
        """Add the leaf's attention to itself to its output."""
        own = self.v[int(self.structure.first_leaf[node])]
        self.out[node] = out + weight[:, None] * own * float(self.include_self)


class _Recursion(Nodes):
    """Algorithms 2 and 3 of the paper with errata applied. All tensors are `[heads]` or `[heads, dim]`."""

    def __init__(self, call: HierarchicalCall):
        super().__init__(call)
        heads = self.q.shape[1]
        self.mixing = HeadMixing.identity(heads, device=self.q.device) if call.mixing is None else call.mixing
        self.nothing = self.q.new_full((heads,), -math.inf)
        self.inner: dict[int, Tensor] = {}
        self.outer: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}  # weights of the siblings of each node, [siblings, heads]

    def logit(self, a: int, b: int) -> Tensor:
        similarity = self.similarity(a, b)
        return self.mixing.logits.to(similarity.dtype) @ similarity + math.log(self.count(b))

    def up(self, node: int) -> Tensor:
        """Compute inner and outer of all nodes below, and return inner(node)."""
        children = self.children(node)
        if not children:
            self.inner[node] = self.logit(node, node) if self.include_self else self.nothing
            return self.inner[node]
        mass = []
        for child in children:
            self.up(child)
            siblings = self.visible(child, children)
            logits = torch.stack([self.logit(child, b) for b in siblings]) if siblings else self.nothing[None][:0]
            self.outer[child] = logits.logsumexp(0) if siblings else self.nothing
            self.weights[child] = logits.softmax(0)
            mass.append(self.mass(child))
        share = [self.count(child) / self.count(node) for child in children]
        self.inner[node] = sum((s * m for s, m in zip(share, mass, strict=True)), start=torch.zeros_like(mass[0]))
        return self.inner[node]

    def mass(self, node: int) -> Tensor:
        inner, outer = self.inner[node], self.outer[node]
        if _is_nothing(outer):
            return inner
        return outer if _is_nothing(inner) else torch.logaddexp(inner, outer)

    def shares(self, node: int) -> tuple[Tensor, Tensor]:
        """Return the shares of the node's siblings and of its own children in its row."""
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
        elif not children:  # a tree of one leaf: its row has no entry except the leaf itself
            weight = self.mixing.weights.to(weight.dtype) @ weight
        if not children:
            self.finish(node, weight, out)
        for child in children:
            self.down(child, weight, out)

    def row(self, node: int, weight: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Add the node's siblings to its output; return the weight that is left for its children, and the output."""
        side, own = self.shares(node)
        mix = self.mixing.weights.to(own.dtype)
        for sibling, share in zip(self.siblings[node], self.weights[node], strict=True):
            out = out + (weight * (mix @ (side * share)))[:, None] * self.mean(self.v, sibling)
        passes_all = _is_nothing(self.outer[node]) and bool(self.structure.num_children[node])
        return weight * (own if passes_all else mix @ own), out


def _is_nothing(mass: Tensor) -> bool:
    """Return whether a log-mass is −∞, which depends on the structure only and is the same in all heads."""
    return bool((mass == -math.inf).all())
