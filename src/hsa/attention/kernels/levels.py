"""The forest as kernels read it: every leaf is at the same depth, and every family is a slice of rows.

Level 0 holds the leaves, level 1 their parents, the last level one row per tree. Branches that are shorter than others are
extended by a chain of only children, which changes no result, because an only child passes everything on. The rows of a
level, in the order of the leaves, are then the members of the families of the level above, one family after another, and a
few integers per row are the whole plan.

Rows are numbered level by level from the leaves up, so that row i < leaves is leaf i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy, Structure
from hsa.tree.lasting import lasting

T = TypeVar("T")

MOST_ROWS = 4
"""Maximum number of rows per node. Trees with leaves at very different depths, such as combs, would need more."""


@dataclass(frozen=True, eq=False)
class Levels:
    """Forest with chains, as numpy arrays with one entry per row unless noted otherwise."""

    structure: Structure
    bounds: tuple[int, ...]  # rows bounds[l] : bounds[l + 1] are level l
    parent: np.ndarray  # row of the parent; −1 at the last level
    num_children: np.ndarray  # 0 at leaves
    node: np.ndarray  # node that the row stands for; in a chain, the node at its lower end
    row_of_node: np.ndarray  # [nodes] lowest row that stands for the node
    device: torch.device
    _cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return `build()`, called once per key."""
        return self._cache[key] if key in self._cache else self._build(key, build)

    @torch.compiler.disable
    def _build(self, key: Any, build: Callable[[], T]) -> T:
        with lasting():
            self._cache[key] = value = build()
        return value

    @cached_property
    def first_child(self) -> np.ndarray:
        """Row of the first member of every row's family; 0 at leaves. Families are in the order of their parents."""
        return np.where(self.num_children > 0, np.cumsum(self.num_children) - self.num_children, 0)

    @cached_property
    def leaf_count(self) -> np.ndarray:
        return self.structure.leaf_count[self.node]

    @cached_property
    def first_leaf(self) -> np.ndarray:
        return self.structure.first_leaf[self.node]

    @cached_property
    def stands_for_leaf(self) -> np.ndarray:
        """Whether every row is a leaf or belongs to the chain above a leaf."""
        return self.structure.is_leaf[self.node]

    @property
    def num_leaves(self) -> int:
        return self.bounds[1]

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def num_levels(self) -> int:
        """Number of levels above the leaves."""
        return len(self.bounds) - 2

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Arrays that kernels read, as int32 tensors on the device, copied in one transfer."""
        columns = {
            "parent": self.parent,
            "first_child": self.first_child,
            "num_children": self.num_children,
            "leaf_count": self.leaf_count,
        }
        table = torch.from_numpy(np.stack([x.astype(np.int32) for x in columns.values()])).to(self.device)
        return dict(zip(columns, table, strict=True))


def levels(hierarchy: Hierarchy) -> Levels | None:
    """Return the rows of a rooted forest (`rounds.rooted`), built once; None if chains would need too many rows.

    >>> plan = levels(Hierarchy.from_nested([[3, 2], [4]]))
    >>> plan.bounds  # nine tokens, three sentences, two documents
    (0, 9, 12, 14)
    >>> plan.num_children[9:].tolist()
    [3, 2, 4, 2, 1]
    """
    return hierarchy.cached("levels", lambda: _build(hierarchy))


def _build(hierarchy: Hierarchy) -> Levels | None:
    s = hierarchy.structure
    offsets = s.depth_offsets
    if offsets[-1] - offsets[-2] == hierarchy.num_leaves:  # all leaves have the same depth: depths are levels
        node = np.concatenate([np.arange(begin, end) for begin, end in pairwise(offsets)][::-1])
        row_of_node = np.empty_like(node)
        row_of_node[node] = np.arange(len(node))
        above = s.parent[node]
        parent = np.where(above < 0, -1, row_of_node[above])
        bounds = np.concatenate([[0], np.cumsum(np.diff(offsets)[::-1])])
    else:
        chained = _with_chains(hierarchy)
        if chained is None:
            return None
        node, row_of_node, parent, bounds = chained
    num_children = np.bincount(parent[: bounds[-2]], minlength=len(node))
    return Levels(s, tuple(bounds.tolist()), parent, num_children, node, row_of_node, hierarchy.device)


def _with_chains(hierarchy: Hierarchy) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the node of every row, the lowest row of every node, the parent of every row, and the bounds of the levels."""
    s, leaves = hierarchy.structure, hierarchy.num_leaves
    top = int(s.height.max(initial=0))
    lowest = np.maximum(s.height, 1)  # lowest level of the node; level 0, the leaves, is handled separately
    span = np.where(s.parent < 0, top + 1, s.height[s.parent]) - lowest  # number of rows of the node from there on
    num_rows = int(span.sum())
    if leaves + num_rows > MOST_ROWS * hierarchy.num_nodes:
        return None
    first = np.cumsum(span) - span  # first row of every node, with rows numbered node by node
    node = np.repeat(np.arange(hierarchy.num_nodes), span)
    level = lowest[node] + np.arange(num_rows) - first[node]
    order = np.argsort(level * (leaves + 1) + s.first_leaf[node], kind="stable")
    row = np.empty(num_rows + 1, np.int64)  # final number of every row; one more entry at the end, for `up`
    row[order] = leaves + np.arange(num_rows)
    # Parent of every row: the next row of the same node, or the first row of its parent.
    up = row[1:].copy()
    up[(first + span - 1)[span > 0]] = np.where(s.parent < 0, -1, row[first[s.parent]])[span > 0]
    of_leaf = np.where(span > 0, row[first], row[first[s.parent]])[s.leaf_nodes]
    row_of_node = row[first]
    row_of_node[s.leaf_nodes] = np.arange(leaves)
    bounds = np.concatenate([[0], leaves + np.searchsorted(level[order], np.arange(1, top + 2))])
    return np.concatenate([s.leaf_nodes, node[order]]), row_of_node, np.concatenate([of_leaf, up[order]]), bounds


def families(plan: Levels, level: int) -> np.ndarray:
    """Return the bounds of the families of a level, `[families + 1]`, counted from the first row of the level.

    >>> families(levels(Hierarchy.from_nested([[3, 2], [4]])), 0).tolist()
    [0, 3, 5, 9]
    """
    begin, end = plan.bounds[level + 1], plan.bounds[level + 2]
    return np.concatenate([[0], np.cumsum(plan.num_children[begin:end])])
