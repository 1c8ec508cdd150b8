"""Pooled keys and values of every node, and where nodes are in them."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.rounds import Rounds


def pyramid(leaves: Tensor, plan: Rounds) -> Tensor:
    """`[slots, …]`: the leaves, then the mean over the leaves below each other node, in the plan's slots."""
    parents: list[Tensor] = []
    for families in plan.rounds:
        parents.append(families.pool(families.split(families.source(leaves, parents))))
    return torch.cat([leaves.to(parents[0].dtype), *parents]) if parents else leaves


def in_order(leaves: Tensor, order: Tensor) -> Tensor:
    """Rows `[leaves, heads, dim]` put where `order[head, slot]` says."""
    heads = leaves.shape[1]
    rows = order.T * heads + torch.arange(heads, device=order.device)
    return leaves.flatten(0, 1).index_select(0, rows.flatten()).view_as(leaves)
