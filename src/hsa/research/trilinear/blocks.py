"""Which queries are worked on together, and which leaves they see: blocks of one shape side by side.

Without limits a block is a tree. With them (causal, window) the queries of a tree are cut into blocks so short that few
pairs are worked on only to be hidden. Blocks of equal length, reach and offset share one mask, so none is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy, ranges

SHORTEST = 8
"""Queries of a block; shorter ones would leave the products too small."""
BLOCKS_PER_REACH = 16
"""A block of 1/16 of what its queries see works on at most a tenth more pairs than they see."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one shape. Biases are added to the logits: −∞ hides a leaf from a query."""

    queries: Tensor  # [blocks, size] rows of q
    first: Tensor  # [blocks, reach] rows of k1 and v1
    second: Tensor  # [blocks, other reach] rows of k2 and v2
    first_bias: Tensor | None = None  # [blocks or 1, size, reach]
    second_bias: Tensor | None = None  # [blocks or 1, size, other reach]


@dataclass(frozen=True, eq=False)
class Plan:
    blocks: tuple[Blocks, ...]
    place: Tensor  # [queries] of every query among those of all blocks, one after another


def plan(hierarchy: Hierarchy, first: Hierarchy, second: Hierarchy, left: int | None, right: int | None) -> Plan:
    """Blocks of all queries; built once per hierarchy.

    `left`, `right`: how far before and after a query a leaf may lie; None for no limit. Limits are for one set of leaves.
    """
    key = ("three-way blocks", first, second, left, right)
    return hierarchy.cached(key, lambda: _build(hierarchy, first, second, left, right))


def _build(hierarchy: Hierarchy, first: Hierarchy, second: Hierarchy, left: int | None, right: int | None) -> Plan:
    if left is None and right is None:
        offsets = [h.structure.leaf_offsets for h in (hierarchy, first, second)]
        table = np.stack([x for o in offsets for x in (o[:-1], np.diff(o))] + [np.zeros(hierarchy.num_trees, int)], 1)
    else:
        table = _cut(hierarchy, left, right)
    begin, size, first_begin, _, second_begin, _, _ = table.T

    kinds, kind_of = np.unique(table[:, [1, 3, 5, 6]], axis=0, return_inverse=True)
    device = hierarchy.device
    blocks, order = [], []
    for kind, (queries, seen, other_seen, offset) in enumerate(kinds.tolist()):
        chosen = np.flatnonzero(kind_of.reshape(-1) == kind)

        def rows(begins: np.ndarray, count: int, chosen: np.ndarray = chosen) -> Tensor:
            return torch.as_tensor(begins[chosen][:, None] + np.arange(count)).to(device)

        bias = _bias(queries, seen, offset, left, right)
        bias = None if bias is None else bias.to(device)
        blocks.append(Blocks(rows(begin, queries), rows(first_begin, seen), rows(second_begin, other_seen), bias, bias))
        order.append(ranges(begin[chosen], size[chosen]))
    place = np.empty(hierarchy.num_leaves, np.int64)
    place[np.concatenate([np.empty(0, np.int64), *order])] = np.arange(hierarchy.num_leaves)
    return Plan(tuple(blocks), torch.as_tensor(place).to(device))


def _cut(hierarchy: Hierarchy, left: int | None, right: int | None) -> np.ndarray:
    """A row per block: first query, queries, first leaf seen, leaves seen (twice), and how far the block lies in them."""
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
    """0 where a query sees a leaf, else −∞, `[1, queries, leaves]`; None where all see all."""
    mask = visible(queries, seen, offset, left, right)
    return None if bool(mask.all()) else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None]


def visible(queries: int, leaves: int, offset: int, left: int | None, right: int | None) -> Tensor:
    """Which leaves each query sees, `[queries, leaves]`; query i stands at leaf `offset` + i.

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
