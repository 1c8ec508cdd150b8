"""The pyramid: pooled keys or values of every node."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.rounds import Rounds


def pyramid(leaves: Tensor, plan: Rounds) -> Tensor:
    """Return `[slots, …]`: the leaves, then the mean of the leaves below each other node, in the plan's slots."""
    parents: list[Tensor] = []
    for families in plan.rounds:
        parents.append(families.pool(families.split(families.source(leaves, parents))))
    return torch.cat([leaves.to(parents[0].dtype), *parents]) if parents else leaves


def in_order(leaves: Tensor, order: Tensor) -> Tensor:
    """Reorder rows `[leaves, heads, dim]` by clusters: slot `s` of head `h` gets row `order[h, s]`."""
    heads = leaves.shape[1]
    rows = order.T * heads + torch.arange(heads, device=order.device)
    return leaves.flatten(0, 1).index_select(0, rows.flatten()).view_as(leaves)
