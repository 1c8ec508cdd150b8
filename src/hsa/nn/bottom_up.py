"""Bottom-up encoding: attention within each family, which then becomes one vector, from the leaves up to the roots.

Each family is processed once, after all its members, so that attention costs only the sum over families. `bottom_up` uses
the same weights on every level: it is a recursive network over the tree, for data whose meaning is composed step by step
(expressions, parse trees). `fold` takes any function that maps the members of families to vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hsa.nn.grouped_linear import Groups
from hsa.nn.pooling import segment_mean
from hsa.tree.hierarchy import Hierarchy, Structure, ranges
from hsa.tree.positions import NodePositions


@dataclass(frozen=True, eq=False)
class Step:
    """Families of one height.

    Attributes:
        height: Height of their parents; 1 for leaf families.
        rows: Row of each member among the leaves followed by the parents of earlier steps, `[members]`.
        nodes: Node of each member in the hierarchy, `[members]`.
        families: Forest in which each family is a flat tree.
        sizes: Number of members of each family, `[families]`.
    """

    height: int
    rows: Tensor
    nodes: Tensor
    families: Hierarchy
    sizes: Tensor


def steps(hierarchy: Hierarchy) -> tuple[list[Step], Tensor]:
    """Return the steps of a fold in order, and the row of every root after the last; both are cached in the hierarchy."""

    def build() -> tuple[list[Step], Tensor]:
        s, device = hierarchy.structure, hierarchy.device
        row = np.zeros(hierarchy.num_nodes, np.int64)
        row[s.leaf_nodes] = np.arange(hierarchy.num_leaves)
        done = hierarchy.num_leaves
        steps = []
        for height in range(1, int(s.height.max(initial=0)) + 1):
            parents = np.flatnonzero(s.height == height)
            sizes = s.num_children[parents]
            members = ranges(s.first_child[parents], sizes)
            steps.append(
                Step(
                    height,
                    torch.from_numpy(row[members]).to(device),
                    torch.from_numpy(members).to(device),
                    Hierarchy.flat(sizes).to(device),
                    torch.from_numpy(sizes).to(device),
                )
            )
            row[parents] = done + np.arange(len(parents))
            done += len(parents)
        return steps, torch.from_numpy(row[: hierarchy.num_trees]).to(device)

    return hierarchy.cached("bottom up", build)


def fold(x: Tensor, hierarchy: Hierarchy, combine: Callable[[Tensor, Step], Tensor]) -> tuple[Tensor, Hierarchy]:
    """Combine the members of each family into one vector, from the leaf families up to the roots.

    Args:
        x: Leaf vectors, `[leaves, width]`.
        hierarchy: Forest of the leaves.
        combine: Function from the members of a step, `[members, width]`, to a vector per family, `[families, width]`.

    Returns:
        A vector per root, `[trees, width]`, and the forest of the roots alone. A tree of one leaf keeps its vector.

    >>> tree = Hierarchy.from_nested([[3, 1]])
    >>> fold(torch.ones(4, 1), tree, lambda members, step: segment_mean(members, step.sizes) + step.height)[0].item()
    4.0
    """
    plan, roots = steps(hierarchy)
    ready = x
    for step in plan:
        ready = torch.cat([ready, combine(ready.index_select(0, step.rows), step)])
    bare = hierarchy.cached(
        "roots alone",
        lambda: Hierarchy(
            Structure.from_num_children(np.zeros(hierarchy.num_trees, np.int64)), device=hierarchy.device
        ),
    )
    return ready.index_select(0, roots), bare


def attend(
    members: Tensor,
    step: Step,
    layers: Iterable[nn.Module],
    projections: Iterable[nn.Module],
    features: dict[str, Tensor] | None,
    node_positions: NodePositions,
) -> Tensor:
    """Apply layers of attention within every family of a step; without `projections`, positions are not used."""
    layers = list(layers)
    projected: list[nn.Module | None] = list(projections) or [None] * len(layers)
    groups = Groups((len(members),), None, None)
    for layer, project in zip(layers, projected, strict=True):
        positions = None
        if project is not None:
            row = node_positions.row.index_select(0, step.nodes)
            # The forest of families starts with its roots, which have no position (row 0).
            positions = project(features, torch.cat([row.new_zeros(step.families.num_trees), row]))
        members = layer(members, step.families, groups, positions)
    return members


def bottom_up(
    x: Tensor,
    hierarchy: Hierarchy,
    layers: Iterable[nn.Module],
    projections: Iterable[nn.Module],
    features: dict[str, Tensor] | None,
    node_positions: NodePositions,
) -> tuple[Tensor, Hierarchy]:
    """Apply the same layers to the families of every level; each family then becomes the mean of its members.

    Args:
        x: Leaf vectors, `[leaves, width]`.
        hierarchy: Forest of the leaves.
        layers: Encoder layers.
        projections: Position projection of each layer; empty for no positions.
        features: Features of the distinct positions.
        node_positions: Positions of the nodes.

    Returns:
        A vector per root, `[trees, width]`, and the forest of the roots alone.
    """
    layers, projections = list(layers), list(projections)

    def mean(members: Tensor, step: Step) -> Tensor:
        return segment_mean(attend(members, step, layers, projections, features, node_positions), step.sizes)

    return fold(x, hierarchy, mean)
