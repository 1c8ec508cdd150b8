"""The leaf families of a forest: the candidates of a selection.

A leaf family consists of the leaf members of one family; its parent node stands for it. Leaves directly under a root
(sinks) are always exact, so their families are not listed. The others are numbered tree by tree, by their first leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class LeafFamilies:
    """Leaf families below the roots of a forest."""

    nodes: Tensor  # [families] parent of each
    tree_offsets: np.ndarray  # [trees + 1] first family of every tree, and the number of families
    tree: Tensor  # [families] tree of each
    own: np.ndarray  # [leaves] family of every leaf; −1 for sinks
    before: np.ndarray  # [leaves] number of families that start before the leaf, in its tree and all earlier ones
    mixed: bool  # whether the parent of some family has children that are not leaves


def leaf_families(hierarchy: Hierarchy) -> LeafFamilies:
    """Return the leaf families of a forest, built once."""
    return hierarchy.cached("leaf_families", lambda: _build(hierarchy))


def _build(hierarchy: Hierarchy) -> LeafFamilies:
    s = hierarchy.structure
    parent_of_leaf = s.parent[s.leaf_nodes]
    below_root = s.parent[parent_of_leaf] >= 0
    parents, first = np.unique(parent_of_leaf[below_root], return_index=True)
    first = np.flatnonzero(below_root)[first]
    order = np.argsort(first)
    nodes, first = parents[order], first[order]
    number = np.full(len(s.parent), -1)
    number[nodes] = np.arange(len(nodes))
    leaf_children = np.bincount(parent_of_leaf, minlength=len(s.parent))

    def tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array).to(hierarchy.device)

    return LeafFamilies(
        nodes=tensor(nodes),
        tree_offsets=np.searchsorted(first, s.leaf_offsets),
        tree=tensor(s.tree[nodes]),
        own=number[parent_of_leaf],
        before=np.searchsorted(first, np.arange(hierarchy.num_leaves)),
        mixed=bool((leaf_children[nodes] < s.num_children[nodes]).any()),
    )


def ancestors(hierarchy: Hierarchy) -> Tensor:
    """Return `[nodes, depth + 1]` the ancestor of every node at every depth: itself at its own depth, −1 below it."""

    def build() -> Tensor:
        s = hierarchy.structure
        table = np.full((len(s.parent), hierarchy.depth + 1), -1)
        for depth, (begin, end) in enumerate(zip(s.depth_offsets, s.depth_offsets[1:], strict=False)):
            if depth:
                table[begin:end] = table[s.parent[begin:end]]
            table[begin:end, depth] = np.arange(begin, end)
        return torch.as_tensor(table).to(hierarchy.device)

    return hierarchy.cached("ancestors", build)
