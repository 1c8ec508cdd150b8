"""Position logits ε(i')·ε(B'): products of the positions of the highest distinct ancestors of a query and a node."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.multiscale.leaf_families import ancestors
from hsa.tree.hierarchy import Hierarchy


def highest_distinct(hierarchy: Hierarchy, parent: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest distinct ancestors of the leaves of `parent` and of `nodes`; −1 stands for the leaf itself."""
    table = ancestors(hierarchy)
    of_leaf, of_node = torch.broadcast_tensors(table[parent], table[nodes])
    distinct = of_leaf != of_node
    distinct[..., -1] = True
    depth = distinct.to(torch.int8).argmax(-1, keepdim=True)  # the first that is true
    return of_leaf.gather(-1, depth).squeeze(-1), of_node.gather(-1, depth).squeeze(-1)


def position_logits(positions: Tensor, hierarchy: Hierarchy, parent: Tensor, leaves: Tensor, nodes: Tensor) -> Tensor:
    """Return the position logits `[groups, 1 or heads, queries, entries]` of query groups and their lists.

    Args:
        positions: `[nodes, 1 or heads, dim]` position of every node, ε.
        parent: `[groups]` parent of each group's leaves.
        leaves: `[groups, queries]` leaf nodes of the queries.
        nodes: `[groups, 1 or heads, entries]` nodes of the lists.
    """
    of_leaf, of_node = highest_distinct(hierarchy, parent[:, None, None], nodes)
    heads = max(positions.shape[1], nodes.shape[1])

    def rows(node: Tensor) -> Tensor:
        """Return ε of nodes `[groups, 1 or heads, n]`, each in its head."""
        node = node.clamp(min=0).expand(-1, heads, -1)
        head = torch.arange(positions.shape[1], device=node.device).expand(heads)[:, None]
        # Not positions[node, head]: its gradient sorts the indices, which is slow if many of them are equal.
        flat = positions.flatten(0, 1).index_select(0, (node * positions.shape[1] + head).flatten())
        return flat.unflatten(0, node.shape)

    other = rows(of_node)
    shared = (rows(of_leaf) * other).sum(-1)  # one ancestor for the whole group
    own = rows(leaves[:, None]) @ other.transpose(-1, -2)  # the node is a sibling of the leaves: each has its own
    return torch.where((of_leaf < 0)[:, :, None], own, shared[:, :, None])
