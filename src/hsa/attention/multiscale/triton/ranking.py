"""Tables, scores and ranks that both searches for leaf families share.

A rank is an integer: the bits of the score in its upper half, the inverted number of the candidate in its lower half, so
that of equal scores the lower number wins. A single query ranks by its logit, which needs no softmax.

Leaf families are numbered by first leaf, so those below one node are consecutive. A comparison of numbers therefore tells
whether a node contains a near family, and the first candidates are the children along the paths from the root to the two
ends of the near range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.levels import Levels, levels
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.tree.hierarchy import Hierarchy

QUERIES = 64
"""Maximum number of queries to score at once."""
NONE: tl.constexpr = tl.constexpr(-(2**63))
"""Rank of a missing candidate."""
LAST: tl.constexpr = tl.constexpr(2**31 - 1)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
FIELDS: tl.constexpr = tl.constexpr(8)
FIRST_CHILD: tl.constexpr = tl.constexpr(0)
SLOTS: tl.constexpr = tl.constexpr(1)
OWN_SLOT: tl.constexpr = tl.constexpr(2)
LOG_COUNT: tl.constexpr = tl.constexpr(3)
END_LEAF: tl.constexpr = tl.constexpr(4)
FIRST_FAMILY: tl.constexpr = tl.constexpr(5)
END_FAMILY: tl.constexpr = tl.constexpr(6)
FOOT: tl.constexpr = tl.constexpr(7)


@dataclass(frozen=True, eq=False)
class SearchTables:
    """Tables of a forest for the searches.

    `rows` has a line of eight fields per row of the plan. All rows of one node describe that node:
        first_child: Row of the first member; rows of members are consecutive.
        slots: Number of rows that replace the node in a descent: its members. A node with leaf members only has one slot,
            for itself; a leaf has none, because it is not a candidate.
        own_slot: Slot that the node itself takes, in place of its first leaf member; −1 if it has no leaf members.
        log_count: Logarithm to base 2 of the number of leaves below it, as the bits of a float32.
        end_leaf: End of these leaves.
        first_family, end_family: Range of the leaf families at and below it.
        foot: Lowest row of its node.
    `paths` has the rows from each family up to the child of its root, padded with −1.
    """

    rows: Tensor  # [rows, 8] int32
    family_rows: Tensor  # [families] int32, row of each
    family_start: Tensor  # [families] int64, first leaf of each, ascending
    tree_families: Tensor  # [trees + 1] int64, first family of every tree, and the number of families
    paths: Tensor  # [families, depth] int32
    first_root: int  # row of the first root; roots are the last rows, tree by tree
    most_slots: int  # largest value of `slots`


def search_tables(hierarchy: Hierarchy) -> SearchTables | None:
    """Return the tables of a rooted forest, built once; None if the forest has no `levels`."""
    plan = levels(hierarchy)
    return None if plan is None else hierarchy.cached("search tables", lambda: _build(hierarchy, plan))


def _build(hierarchy: Hierarchy, plan: Levels) -> SearchTables:
    s = hierarchy.structure
    families = leaf_families(hierarchy)
    nodes = families.nodes.cpu().numpy()
    listed = np.flatnonzero(families.own >= 0)
    start = np.full(len(nodes), hierarchy.num_leaves)
    np.minimum.at(start, families.own[listed], listed)

    leaf_parent = s.parent[s.leaf_nodes]
    own_slot = np.full(len(s.parent), hierarchy.num_nodes)
    np.minimum.at(own_slot, leaf_parent, s.leaf_nodes - s.first_child[leaf_parent])
    own_slot = np.where(own_slot < hierarchy.num_nodes, own_slot, -1)
    slots = np.where(s.height == 1, 1, s.num_children)
    fields = [
        plan.first_child[plan.row_of_node],
        slots,
        own_slot,
        np.log2(s.leaf_count).astype(np.float32).view(np.int32),
        s.end_leaf,
        np.searchsorted(start, s.first_leaf),
        np.searchsorted(start, s.end_leaf),
        plan.row_of_node,
    ]

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(hierarchy.device)

    return SearchTables(
        rows=tensor(np.stack(fields, -1)[plan.node], np.int32),
        family_rows=tensor(plan.row_of_node[nodes], np.int32),
        family_start=tensor(start, np.int64),
        tree_families=tensor(families.tree_offsets, np.int64),
        paths=tensor(_paths(s.parent, plan.row_of_node, nodes), np.int32),
        first_root=plan.bounds[-2],
        most_slots=int(slots.max(initial=1)),
    )


def _paths(parent: np.ndarray, row_of_node: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return the rows from each node up to the child of its root, padded with −1."""
    columns = []
    while (below_root := parent[nodes] >= 0).any():
        columns.append(np.where(below_root, row_of_node[nodes], -1))
        nodes = np.where(below_root, parent[nodes], nodes)
    return np.stack(columns, -1) if columns else np.empty((len(nodes), 0), np.int64)


def empty_results(q: Tensor, group_tree: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors for the selected rows and the number of scored candidates."""
    shape = (len(group_tree), q.shape[1])
    return q.new_empty(*shape, top_k, dtype=torch.int32), q.new_empty(shape, dtype=torch.int32)


def queries_at_once(most_queries: int) -> int:
    """Return the number of queries of a group to score at once."""
    return min(QUERIES, max(16, triton.next_power_of_2(most_queries)))


@triton.jit
def _field(rows, row, FIELD: tl.constexpr, mask, other):
    return tl.load(rows + row.to(tl.int64) * FIELDS + FIELD, mask=mask, other=other)


@triton.jit
def _log_count(rows, row, exists):
    return _field(rows, row, LOG_COUNT, exists, 0).to(tl.float32, bitcast=True)


@triton.jit
def _is_near(rows, row, low, high, mask):
    """Return whether any family at or below a node is in the near range."""
    return (_field(rows, row, FIRST_FAMILY, mask, 0) < high) & (_field(rows, row, END_FAMILY, mask, 0) > low)


@triton.jit
def _rank(bits, number):
    """Return ranks in the order of `bits` (int32); of equal bits, the lower number ranks higher."""
    return (bits.to(tl.int64) << 32) | (number ^ LAST).to(tl.int64)


@triton.jit
def _number(rank):
    return (rank & LAST).to(tl.int32) ^ LAST


@triton.jit
def _ordered_bits(x):
    """Return integers that are ordered as the float32 numbers are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LAST)


@triton.jit
def _merged(best, more):
    """Return the better half of two lists together, both sorted in descending order along the last dimension."""
    both = tl.maximum(best, tl.flip(more, len(more.shape) - 1))
    return tl.sort(both, descending=True)


@triton.jit
def _load_queries(q, query, valid, q_row_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < HEAD_DIM)
    return tl.load(q + query.to(tl.int64)[:, None] * q_row_stride + d, mask=mask, other=0.0)


@triton.jit
def _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return logits [queries, candidates] to base 2; −∞ where not allowed."""
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_DIM)
    key = tl.load(keys + row.to(tl.int64)[:, None] * HEAD_DIM + d, mask=mask, other=0.0)  # [candidates, dim]
    product = tl.dot(queries, tl.trans(key), input_precision="ieee")
    return tl.where(allowed, product * (scale * LOG2_E) + _log_count(rows, row, exists)[None, :], -float("inf"))


@triton.jit
def _add_mass(top, total, logits):
    """Update the largest logit and Σ exp2(logit − largest) of every query."""
    higher = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(higher > -float("inf"), higher, 0.0)
    return higher, total * tl.exp2(top - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)


@triton.jit
def _log_mass(top, total):
    """Return the log2 of the mass; +∞ for a query without candidates, so that all its weights are 0."""
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
