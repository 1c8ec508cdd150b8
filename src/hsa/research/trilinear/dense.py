"""Backend "dense": the definition, computed for all triples of a tree at once. For reference, tests and small trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hsa.research.trilinear.blocks import visible
from hsa.research.trilinear.call import Rows, TrilinearCall

MEMORY = 2**31
"""Maximum number of bytes of logits and weights."""


def run(call: TrilinearCall) -> Tensor:
    """Run a call in core form, or with a full tensor."""
    dtype = call.rows.v1.dtype
    accurate = torch.promote_types(dtype, torch.float32)
    queries, first, second = call.forests
    forests = (queries, first, second, first, second)
    trees = (x.to(accurate).split(forest.lengths) for x, forest in zip(call.rows, forests, strict=True))
    full = None if call.full is None else call.full.to(accurate)
    out = [_tree(Rows(*rows), full, call) for rows in zip(*trees, strict=True)]
    return torch.cat(out).to(dtype) if queries.num_trees else call.rows.v1.new_zeros(0, *call.rows.v1.shape[1:])


def _tree(rows: Rows, tensor: Tensor | None, call: TrilinearCall) -> Tensor:
    q, k1, k2, v1, v2 = rows
    if tensor is None:
        logits = torch.einsum("iha,jha,kha->hijk", q, k1, k2)
    else:
        logits = torch.einsum("habc,iha,jhb,khc->hijk", tensor, q, k1, k2)
    logits = logits * call.scale
    if call.limited:
        seen = visible(len(q), len(k1), 0, call.left, call.right).to(q.device)
        logits = logits.masked_fill(~(seen[:, :, None] & seen[:, None, :]), -torch.inf)
    weights = logits.flatten(2).softmax(-1).view_as(logits)
    return torch.einsum("hijk,jhe,khe->ihe", weights, v1, v2)


def why_not(call: TrilinearCall) -> list[str]:
    """Return reasons to refuse a call: too much memory."""
    q = call.rows.q
    lengths = [np.array(forest.lengths, float) for forest in call.forests]
    entries = q.shape[1] * float(np.prod(lengths, axis=0).sum())
    needed = 2 * entries * torch.promote_types(q.dtype, torch.float32).itemsize
    if needed <= MEMORY:
        return []
    return [
        f"logits and weights of all triples would take {needed / 2**30:,.1f} GiB, more than {MEMORY / 2**30:.0f}: "
        "use backend='streaming', which never stores them"
    ]
