"""Causal hierarchical three-way attention: a row of weights per leaf, over the pairs before it at every level.

At every level, leaf i sees the pairs of siblings of its ancestor that end before i; among the leaves, also itself. One
softmax runs over the pairs of all levels:

    logit(i; B, C) = scale · T(q_i, mean(k1, B), mean(k2, C)) + log leaf_count(B) + log leaf_count(C)

The leaves below a parent are cut into blocks of about as many queries as the parent has children, so that a level has as
many key rows as query rows. A softmax is computed per block; those of a leaf are combined by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.attention.multiscale.pyramid import pyramid
from hsa.attention.rounds import BUCKET_COST, padded_sizes, rooted, rounds
from hsa.research.trilinear.blocks import Blocks
from hsa.research.trilinear.call import Rows, TrilinearCall
from hsa.research.trilinear.streaming import attend_pairs
from hsa.tree.hierarchy import Hierarchy, ranges


def run(call: TrilinearCall) -> Tensor:
    """Run a call in core form, or with a full tensor."""
    forest, _ = rooted(call.forests.queries)
    plan = forest.cached("siblings before", lambda: _build(forest))
    q, *others = call.rows
    rows = Rows(q, *(pyramid(x, rounds(forest)) for x in others))
    blocks = [level.blocks(torch.promote_types(q.dtype, torch.float32)) for level in plan.levels]
    out, lse = attend_pairs(rows, call.full, blocks, call.scale)
    joined = _join(out.index_select(0, plan.real), lse.index_select(0, plan.real), plan.leaf, len(q))
    return joined.to(call.rows.v1.dtype)


def _join(out: Tensor, lse: Tensor, leaf: Tensor, leaves: int) -> Tensor:
    """Combine the entries of each leaf into one softmax, `[leaves, heads, value_dim]`."""
    # Every leaf sees at least itself, so the largest of its log-sum-exps is finite; others may be −∞.
    top = lse.new_full((leaves, lse.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, leaf[:, None].expand_as(lse), lse.detach(), "amax")
    weights = (lse - top.index_select(0, leaf)).exp()
    mass = torch.zeros_like(top).index_add(0, leaf, weights)
    shares = weights / mass.index_select(0, leaf)
    return out.new_zeros(leaves, *out.shape[1:]).index_add(0, leaf, out * shares[..., None].to(out.dtype))


@dataclass(frozen=True, eq=False)
class _Level:
    """Families of similar size, with the leaves below them in blocks. All tensors are `[blocks, size]`."""

    leaves: Tensor  # padding repeats a block's last leaf
    members: Tensor  # slots of the parent's children; padding repeats the last, which is before none of these leaves
    end: Tensor  # end of each member's leaves
    own: Tensor  # leaf index of a member that is a leaf; −1 for other members and padding
    log_count: Tensor

    def blocks(self, dtype: torch.dtype) -> Blocks:
        query = self.leaves[:, :, None]
        seen = (self.end[:, None] <= query) | (self.own[:, None] == query)
        bias = torch.where(seen, self.log_count[:, None].to(dtype), -torch.inf)
        return Blocks(self.leaves, self.members, self.members, bias, bias)


@dataclass(frozen=True, eq=False)
class _Plan:
    levels: tuple[_Level, ...]
    real: Tensor  # [entries] indices of queries of all blocks that are not padding
    leaf: Tensor  # [entries] leaf of each


def _build(forest: Hierarchy) -> _Plan:
    s, device = forest.structure, forest.device
    slot_of_node = rounds(forest).slot_of_node.cpu().numpy()
    bucket_cost = BUCKET_COST.get(device.type, BUCKET_COST["cuda"])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array)).to(device)

    parents = np.flatnonzero(s.num_children > 0)
    padded = padded_sizes(s.num_children[parents], bucket_cost)
    levels, real, leaf, begin = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for size in np.unique(padded):
        same_size = parents[padded == size]
        count = -(-s.leaf_count[same_size] // size)
        parent = np.repeat(same_size, count)[:, None]
        slots = np.arange(size)
        leaves = s.first_leaf[parent] + ranges(np.zeros_like(count), count)[:, None] * size + slots
        inside = leaves < s.end_leaf[parent]
        leaves = np.minimum(leaves, s.end_leaf[parent] - 1)
        present = slots < s.num_children[parent]
        nodes = s.first_child[parent] + np.minimum(slots, s.num_children[parent] - 1)
        levels.append(
            _Level(
                leaves=tensor(leaves),
                members=tensor(slot_of_node[nodes]),
                end=tensor(s.end_leaf[nodes]),
                own=tensor(np.where(present & s.is_leaf[nodes], s.first_leaf[nodes], -1)),
                log_count=tensor(np.log(s.leaf_count[nodes])),
            )
        )
        real.append(begin + np.flatnonzero(inside))
        leaf.append(leaves[inside])
        begin += leaves.size
    return _Plan(tuple(levels), tensor(np.concatenate(real)), tensor(np.concatenate(leaf)))
