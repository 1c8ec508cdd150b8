"""From selected families to one list of nodes per query group and head.

`Selection` says which leaf families a group attends to leaf by leaf. The *expanded* nodes are their parents and all above
them, and the root; the list is the frontier: the children of expanded nodes that are not expanded themselves. Those are the
leaves of the selected families and the largest nodes that contain no selected family, so every key is in exactly one of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hsa.attention.multiscale.cluster import KeyClusters
from hsa.attention.multiscale.leaf_families import ancestors
from hsa.attention.multiscale.queries import Queries
from hsa.attention.rounds import rooted
from hsa.tree.hierarchy import Hierarchy, Structure

ROWS_AT_ONCE = 2**22
"""Ancestors looked at together while lists are made: bounds the memory."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The result of `select`.

    Attributes:
        families: `[groups, heads or 1, width]` parent nodes of the selected leaf families, −1 where there are fewer.
        queries: the groups.
        counted: products of a query and a pooled key that the search took, a number or a tensor to sum; see `scored`.
        limit: `[queries]` keys before this leaf number may be seen; None: all.
        clusters: the clusters it was made with.
        made_for: digest of the hierarchy it was made for; None if made by hand: then it is not checked.
    """

    families: Tensor
    queries: Queries
    counted: int | Tensor = 0
    limit: Tensor | None = None
    clusters: KeyClusters | None = None
    made_for: str | None = None
    _partitions: list[tuple[Structure, Partition]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _ = self.queries.num_queries, self.queries.most  # now, while no compiler is watching

    def __repr__(self) -> str:
        groups, heads, width = self.families.shape
        return f"Selection({groups:,} groups, {heads} heads, up to {width} families)"

    @property
    def scored(self) -> int:
        """Number of products of a query and a pooled key that the search took, all heads together."""
        return int(self.counted.sum()) if isinstance(self.counted, Tensor) else self.counted

    @property
    def depends_on_queries(self) -> bool:
        return isinstance(self.counted, Tensor) or self.counted > 0

    def partition(self, hierarchy: Hierarchy) -> Partition:
        """Return the lists of nodes; made once, so that layers that share a selection share its lists."""
        forest, _ = rooted(hierarchy)
        if not self._partitions or self._partitions[0][0] is not forest.structure:
            with torch.inference_mode(False):  # later calls may need gradients
                self._partitions[:] = [
                    (forest.structure, list_nodes(self, forest))
                ]  # the forest may hold this selection itself
        return self._partitions[0][1]


@dataclass(frozen=True, eq=False)
class Partition:
    """For row = group · heads + head, the nodes `nodes[offsets[row] : offsets[row + 1]]`. `heads` is 1 if all share."""

    queries: Queries
    heads: int
    offsets: Tensor  # [groups * heads + 1]
    nodes: Tensor

    @property
    def lengths(self) -> Tensor:
        """[groups, heads] entries of every list."""
        return self.offsets.diff().view(self.queries.num_groups, self.heads)


@torch.compiler.disable
def list_nodes(selection: Selection, hierarchy: Hierarchy) -> Partition:
    """Find the frontier of every group and head of a rooted forest."""
    groups, heads, width = selection.families.shape
    table = ancestors(hierarchy)
    roots = selection.queries.tree[:, None, None].expand(groups, heads, 1)
    selected = torch.cat([roots, selection.families], -1).flatten(0, 1)
    step = max(1, ROWS_AT_ONCE // max(1, (width + 1) * table.shape[1]))
    lengths, nodes = [], []
    for begin in range(0, len(selected), step):
        some_lengths, some_nodes = _frontiers(selected[begin : begin + step], table, hierarchy)
        lengths.append(some_lengths)
        nodes.append(some_nodes)
    empty = selected.new_empty(0)
    offsets = torch.cat([selected.new_zeros(1), *lengths]).cumsum(0)
    return Partition(selection.queries, heads, offsets, torch.cat([empty, *nodes]))


def _frontiers(selected: Tensor, table: Tensor, hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Lengths and nodes of the lists of rows of selected nodes (−1: none)."""
    num_rows, size = len(selected), hierarchy.num_nodes
    row = torch.arange(num_rows, device=selected.device)[:, None, None]
    above = table[selected]  # at −1 this reads the last node; removed below
    keys = row * size + above
    keys = keys[(above >= 0) & (selected >= 0)[..., None]]
    expanded = keys.unique()  # sorted: row by row
    row, node = expanded // size, expanded % size
    counts = hierarchy.num_children[node]
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0, device=node.device)
    within = within - (ends - counts).repeat_interleave(counts)
    first_child = hierarchy.tensor("first_child")
    child = first_child[node].repeat_interleave(counts) + within
    # An expanded node below a root is itself among these children: find its index through its parent's.
    below = hierarchy.parent[node] >= 0
    parent = hierarchy.parent[node[below]]
    of_parent = torch.searchsorted(expanded, row[below] * size + parent)
    frontier = torch.ones_like(child, dtype=torch.bool)
    frontier[(ends - counts)[of_parent] + node[below] - first_child[parent]] = False
    return torch.bincount(row.repeat_interleave(counts)[frontier], minlength=num_rows), child[frontier]
