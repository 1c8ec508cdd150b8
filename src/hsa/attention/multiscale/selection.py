"""`Selection` of leaf families, and the lists of nodes that it leads to, one per query group and head.

A selection holds the leaf families that each group attends to leaf by leaf. The root, the parents of the selected
families and all their ancestors are *expanded*. The list of a group is the frontier: the children of expanded nodes
that are not expanded themselves. These are the leaves of the selected families and the largest nodes that contain no
selected family, so every key is in exactly one of them.
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
from hsa.tree.lasting import lasting

ROWS_AT_ONCE = 2**22
"""Number of ancestors to process at once when lists are built; bounds the memory."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Leaf families that each group of queries attends to exactly; the result of `select`.

    Attributes:
        families: `[groups, heads or 1, width]` parent nodes of the selected leaf families, padded with −1.
        queries: Groups of queries that share a selection.
        counted: Number of products of a query and a pooled key in the search, or a tensor to sum; see `scored`.
        limit: `[queries]` end of the keys that a query may see, as a leaf number; None for no limit.
        clusters: Clusters of the keys that the families belong to; None if the keys are in their own order.
        made_for: Digest of the hierarchy, to check that it is used with no other; None (made by hand) skips the check.

    >>> from hsa import select
    >>> q, k = torch.randn(2, 64, 2, 8).unbind(0)
    >>> select(q, k, Hierarchy.regular([64], (4, 4)), near=1, top_k=2)
    Selection(16 groups, 2 heads, up to 5 families)
    """

    families: Tensor
    queries: Queries
    counted: int | Tensor = 0
    limit: Tensor | None = None
    clusters: KeyClusters | None = None
    made_for: str | None = None
    _partitions: list[tuple[Structure, Partition]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _ = (
            self.queries.num_queries,
            self.queries.largest_group,
        )  # cached now, because torch.compile cannot trace them later

    def __repr__(self) -> str:
        groups, heads, width = self.families.shape
        return f"Selection({groups:,} groups, {heads} heads, up to {width} families)"

    @property
    def scored(self) -> int:
        """Number of products of a query and a pooled key in the search, summed over heads."""
        return int(self.counted.sum()) if isinstance(self.counted, Tensor) else self.counted

    @property
    def depends_on_queries(self) -> bool:
        """Whether queries were compared with keys to make this selection; otherwise the tree alone decides it."""
        return isinstance(self.counted, Tensor) or self.counted > 0

    def partition(self, hierarchy: Hierarchy) -> Partition:
        """Return the lists of nodes. They are built once, so that layers that share a selection share its lists."""
        forest, _ = rooted(hierarchy)
        if not self._partitions or self._partitions[0][0] is not forest.structure:
            with lasting():
                # The structure and not the forest: the forest may cache this selection, a cycle.
                self._partitions[:] = [(forest.structure, list_nodes(self, forest))]
        return self._partitions[0][1]


@dataclass(frozen=True, eq=False)
class Partition:
    """Lists of nodes, one per group and head; the result of `Selection.partition`.

    The list of row = group · heads + head is `nodes[offsets[row] : offsets[row + 1]]`.

    Attributes:
        queries: Groups of queries.
        heads: Number of heads; 1 if all heads share their lists.
        offsets: `[groups * heads + 1]` first entry of every list, and the number of entries.
        nodes: Nodes of all lists, one after another.

    >>> from hsa import select
    >>> q, k = torch.randn(2, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> select(q, k, tree).partition(tree).lengths[0]  # 4 leaves, 3 other families, 3 larger nodes
    tensor([10])
    """

    queries: Queries
    heads: int
    offsets: Tensor
    nodes: Tensor

    @property
    def lengths(self) -> Tensor:
        """Number of nodes in every list, `[groups, heads]`."""
        return self.offsets.diff().view(self.queries.num_groups, self.heads)


@torch.compiler.disable
def list_nodes(selection: Selection, hierarchy: Hierarchy) -> Partition:
    """Build the list of every group and head over a rooted forest."""
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
    """Return lengths and nodes of the lists of some rows of selected nodes (−1 is padding)."""
    num_rows, size = len(selected), hierarchy.num_nodes
    row = torch.arange(num_rows, device=selected.device)[:, None, None]
    above = table[selected]  # −1 reads the last node; the next lines remove it
    keys = row * size + above
    keys = keys[(above >= 0) & (selected >= 0)[..., None]]
    expanded = keys.unique()  # sorted, row by row
    row, node = expanded // size, expanded % size
    counts = hierarchy.num_children[node]
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0, device=node.device)
    within = within - (ends - counts).repeat_interleave(counts)
    first_child = hierarchy.tensor("first_child")
    child = first_child[node].repeat_interleave(counts) + within
    # An expanded node below a root is itself one of these children: compute its index from that of its parent.
    below = hierarchy.parent[node] >= 0
    parent = hierarchy.parent[node[below]]
    of_parent = torch.searchsorted(expanded, row[below] * size + parent)
    frontier = torch.ones_like(child, dtype=torch.bool)
    frontier[(ends - counts)[of_parent] + node[below] - first_child[parent]] = False
    return torch.bincount(row.repeat_interleave(counts)[frontier], minlength=num_rows), child[frontier]
