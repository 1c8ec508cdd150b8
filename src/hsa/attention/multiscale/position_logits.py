"""ε(i')·ε(B'): positions of a query and a node, compared where their paths part."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.multiscale.leaf_families import ancestors
from hsa.tree.hierarchy import Hierarchy


def highest_distinct(hierarchy: Hierarchy, parent: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The highest distinct ancestors of a leaf below `parent` and of `nodes`; −1 where the leaf itself is its own."""
    table = ancestors(hierarchy)
    of_leaf, of_node = torch.broadcast_tensors(table[parent], table[nodes])
    parted = of_leaf != of_node
    parted[..., -1] = True  # at the latest
    depth = parted.to(torch.int8).argmax(-1, keepdim=True)  # the first
    return of_leaf.gather(-1, depth).squeeze(-1), of_node.gather(-1, depth).squeeze(-1)


def position_logits(positions: Tensor, hierarchy: Hierarchy, parent: Tensor, leaves: Tensor, nodes: Tensor) -> Tensor:
    """Position logits of query groups against their lists.

    Args:
        positions: [nodes, 1 or heads, dim].
        parent: [groups] the parent of each group's leaves.
        leaves: [groups, queries] leaf nodes.
        nodes: [groups, 1 or heads, entries].

    Returns:
        [groups, 1 or heads, queries, entries].
    """
    of_leaf, of_node = highest_distinct(hierarchy, parent[:, None, None], nodes)
    heads = max(positions.shape[1], nodes.shape[1])

    def rows(node: Tensor) -> Tensor:
        """ε of [groups, 1 or heads, n] nodes, each in its head."""
        node = node.clamp(min=0).expand(-1, heads, -1)
        head = torch.arange(positions.shape[1], device=node.device).expand(heads)[:, None]
        # Not positions[node, head], whose gradient sorts, and is slow where many stand below the same ancestor.
        flat = positions.flatten(0, 1).index_select(0, (node * positions.shape[1] + head).flatten())
        return flat.unflatten(0, node.shape)

    there = rows(of_node)
    shared = (rows(of_leaf) * there).sum(-1)  # the whole group stands below the same ancestor
    own = rows(leaves[:, None]) @ there.transpose(-1, -2)  # siblings of the leaves themselves
    return torch.where((of_leaf < 0)[:, :, None], own, shared[:, :, None])
