"""`Queries`: who asks, in which groups, and how much each may see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class Queries:
    """A set of queries over the keys of a forest. Queries of one group share the choice of what is exact.

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

    @property
    def num_groups(self) -> int:
        return len(self.tree)

    @cached_property
    def host_offsets(self) -> np.ndarray:
        return self.offsets.cpu().numpy()

    @cached_property
    def host_tree(self) -> np.ndarray:
        return self.tree.cpu().numpy()

    @property
    def num_queries(self) -> int:
        return int(self.host_offsets[-1])

    @cached_property
    def group(self) -> Tensor:
        """[queries]"""
        return torch.arange(self.num_groups, device=self.tree.device).repeat_interleave(self.offsets.diff())

    @staticmethod
    def families(hierarchy: Hierarchy) -> Queries:
        """Every leaf asks; consecutive leaves of one family form a group."""

        def build() -> Queries:
            s = hierarchy.structure
            changes = np.diff(s.parent[s.leaf_nodes], prepend=-2) != 0
            changes[s.leaf_offsets[:-1]] = True  # trees of a single leaf have no parent to tell them apart
            return _of_leaves(hierarchy, np.flatnonzero(changes))

        return hierarchy.cached(("queries", "families"), build)

    @staticmethod
    def windows(hierarchy: Hierarchy, size: int) -> Queries:
        """Every leaf asks; windows of `size` consecutive leaves of a tree form a group."""
        if not isinstance(size, int) or size < 1:
            raise InvalidInput("size", given=size, expected="a positive number of queries per group")

        def build() -> Queries:
            offsets = hierarchy.structure.leaf_offsets
            groups = -(-np.diff(offsets) // size)
            first = np.cumsum(groups) - groups
            starts = np.repeat(offsets[:-1] - first * size, groups) + np.arange(int(groups.sum())) * size
            return _of_leaves(hierarchy, starts)

        return hierarchy.cached(("queries", size), build)

    def checked(self, hierarchy: Hierarchy) -> Queries:
        """These queries, or an error that says what does not fit the forest."""
        offsets, tree = self.host_offsets, self.host_tree
        if offsets.ndim != 1 or len(offsets) != len(tree) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
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
        return self


def _of_leaves(hierarchy: Hierarchy, starts: np.ndarray) -> Queries:
    offsets = np.append(starts, hierarchy.num_leaves)
    tree = np.searchsorted(hierarchy.structure.leaf_offsets, starts, side="right") - 1
    device = hierarchy.device
    return Queries(
        offsets=torch.as_tensor(offsets).to(device),
        tree=torch.as_tensor(tree).to(device),
        leaves=torch.arange(hierarchy.num_leaves, device=device),
    )
