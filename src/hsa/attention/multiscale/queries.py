"""`Queries`: a set of queries in groups that share a selection, and the number of keys that each query may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.lasting import lasting

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Queries:
    """Groups of queries over the keys of a forest. The queries of a group attend to the same leaf families exactly.

    Args:
        offsets: `[groups + 1]` first row of q of every group, and the number of rows.
        tree: `[groups]` tree whose keys the group attends to.
        visible: `[queries]` number of keys of its tree that each query may see, in leaf order; None for all.
        leaves: `[queries]` leaf that each query belongs to (self-attention, a decode step); None for cross-attention.

    >>> documents = Hierarchy.from_nested([[3, 2], [4]])
    >>> Queries.families(documents).offsets.tolist()  # the default: one group per leaf family
    [0, 3, 5, 9]
    >>> Queries.windows(documents, 4).offsets.tolist()  # windows of consecutive leaves inside each tree
    [0, 4, 5, 9]
    >>> Queries(offsets=torch.tensor([0, 5, 10]), tree=torch.tensor([0, 1]))  # five questions to each document
    Queries(10 queries in 2 groups)
    """

    offsets: Tensor
    tree: Tensor
    visible: Tensor | None = None
    leaves: Tensor | None = None
    _checked_for: set[str] = field(default_factory=set)
    _cache: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        kind = "leaves" if self.leaves is not None else "queries"
        return f"Queries({self.num_queries:,} {kind} in {self.num_groups:,} groups)"

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.tree)

    @cached_property
    def host_offsets(self) -> np.ndarray:
        """Copy of `offsets` in host memory."""
        return self.offsets.cpu().numpy()

    @cached_property
    def host_tree(self) -> np.ndarray:
        """Copy of `tree` in host memory."""
        return self.tree.cpu().numpy()

    @cached_property
    def num_queries(self) -> int:
        """Number of queries in all groups together."""
        return int(self.host_offsets[-1])

    @cached_property
    def group(self) -> Tensor:
        """Group of every query, `[queries]`."""
        return torch.arange(self.num_groups, device=self.tree.device).repeat_interleave(self.offsets.diff())

    @staticmethod
    def families(hierarchy: Hierarchy) -> Queries:
        """Return one query per leaf, in one group per leaf family (one per run of leaves if other nodes divide it)."""

        def build() -> Queries:
            s = hierarchy.structure
            changes = np.diff(s.parent[s.leaf_nodes], prepend=-2) != 0
            changes[s.leaf_offsets[:-1]] = True  # trees of a single leaf have no parents that could differ
            return _queries_of_leaves(hierarchy, np.flatnonzero(changes))

        return hierarchy.cached(("queries", "families"), build)

    @staticmethod
    def windows(hierarchy: Hierarchy, size: int) -> Queries:
        """Return one query per leaf, in groups of `size` consecutive leaves of a tree (fewer at its end)."""
        size = check_count("size", size, "a positive number of queries per group", minimum=1)

        def build() -> Queries:
            offsets = hierarchy.structure.leaf_offsets
            groups = -(-np.diff(offsets) // size)
            first = np.cumsum(groups) - groups
            starts = np.repeat(offsets[:-1] - first * size, groups) + np.arange(int(groups.sum())) * size
            return _queries_of_leaves(hierarchy, starts)

        return hierarchy.cached(("queries", size), build)

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return `build()`, which must depend on these queries and `key` only; later calls return the first result."""
        if key not in self._cache:
            with lasting():
                self._cache[key] = build()
        return self._cache[key]

    @cached_property
    def largest_group(self) -> int:
        """Number of queries in the largest group."""
        return int(np.diff(self.host_offsets).max(initial=0))

    def checked(self, hierarchy: Hierarchy) -> Queries:
        """Return these queries if they fit the forest, otherwise raise `InvalidInput`. Each forest is checked once."""
        if hierarchy.digest not in self._checked_for:
            self._check(hierarchy)
            self._checked_for.add(hierarchy.digest)
        return self

    def check_one_family(self, hierarchy: Hierarchy) -> None:
        """Check that the queries of every group have one parent, as the position logits require."""
        if self.leaves is None:
            raise InvalidInput(
                "positions",
                got="a tensor",
                expected="None for queries that are not leaves",
                fix="A query outside the tree has no position in it",
            )
        s = hierarchy.structure
        parent = s.parent[s.leaf_nodes[self.leaves.cpu().numpy()]]
        starts = self.host_offsets[:-1][np.diff(self.host_offsets) > 0]
        if len(starts) and (np.maximum.reduceat(parent, starts) != np.minimum.reduceat(parent, starts)).any():
            raise InvalidInput(
                "queries",
                got="a group that spans several families",
                expected="groups inside one leaf family each, with positions",
                fix="Use Queries.families(hierarchy) or Queries.windows(hierarchy, 1)",
            )

    def _check(self, hierarchy: Hierarchy) -> None:
        for name in ("offsets", "tree", "visible", "leaves"):
            x = getattr(self, name)
            if not (x is None and name in ("visible", "leaves")) and (
                not isinstance(x, Tensor) or x.ndim != 1 or x.is_floating_point() or x.dtype == torch.bool
            ):
                raise InvalidInput(f"queries.{name}", got=_describe(x), expected="a one-dimensional tensor of integers")
        offsets, tree = self.host_offsets, self.host_tree
        if len(offsets) != len(tree) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise InvalidInput(
                "queries.offsets",
                got=f"{offsets.tolist()[:5]}… for {len(tree)} groups",
                expected="0, then the end of every group in ascending order",
            )
        if len(tree) and not (tree.min() >= 0 and tree.max() < hierarchy.num_trees):
            raise InvalidInput(
                "queries.tree",
                got=f"{tree.min()} to {tree.max()}",
                expected=f"tree numbers from 0 to {hierarchy.num_trees - 1}",
            )
        for name, x in (("visible", self.visible), ("leaves", self.leaves)):
            if x is not None and x.shape != (self.num_queries,):
                raise InvalidInput(
                    f"queries.{name}",
                    got=f"shape {tuple(x.shape)}",
                    expected=f"one number per query, shape ({self.num_queries},)",
                )
        if self.visible is not None and self.leaves is not None:
            raise InvalidInput(
                "queries",
                got="both",
                expected="either `visible` or `leaves`",
                fix="For queries that are leaves, causal=True limits the keys they see",
            )
        first, end = hierarchy.structure.leaf_offsets[:-1], hierarchy.structure.leaf_offsets[1:]
        of_tree = np.repeat(tree, np.diff(offsets))
        limits = {"visible": (0 * of_tree, (end - first)[of_tree]), "leaves": (first[of_tree], end[of_tree] - 1)}
        for name, (low, high) in limits.items():
            x = getattr(self, name)
            if x is None:
                continue
            values = x.cpu().numpy()
            bad = np.flatnonzero((values < low) | (values > high))
            if len(bad):
                i = int(bad[0])
                raise InvalidInput(
                    f"queries.{name}[{i}]",
                    got=int(values[i]),
                    expected=f"a number from {low[i]} to {high[i]}, in tree {of_tree[i]}",
                )


def _describe(x: object) -> str:
    return f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _queries_of_leaves(hierarchy: Hierarchy, starts: np.ndarray) -> Queries:
    """Return one query per leaf, in groups that start at these leaves."""
    offsets = np.append(starts, hierarchy.num_leaves)
    tree = np.searchsorted(hierarchy.structure.leaf_offsets, starts, side="right") - 1
    device = hierarchy.device
    return Queries(
        offsets=torch.as_tensor(offsets).to(device),
        tree=torch.as_tensor(tree).to(device),
        leaves=torch.arange(hierarchy.num_leaves, device=device),
    )
