"""Blocks of queries that are computed together, and the leaves they see.

Without limits (causal, window), a block is a tree. With limits, the queries of a tree are cut into blocks so short that few
of the computed pairs are hidden. Blocks of equal length, reach and offset share one mask, so no padding is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.research.trilinear.call import Forests
from hsa.tree.hierarchy import Hierarchy, ranges

SHORTEST = 8
"""Smallest number of queries per block; products of shorter ones would be inefficient."""
BLOCKS_PER_REACH = 16
"""Ratio of visible leaves to queries of a block. At 16, at most a tenth more pairs are computed than are visible."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one shape. Biases are added to the logits; −∞ hides a leaf from a query."""

    queries: Tensor  # [blocks, size] rows of q
    first: Tensor  # [blocks, reach] rows of k1 and v1
    second: Tensor  # [blocks, other reach] rows of k2 and v2
    first_bias: Tensor | None = None  # [blocks or 1, size, reach]
    second_bias: Tensor | None = None  # [blocks or 1, size, other reach]


@dataclass(frozen=True, eq=False)
class Plan:
    """Blocks of all queries, and how to undo their order."""

    blocks: tuple[Blocks, ...]
    slot: Tensor  # [queries] index of every query among the queries of all blocks


def plan(forests: Forests, left: int | None, right: int | None) -> Plan:
    """Cut all queries into blocks, once per forest.

    Args:
        forests: Forests of the three sets of leaves.
        left, right: Largest distance of a leaf before and after a query; None for no limit. Limits need a single forest.
    """
    key = ("three-way blocks", forests.first, forests.second, left, right)
    return forests.queries.cached(key, lambda: _build(forests, left, right))


def _build(forests: Forests, left: int | None, right: int | None) -> Plan:
    hierarchy = forests.queries
    if left is None and right is None:
        offsets = [forest.structure.leaf_offsets for forest in forests]
        table = np.stack([x for o in offsets for x in (o[:-1], np.diff(o))] + [np.zeros(hierarchy.num_trees, int)], 1)
    else:
        table = _cut(hierarchy, left, right)
    begin, size, first_begin, _, second_begin, _, _ = table.T

    kinds, kind_of = np.unique(table[:, [1, 3, 5, 6]], axis=0, return_inverse=True)
    device = hierarchy.device
    blocks, order = [], []
    for kind, (queries, seen, other_seen, offset) in enumerate(kinds.tolist()):
        members = np.flatnonzero(kind_of.reshape(-1) == kind)

        def rows(begins: np.ndarray, count: int, members: np.ndarray = members) -> Tensor:
            return torch.as_tensor(begins[members][:, None] + np.arange(count)).to(device)

        bias = _bias(queries, seen, offset, left, right)
        bias = None if bias is None else bias.to(device)
        blocks.append(Blocks(rows(begin, queries), rows(first_begin, seen), rows(second_begin, other_seen), bias, bias))
        order.append(ranges(begin[members], size[members]))
    slot = np.empty(hierarchy.num_leaves, np.int64)
    slot[np.concatenate([np.empty(0, np.int64), *order])] = np.arange(hierarchy.num_leaves)
    return Plan(tuple(blocks), torch.as_tensor(slot).to(device))


def _cut(hierarchy: Hierarchy, left: int | None, right: int | None) -> np.ndarray:
    """Return a row per block: first query, queries, first visible leaf and their number (twice), offset among these."""
    start = hierarchy.structure.leaf_offsets[:-1]
    length = np.diff(hierarchy.structure.leaf_offsets)
    before = length - 1 if left is None else np.minimum(left, length - 1)
    after = length - 1 if right is None else np.minimum(right, length - 1)
    size = np.minimum(length, np.maximum(SHORTEST, -(-(before + after + 1) // BLOCKS_PER_REACH)))
    count = -(-length // size)
    start, length, before, after, size = (np.repeat(x, count) for x in (start, length, before, after, size))
    begin = ranges(np.zeros_like(count), count) * size
    end = np.minimum(begin + size, length)
    low, high = np.maximum(begin - before, 0), np.minimum(end + after, length)
    seen = start + low, high - low
    return np.stack([start + begin, end - begin, *seen, *seen, begin - low], 1)


def _bias(queries: int, seen: int, offset: int, left: int | None, right: int | None) -> Tensor | None:
    """Return 0 for visible leaves and −∞ for hidden ones, `[1, queries, leaves]`; None if all are visible."""
    mask = visible(queries, seen, offset, left, right)
    return None if bool(mask.all()) else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None]


def visible(queries: int, leaves: int, offset: int, left: int | None, right: int | None) -> Tensor:
    """Return which leaves are visible to each query, `[queries, leaves]`; query i is at leaf `offset` + i.

    >>> visible(2, 4, 1, left=1, right=0).int().tolist()
    [[1, 1, 0, 0], [0, 1, 1, 0]]
    """
    ahead = torch.arange(leaves) - (torch.arange(queries)[:, None] + offset)
    mask = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        mask &= ahead >= -left
    if right is not None:
        mask &= ahead <= right
    return mask
