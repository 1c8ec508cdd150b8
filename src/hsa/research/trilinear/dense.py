"""Backend "dense": the definition, with all pairs of all queries of a tree at once. For reading, tests and small trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.research.trilinear.blocks import visible
from hsa.tree.hierarchy import Hierarchy

MEMORY = 2**31
"""Bytes that logits and weights may take."""


def trilinear_attention(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    hierarchy: Hierarchy,
    *,
    first: Hierarchy,
    second: Hierarchy,
    tensor: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
) -> Tensor:
    """See `hsa.trilinear_attention`; arguments are checked, and q, k1, k2 in core form unless there is a full `tensor`."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    forests = (hierarchy, first, second, first, second)
    trees = (x.to(accurate).split(forest.lengths) for x, forest in zip((q, k1, k2, v1, v2), forests, strict=True))
    full = None if tensor is None else tensor.to(accurate)
    out = [_tree(rows, full, left, right, scale) for rows in zip(*trees, strict=True)]
    return torch.cat(out).to(v1.dtype) if hierarchy.num_trees else v1.new_zeros(0, *v1.shape[1:])


def _tree(rows: tuple[Tensor, ...], tensor: Tensor | None, left: int | None, right: int | None, scale: float) -> Tensor:
    q, k1, k2, v1, v2 = rows
    if tensor is None:
        logits = torch.einsum("iha,jha,kha->hijk", q, k1, k2)
    else:
        logits = torch.einsum("habc,iha,jhb,khc->hijk", tensor, q, k1, k2)
    logits = logits * scale
    if left is not None or right is not None:
        seen = visible(len(q), len(k1), 0, left, right).to(q.device)
        logits = logits.masked_fill(~(seen[:, :, None] & seen[:, None, :]), -torch.inf)
    weights = logits.flatten(2).softmax(-1).view_as(logits)
    return torch.einsum("hijk,jhe,khe->ihe", weights, v1, v2)


def why_not(arguments: dict[str, Any]) -> list[str]:
    """What it would keep is too much."""
    lengths = [np.array(arguments[name].lengths, float) for name in ("hierarchy", "first", "second")]
    entries = arguments["q"].shape[1] * float(np.prod(lengths, axis=0).sum())
    needed = 2 * entries * torch.promote_types(arguments["q"].dtype, torch.float32).itemsize
    if needed <= MEMORY:
        return []
    return [
        f"logits and weights of every triple would take {needed / 2**30:,.1f} GiB, more than {MEMORY / 2**30:.0f}: "
        "use backend='streaming', which never holds them"
    ]
