"""The forest as kernels want it: every leaf at the same depth, every family a run of rows.

Level 0 holds the leaves, level 1 their parents, the last level one row per tree. A branch that is shorter than the others is
lengthened by a chain of only children, which changes no result: an only child passes everything on. Then the rows of one
level, in the order of the leaves, are the families of the level above, one after another, and a few integers per row are the
whole plan.

Rows are numbered level by level from the leaves up, so that row i < leaves is leaf i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hsa.hierarchy import Hierarchy

MOST_ROWS = 4
"""Rows per node beyond which chains are not worth it: a comb whose leaves hang at every depth."""


@dataclass(frozen=True, eq=False)
class Levels:
    """A forest with chains. One entry per row, in numpy; tensors on the hierarchy's device below."""

    bounds: tuple[int, ...]  # rows bounds[l] : bounds[l + 1] are level l
    parent: np.ndarray  # row of the parent; −1 at the last level
    first_child: np.ndarray  # row of the first member; 0 at leaves
    num_children: np.ndarray  # 0 at leaves
    leaf_count: np.ndarray
    first_leaf: np.ndarray
    node: np.ndarray  # the node that the row stands for: its own, or the one at the foot of its chain
    row_of_node: np.ndarray  # [nodes] the lowest row that stands for it
    stands_for_leaf: np.ndarray  # booleans: a leaf, or a chain above a leaf that has siblings further up
    device: torch.device

    @property
    def num_leaves(self) -> int:
        return self.bounds[1]

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def num_levels(self) -> int:
        """Levels above the leaves."""
        return len(self.bounds) - 2

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The entries per row, int32, on the device, in one transfer."""
        columns = {
            "parent": self.parent,
            "first_child": self.first_child,
            "num_children": self.num_children,
            "leaf_count": self.leaf_count,
            "first_leaf": self.first_leaf,
            "stands_for_leaf": self.stands_for_leaf,
        }
        table = torch.from_numpy(np.stack([x.astype(np.int32) for x in columns.values()])).to(self.device)
        return dict(zip(columns, table, strict=True))


def levels(hierarchy: Hierarchy) -> Levels | None:
    """The rows of a rooted forest (`rounds.rooted`), built once; None if its branches are too unequal for chains.

    >>> plan = levels(Hierarchy.from_nested([[3, 2], [4]]))
    >>> plan.bounds  # nine tokens, three sentences, two documents
    (0, 9, 12, 14)
    >>> plan.num_children[9:].tolist()
    [3, 2, 4, 2, 1]
    """
    return hierarchy.cached("levels", lambda: _build(hierarchy))


def _build(hierarchy: Hierarchy) -> Levels | None:
    s = hierarchy.structure
    top = int(s.height.max(initial=0))
    above = np.where(s.parent < 0, top + 1, s.height[s.parent])  # the level of the parent
    span = above - s.height  # rows that stand for the node
    num_rows = int(span.sum())
    if num_rows > MOST_ROWS * hierarchy.num_nodes:
        return None
    first = np.cumsum(span) - span  # of every node, among the rows node by node
    node = np.repeat(np.arange(hierarchy.num_nodes), span)
    level = s.height[node] + np.arange(num_rows) - first[node]
    order = np.argsort(level * (hierarchy.num_leaves + 1) + s.first_leaf[node], kind="stable")
    place = np.empty(num_rows, np.int64)
    place[order] = np.arange(num_rows)
    # One step up: the next row of the same node, or the first row of its parent.
    last = first + span - 1
    up = np.arange(1, num_rows + 1)
    up[last] = np.where(s.parent < 0, -1, first[s.parent])
    parent = np.where(up < 0, -1, place[np.minimum(up, num_rows - 1)])[order]
    node, level = node[order], level[order]
    bounds = np.searchsorted(level, np.arange(top + 2))
    num_children = np.bincount(parent[parent >= 0], minlength=num_rows)
    first_child = np.cumsum(num_children) - num_children  # rows below the last level are families in order
    return Levels(
        bounds=tuple(bounds.tolist()),
        parent=parent,
        first_child=np.where(num_children > 0, first_child, 0),
        num_children=num_children,
        leaf_count=s.leaf_count[node],
        first_leaf=s.first_leaf[node],
        node=node,
        row_of_node=place[first],
        stands_for_leaf=s.is_leaf[node],
        device=hierarchy.device,
    )


def families(plan: Levels, level: int) -> np.ndarray:
    """[families + 1] the rows of `level` as families: bounds, counted from the level's first row.

    >>> families(levels(Hierarchy.from_nested([[3, 2], [4]])), 0).tolist()
    [0, 3, 5, 9]
    """
    begin, end = plan.bounds[level + 1], plan.bounds[level + 2]
    return np.concatenate([[0], np.cumsum(plan.num_children[begin:end])])


def level_bounds(plan: Levels) -> list[tuple[int, int]]:
    return list(pairwise(plan.bounds))
