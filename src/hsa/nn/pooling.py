"""Pooling of leaves: into their parents, in runs of neighbours, or of a whole tree into one vector."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy, Structure
from hsa.tree.positions import NodePositions

Pooled = tuple[Tensor, Hierarchy, NodePositions]
GlobalPooling = Literal["mean", "max", "attention", "first", "last"]


def pool_families(x: Tensor, hierarchy: Hierarchy, node_positions: NodePositions) -> Pooled:
    """Pool each leaf family into one leaf, which replaces its parent and has the mean of the family's vectors.

    After h calls, a forest of height h consists of its roots alone. Trees of one leaf do not change.

    Args:
        x: Leaf vectors, `[leaves, width]`.
        hierarchy: Forest of the leaves.
        node_positions: Positions of its nodes.

    Returns:
        Vectors of the new leaves, their forest, and the positions of its nodes.

    >>> tree = Hierarchy.from_nested([[3, [2, 1]]])
    >>> x, coarser, _ = pool_families(torch.arange(6.0)[:, None], tree, NodePositions.of_sequences(tree))
    >>> x.flatten().tolist()
    [1.0, 3.5, 5.0]
    >>> print(coarser.show())
    tree 0 · 3 leaves
    ├─ leaf 0
    └─ 2 leaves
    """

    def outside_leaf_families() -> np.ndarray:
        s = hierarchy.structure
        return ~np.append(s.height == 1, False)[s.parent]  # a root's parent is −1, the appended entry

    return _keep(x, hierarchy, node_positions, "families pooled", outside_leaf_families)


def merge_leaves(x: Tensor, hierarchy: Hierarchy, node_positions: NodePositions, size: int = 2) -> Pooled:
    """Merge runs of `size` neighbouring leaves of a family into one leaf, with their mean and the position of the first.

    Arguments and results are those of `pool_families`.

    >>> tree = Hierarchy.from_nested([[3, 2]])
    >>> x, coarser, _ = merge_leaves(torch.arange(5.0)[:, None], tree, NodePositions.of_sequences(tree))
    >>> x.flatten().tolist(), coarser == Hierarchy.from_nested([[2, 1]])
    ([0.5, 2.0, 3.5], True)
    """
    size = check_count("size", size, "1 or more leaves to merge into one", minimum=1)

    def starts_of_runs() -> np.ndarray:
        s = hierarchy.structure
        nodes = np.arange(hierarchy.num_nodes)
        # A run begins at the first member of a family and after each inner node; each root is a family of its own.
        first_member = nodes == np.append(s.first_child, -1)[s.parent]
        begins = first_member | (s.parent < 0) | ~np.append(s.is_leaf, False)[nodes - 1]
        index = nodes - np.maximum.accumulate(np.where(begins, nodes, 0))
        return ~s.is_leaf | (index % size == 0)

    return _keep(x, hierarchy, node_positions, ("leaves merged", size), starts_of_runs)


def _keep(
    x: Tensor, hierarchy: Hierarchy, node_positions: NodePositions, name: Hashable, kept: Callable[[], np.ndarray]
) -> Pooled:
    """Return the forest of the kept nodes; a new leaf has the mean of the old leaves from its first to the next one's."""

    def build() -> tuple[Hierarchy, Tensor, Tensor]:
        s = hierarchy.structure
        nodes = np.flatnonzero(kept())
        parent = s.parent[nodes]
        num_children = np.bincount(parent[parent >= 0], minlength=hierarchy.num_nodes)[nodes]
        coarser = Hierarchy(Structure.from_num_children(num_children), device=hierarchy.device)
        first = s.first_leaf[nodes[coarser.structure.leaf_nodes]]
        lengths = np.diff(np.append(first, hierarchy.num_leaves))
        device = hierarchy.device
        return coarser, torch.from_numpy(nodes).to(device), torch.from_numpy(lengths).to(device)

    coarser, nodes, lengths = hierarchy.cached(name, build)
    return segment_mean(x, lengths), coarser, node_positions.keep(nodes)


def segment_mean(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the means of consecutive runs of rows, `[rows, …]` → `[runs, …]`, summed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.segment_reduce(wide, "mean", lengths=lengths, unsafe=True).to(x.dtype)


def segment_max(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the maxima of consecutive runs of rows, `[rows, …]` → `[runs, …]`."""
    return torch.segment_reduce(x, "max", lengths=lengths, unsafe=True)


def segment_softmax(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return the softmax over consecutive runs of rows, `[rows, …]`, in float32 or wider.

    >>> segment_softmax(torch.zeros(5), torch.tensor([4, 1])).tolist()
    [0.25, 0.25, 0.25, 0.25, 1.0]
    """
    exponentials = _exponentials(logits, lengths)
    totals = torch.segment_reduce(exponentials, "sum", lengths=lengths, unsafe=True)
    return exponentials / totals.repeat_interleave(lengths, 0, output_size=len(logits))


def segment_weigh(x: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
    """Return Σ softmax(logits) · x over consecutive runs of rows: `[rows, width]` and `[rows, 1]` → `[runs, width]`."""
    weights = _exponentials(logits, lengths)
    return (segment_mean(weights * x, lengths) / segment_mean(weights, lengths)).to(x.dtype)


def _exponentials(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return exp(logit − maximum of its run), so that no run overflows or underflows to zeros."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = segment_max(wide.detach(), lengths).repeat_interleave(lengths, 0, output_size=len(wide))
    return (wide - top).exp()


class GlobalPool(nn.Module):
    """Pooling of the leaves of each tree into one vector.

    Args:
        kind: Pooling: "mean", "max", "attention" (a learned weighted mean), "first" or "last" leaf.
        width: Width of the leaf vectors.

    >>> tree = Hierarchy.flat([2, 3])
    >>> GlobalPool("max", 1)(torch.arange(5.0)[:, None], tree).flatten().tolist()
    [1.0, 4.0]
    """

    def __init__(self, kind: GlobalPooling, width: int):
        super().__init__()
        kinds = ("mean", "max", "attention", "first", "last")
        if kind not in kinds:
            raise InvalidInput("pooling", got=repr(kind), expected=f"one of {', '.join(kinds)}")
        self.kind = kind
        self.score = nn.Linear(width, 1) if kind == "attention" else None

    def forward(self, x: Tensor, hierarchy: Hierarchy) -> Tensor:
        """Return a vector per tree: `[leaves, width]` → `[trees, width]`."""
        lengths = hierarchy.cached("lengths of trees", lambda: hierarchy.tensor("leaf_offsets").diff())
        if self.kind == "mean":
            return segment_mean(x, lengths)
        if self.kind == "max":
            return segment_max(x, lengths)
        if self.score is not None:
            return segment_weigh(x, self.score(x), lengths)
        offsets = hierarchy.tensor("leaf_offsets")
        return x[offsets[:-1] if self.kind == "first" else offsets[1:] - 1]
