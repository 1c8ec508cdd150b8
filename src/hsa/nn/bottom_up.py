"""Bottom up: every family attends among its members and becomes one vector, up to the roots.

A node is worked on once, when all its members are ready, so the cost is that of the families alone. `bottom_up` has the same
weights on every level: a recursive network over the tree, for data whose meaning is composed step by step (expressions,
parse trees). `fold` leaves it to its caller what families of a height become.
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
    """The families of one height, each a tree of its own."""

    height: int  # of the parents: 1 for families of leaves
    rows: Tensor  # [members] among the leaves and the parents of earlier steps
    nodes: Tensor  # [members]
    families: Hierarchy
    sizes: Tensor


def steps(hierarchy: Hierarchy) -> tuple[list[Step], Tensor]:
    """The order of the work, and the row of every root when it is done. Built once per hierarchy."""

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


def fold(x: Tensor, hierarchy: Hierarchy, become: Callable[[Tensor, Step], Tensor]) -> tuple[Tensor, Hierarchy]:
    """Every family becomes one vector, those of leaves first, those of roots last; a tree of one leaf is that leaf.

    Args:
        x: `[leaves, width]`
        become: of the members of a step `[members, width]` makes a vector for each of its families, `[families, width]`.

    Returns a vector per root, and the forest of these roots alone.

    >>> tree = Hierarchy.from_nested([[3, 1]])
    >>> fold(torch.ones(4, 1), tree, lambda members, step: segment_mean(members, step.sizes) + step.height)[0].item()
    4.0
    """
    plan, roots = steps(hierarchy)
    ready = x
    for step in plan:
        ready = torch.cat([ready, become(ready.index_select(0, step.rows), step)])
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
    """Layers of attention inside every family of a step; without projections, without positions."""
    layers = list(layers)
    projected: list[nn.Module | None] = list(projections) or [None] * len(layers)
    groups = Groups((len(members),), None, None)
    for layer, project in zip(layers, projected, strict=True):
        positions = None
        if project is not None:
            row = node_positions.row.index_select(0, step.nodes)
            # The forest of families has its roots in front, which lie nowhere.
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
    """The same layers on every level, then the mean. A vector per root, and the forest of these roots alone."""
    layers, projections = list(layers), list(projections)

    def mean(members: Tensor, step: Step) -> Tensor:
        return segment_mean(attend(members, step, layers, projections, features, node_positions), step.sizes)

    return fold(x, hierarchy, mean)
