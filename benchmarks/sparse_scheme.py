"""The paper's scheme for its operator (appendix E.4), as a baseline: products with sparse matrices, level by level.

Pairs of siblings are the entries of one sparse matrix per level. Their logits are gathered products; softmax, averages and
pooling are sums over entries (`index_add`, in float32); the downward pass is a gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hsa import Hierarchy
from hsa.attention.kernels.levels import Levels, families, levels


@dataclass(frozen=True)
class _Level:
    row: Tensor  # [pairs] member
    column: Tensor  # [pairs] sibling
    parent: Tensor  # [members]
    log_count: Tensor  # [members]
    share: Tensor  # [members] fraction of the parent's leaves
    parents: int


def _levels(tree: Hierarchy) -> list[_Level]:
    def build() -> list[_Level]:
        plan = levels(tree)
        assert plan is not None
        return [_level(plan, number) for number in range(plan.num_levels)]

    return tree.cached("sparse scheme", build)


def _level(plan: Levels, number: int) -> _Level:
    bounds = families(plan, number)
    sizes = np.diff(bounds)
    of_member = np.repeat(np.arange(len(sizes)), sizes)
    row = np.repeat(np.arange(int(bounds[-1])), sizes[of_member])
    offset = np.arange(len(row)) - np.repeat(np.cumsum(sizes[of_member]) - sizes[of_member], sizes[of_member])
    column = bounds[:-1][of_member[row]] + offset
    different = row != column
    (begin, end), (up, top) = list(pairwise(plan.bounds))[number], list(pairwise(plan.bounds))[number + 1]
    count = plan.leaf_count[begin:end]

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(plan.device)

    return _Level(
        tensor(row[different]),
        tensor(column[different]),
        tensor(of_member),
        tensor(np.log(count)),
        tensor(count / plan.leaf_count[up:top][of_member]),
        len(sizes),
    )


def sparse_scheme(q: Tensor, k: Tensor, v: Tensor, tree: Hierarchy) -> Tensor:
    """Compute `hsa.hierarchical_attention(q, k, v, tree, include_self=False)`, forward."""
    scale = q.shape[-1] ** -0.5
    pooled = [q.float(), k.float(), v.float()]
    inner = torch.full(q.shape[:2], -torch.inf, device=q.device)
    kept = []
    for level in _levels(tree):
        queries, keys, values = pooled
        logits = (queries[level.row] * keys[level.column]).sum(-1) * scale + level.log_count.float()[level.column, None]
        index = level.row[:, None].expand_as(logits)
        top = torch.full_like(inner, -torch.inf).scatter_reduce(0, index, logits, "amax")
        top = top.masked_fill(top == -torch.inf, 0)
        weights = (logits - top[level.row]).exp()
        mass = torch.zeros_like(inner).index_add(0, level.row, weights)
        outer = mass.log() + top
        y = torch.zeros_like(values).index_add(0, level.row, weights[..., None] * values[level.column])
        y = y / mass.masked_fill(mass == 0, 1)[..., None]
        both = torch.logaddexp(inner, outer)
        side = (outer - both).exp().nan_to_num(0)
        kept.append((level, y * side[..., None], (inner - both).exp().nan_to_num(0)))
        share = level.share.float()[:, None]
        up = torch.zeros(level.parents, q.shape[1], device=q.device)
        inner = up.index_add(0, level.parent, share * both)
        pooled = [
            x.new_zeros(level.parents, *x.shape[1:]).index_add(0, level.parent, share[..., None] * x) for x in pooled
        ]
    out, weight = torch.zeros_like(pooled[2]), torch.ones_like(inner)
    for level, y, down in reversed(kept):
        out = out[level.parent] + weight[level.parent][..., None] * y
        weight = weight[level.parent] * down
    return out.to(v.dtype)
