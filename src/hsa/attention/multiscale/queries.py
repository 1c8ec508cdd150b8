"""`Queries`: a set of queries, in groups that share a selection, and how many keys each may see."""

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

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Queries:
    """A set of queries over the keys of a forest. Queries of one group share the selection of what is exact.

    Args:
        offsets: `[groups + 1]`, the rows of q of every group.
        tree: `[groups]`, the tree whose keys the group attends to.
        visible: `[queries]` how many keys of its tree each query may see, in the order of the leaves; None: all.
        leaves: `[queries]` the leaf that each query is (self-attention, a decode step); None for cross-attention.

    >>> documents = Hierarchy.from_nested([[3, 2], [4]])
    >>> Queries.families(documents).offsets.tolist()  # by default, one group per leaf family
    [0, 3, 5, 9]
    >>> Queries.windows(documents, 4).offsets.tolist()  # windows of consecutive leaves inside each tree
    [0, 4, 5, 9]
    >>> five_questions_to_each = Queries(offsets=torch.tensor([0, 5, 10]), tree=torch.tensor([0, 1]))
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
        return len(self.tree)

    @cached_property
    def host_offsets(self) -> np.ndarray:
        return self.offsets.cpu().numpy()

    @cached_property
    def host_tree(self) -> np.ndarray:
        return self.tree.cpu().numpy()

    @cached_property
    def num_queries(self) -> int:
        return int(self.host_offsets[-1])

    @cached_property
    def group(self) -> Tensor:
        """[queries]"""
        return torch.arange(self.num_groups, device=self.tree.device).repeat_interleave(self.offsets.diff())

    @staticmethod
    def families(hierarchy: Hierarchy) -> Queries:
        """Make every leaf a query; consecutive leaves of one family form a group."""

        def build() -> Queries:
            s = hierarchy.structure
            changes = np.diff(s.parent[s.leaf_nodes], prepend=-2) != 0
            changes[s.leaf_offsets[:-1]] = True  # trees of a single leaf have no parent to tell them apart
            return _of_leaves(hierarchy, np.flatnonzero(changes))

        return hierarchy.cached(("queries", "families"), build)

    @staticmethod
    def windows(hierarchy: Hierarchy, size: int) -> Queries:
        """Make every leaf a query; windows of `size` consecutive leaves of a tree form a group."""
        size = check_count("size", size, "a positive number of queries per group", minimum=1)

        def build() -> Queries:
            offsets = hierarchy.structure.leaf_offsets
            groups = -(-np.diff(offsets) // size)
            first = np.cumsum(groups) - groups
            starts = np.repeat(offsets[:-1] - first * size, groups) + np.arange(int(groups.sum())) * size
            return _of_leaves(hierarchy, starts)

        return hierarchy.cached(("queries", size), build)

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return what `build` makes of these queries alone, built once."""
        if key not in self._cache:
            with torch.inference_mode(False):  # later calls may need gradients
                self._cache[key] = build()
        return self._cache[key]

    @cached_property
    def most(self) -> int:
        """Number of queries in the largest group."""
        return int(np.diff(self.host_offsets).max(initial=0))

    def checked(self, hierarchy: Hierarchy) -> Queries:
        """Return these queries, or raise an error that says what does not fit the forest. Checked once per forest."""
        if hierarchy.digest not in self._checked_for:
            self._check(hierarchy)
            self._checked_for.add(hierarchy.digest)
        return self

    def check_one_family(self, hierarchy: Hierarchy) -> None:
        """Check that every group stands below one parent, for positions, which are compared where paths part."""
        if self.leaves is None:
            raise InvalidInput(
                "positions",
                given="positions with queries that are no leaves",
                expected="positions=None",
                fix="a query outside the tree has no position in it",
            )
        s = hierarchy.structure
        parent = s.parent[s.leaf_nodes[self.leaves.cpu().numpy()]]
        starts = self.host_offsets[:-1][np.diff(self.host_offsets) > 0]
        if len(starts) and (np.maximum.reduceat(parent, starts) != np.minimum.reduceat(parent, starts)).any():
            raise InvalidInput(
                "queries",
                given="groups that span several leaf families, with positions",
                expected="groups inside one leaf family",
                fix="use Queries.families(hierarchy) or Queries.windows(hierarchy, 1)",
            )

    def _check(self, hierarchy: Hierarchy) -> None:
        for name in ("offsets", "tree", "visible", "leaves"):
            x = getattr(self, name)
            if not (x is None and name in ("visible", "leaves")) and (
                not isinstance(x, Tensor) or x.ndim != 1 or x.is_floating_point() or x.dtype == torch.bool
            ):
                raise InvalidInput(f"queries.{name}", given=_describe(x), expected="a vector of integers, as a tensor")
        offsets, tree = self.host_offsets, self.host_tree
        if len(offsets) != len(tree) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise InvalidInput(
                "queries.offsets",
                given=f"{offsets.tolist()[:5]}… for {len(tree)} groups",
                expected="0 first, then the end of every group",
            )
        if len(tree) and not (tree.min() >= 0 and tree.max() < hierarchy.num_trees):
            raise InvalidInput("queries.tree", given=f"{tree.min()}..{tree.max()}", expected=f"trees of {hierarchy}")
        for name, x in (("visible", self.visible), ("leaves", self.leaves)):
            if x is not None and x.shape != (self.num_queries,):
                raise InvalidInput(
                    f"queries.{name}", given=f"shape {tuple(x.shape)}", expected=f"({self.num_queries},), one per query"
                )
        if self.visible is not None and self.leaves is not None:
            raise InvalidInput(
                "queries",
                given="visible and leaves",
                expected="one of them",
                fix="a query that is a leaf sees what causal=True lets it see",
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
                    given=int(values[i]),
                    expected=f"{low[i]}..{high[i]}, in tree {of_tree[i]}",
                )


def _describe(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _of_leaves(hierarchy: Hierarchy, starts: np.ndarray) -> Queries:
    offsets = np.append(starts, hierarchy.num_leaves)
    tree = np.searchsorted(hierarchy.structure.leaf_offsets, starts, side="right") - 1
    device = hierarchy.device
    return Queries(
        offsets=torch.as_tensor(offsets).to(device),
        tree=torch.as_tensor(tree).to(device),
        leaves=torch.arange(hierarchy.num_leaves, device=device),
    )
