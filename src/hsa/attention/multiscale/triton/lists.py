"""Kernel that builds the lists of multiscale attention from the selected families; a program does a few groups and heads.

A group of queries and a head have selected rows: parents of the leaf families that they attend to leaf by leaf. Selected
rows, their ancestors and the root of the tree are *expanded*; the list consists of the children of expanded rows that are
not expanded themselves. The kernel climbs from the selected rows to the root and writes the lists. Lists are temporary:
groups are processed in batches whose lists have at most `SCRATCH` entries.

Selected rows are sorted first, by their leaves, ancestors before descendants. (A selected row can lie below another one if
a family has both leaves and other members.) The paths to the root then stay in order, and paths that have met are adjacent.
The entries of a family are the gaps between the children that its paths come from: one gap before each path, and for the
last path of a family also the gap after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.levels import Levels

SCRATCH = 2**26
"""Maximum number of list entries in memory at once."""
# Columns of the table of rows; together they fill one 32-byte sector of memory.
COLUMNS = tl.constexpr(8)
PARENT = tl.constexpr(0)
FIRST_CHILD = tl.constexpr(1)
NUM_CHILDREN = tl.constexpr(2)
LOG_COUNT = tl.constexpr(3)  # logarithm to base 2 of the leaf count, as the bits of a float32
FIRST_LEAF = tl.constexpr(4)
END_LEAF = tl.constexpr(5)
STANDS_FOR_LEAF = tl.constexpr(6)
NO_ROW = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, eq=False)
class Rows:
    """Tables of a plan for the kernels."""

    table: Tensor  # [rows, COLUMNS] int32
    roots: Tensor  # [trees, 2] int32, the lowest row of every root, and its level
    level_ends: Tensor  # [levels + 1] int32, end of the rows of every level
    widest: list[int]  # size of the largest family of leaves, and of the largest family of other rows
    families: list[np.ndarray]  # sizes of families in descending order, for every level above the leaves
    _most: dict[int, int] = field(default_factory=dict)

    def most_entries(self, width: int) -> int:
        """Return an upper bound of the entries of a list with `width` selected rows: the largest families of each level."""
        if width not in self._most:
            most = sum(int(sizes[: max(width, 1)].sum()) for sizes in self.families)
            self._most[width] = triton.cdiv(most, 16) * 16  # aligned, for wide reads
        return self._most[width]


def rows_of(plan: Levels) -> Rows:
    """Return the tables of a plan, built once."""
    return plan.cached("rows", lambda: _build(plan))


def _build(plan: Levels) -> Rows:
    table = np.zeros((plan.num_rows, COLUMNS.value), np.int32)
    table[:, PARENT.value] = plan.parent
    table[:, FIRST_CHILD.value] = plan.first_child
    table[:, NUM_CHILDREN.value] = plan.num_children
    table[:, LOG_COUNT.value] = np.log2(plan.leaf_count).astype(np.float32).view(np.int32)
    table[:, FIRST_LEAF.value] = plan.first_leaf
    table[:, END_LEAF.value] = plan.first_leaf + plan.leaf_count
    table[:, STANDS_FOR_LEAF.value] = plan.stands_for_leaf
    root = plan.row_of_node[: plan.bounds[-1] - plan.bounds[-2]]  # roots are the first nodes
    roots_and_levels = np.stack([root, np.searchsorted(plan.bounds, root, side="right") - 1], 1)
    parts = [table.ravel(), roots_and_levels.ravel(), np.array(plan.bounds[1:])]
    everything = torch.from_numpy(np.concatenate([x.astype(np.int32) for x in parts])).to(plan.device)
    flat, roots, level_ends = everything.split([len(x) for x in parts])
    families = [-np.sort(-plan.num_children[begin:end]) for begin, end in pairwise(plan.bounds[1:])]
    largest = [int(sizes.max(initial=1)) for sizes in families]
    widest = [max(largest[:1], default=1), max(largest[1:], default=1)]
    return Rows(flat.view(-1, COLUMNS.value), roots, level_ends, widest, families)


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of a batch of consecutive groups."""

    first_group: int
    groups: int  # number of groups
    entries: Tensor  # [groups · heads, most_entries] int32, rows
    counts: Tensor  # [groups · heads] int32, length of every list
    heads: int  # 1 if all heads share their lists


def make_lists(
    q: Tensor,
    selected_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    most_entries: int,
    widest: list[int],
) -> Iterator[Lists]:
    """Yield the lists of all groups, in batches that share memory, without entries that no query of the group sees."""
    if len(q) == 0:
        return
    heads = selected_rows.shape[1]
    selected_rows = selected_rows.contiguous()
    groups = min(len(group_tree), max(1, SCRATCH // (heads * most_entries)))
    entries = selected_rows.new_empty(groups * heads, most_entries)
    counts = selected_rows.new_empty(groups * heads)
    width = triton.next_power_of_2(max(selected_rows.shape[2], 2))
    leaf_children, children = (min(8, triton.next_power_of_2(max(x, 1))) for x in (widest[0], widest[1] - 1))
    warps = 1 if width * leaf_children <= 512 else 4
    block = max(1, 32 * warps // width)
    for first_group in range(0, len(group_tree), groups):
        here = min(groups, len(group_tree) - first_group)
        _list_kernel[(triton.cdiv(here * heads, block),)](
            selected_rows, group_offsets, group_tree, table, roots, level_ends, limit, entries, counts,
            first_group, here * heads, heads, selected_rows.shape[2], most_entries,
            BLOCK=block, WIDTH=width, LEAF_CHILDREN=leaf_children, CHILDREN=children, num_warps=warps, num_stages=1,
        )  # fmt: skip
        yield Lists(first_group, here, entries, counts, heads)


@triton.jit
def column(table, row, COLUMN: tl.constexpr, exists, other):
    return tl.load(table + row.to(tl.int64) * COLUMNS + COLUMN, mask=exists, other=other)


@triton.jit
def _gaps(row, below, end, table):
    """Return the gaps of the level whose rows end at `end`, and climb to the next level.

    Args:
        row: [items, paths] row of each path, at this level or above it.
        below: [items, paths] row of the level below that the path came through; −1 if the path starts here or above.
        end: End of the rows of this level.
        table: Table of rows.

    Returns:
        First row and number of entries of each gap, and the one row inside to leave out (NO_ROW for none); then the next
        `row` and `below`.
    """
    w = tl.arange(0, row.shape[1])[None, :]
    before = tl.broadcast_to(tl.maximum(w - 1, 0), row.shape)
    after = tl.broadcast_to(tl.minimum(w + 1, row.shape[1] - 1), row.shape)
    here = (row >= 0) & (row < end)
    first = column(table, row, FIRST_CHILD, here, 0)
    number = column(table, row, NUM_CHILDREN, here, 0)
    above = column(table, row, PARENT, here, 0)
    through = tl.where(below >= 0, below, first - 1)
    follows = (w > 0) & (tl.gather(row, before, 1) == row)
    is_last = (w == after) | (tl.gather(row, after, 1) != row)
    start = tl.where(follows, tl.gather(through, before, 1) + 1, first)
    inside = through >= start
    entries = tl.where(is_last, first + number - start - inside.to(tl.int32), through - start)
    entries = tl.where(here, entries, 0)  # negative if the path before came through the same row
    hole = tl.where(inside, through, NO_ROW)
    return start, entries, hole, tl.where(here, above, row), tl.where(here, row, below)


@triton.jit
def _write_gaps(
    entries, count, start, number, hole, table, limit, CHILDREN: tl.constexpr, LEAVES: tl.constexpr
):  # fmt: skip
    """Append the entries of the gaps [items, paths] to every list [items], and return the new lengths."""
    SIZE: tl.constexpr = start.shape[1] * CHILDREN
    for past in range(0, tl.max(tl.max(number, 1), 0), CHILDREN):
        member = past + tl.arange(0, CHILDREN)[None, None, :]
        row = start[:, :, None] + member
        row += (row >= hole[:, :, None]).to(tl.int32)
        row = tl.reshape(row, [start.shape[0], SIZE])
        exists = tl.reshape(member < number[:, :, None], [start.shape[0], SIZE])
        if limit is not None:
            end = row + 1 if LEAVES else column(table, row, END_LEAF, exists, 0)
            exists = exists & (end <= limit[:, None])
        entry = count[:, None] + tl.cumsum(exists.to(tl.int32), 1) - 1
        tl.store(entries + entry, row, mask=exists)
        count += tl.sum(exists.to(tl.int32), 1)
    return count


# These arguments differ from batch to batch; the kernels must not be compiled again for each value.
kernel = triton.jit(
    do_not_specialize=[
        *("first_group", "num_items", "num_selected"),
        *("num_queries", "num_rows", "list_heads", "list_head_stride"),
    ],
    do_not_specialize_on_alignment=["roots", "level_ends"],
)


@kernel
def _list_kernel(
    selected_rows, group_offsets, group_tree, table, roots, level_ends, limit_ptr, entries, counts,
    first_group, num_items, heads, num_selected, most_entries,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, LEAF_CHILDREN: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    """Write the lists of a few items; an item is a group and a head."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = item < num_items
    group, head = (first_group + item // heads).to(tl.int64), item % heads
    tree = tl.load(group_tree + group, mask=exists, other=0)
    root = tl.load(roots + 2 * tree, mask=exists, other=NO_ROW)
    limit = None
    if limit_ptr is not None:  # the largest limit of the group
        query = tl.load(group_offsets + group, mask=exists, other=0)
        size = tl.load(group_offsets + group + 1, mask=exists, other=0) - query
        limit = tl.zeros([BLOCK], tl.int32)
        for past in range(0, tl.max(size, 0), 16):
            number = past + tl.arange(0, 16)[None, :]
            some = tl.load(limit_ptr + query[:, None] + number, mask=number < size[:, None], other=0)
            limit = tl.maximum(limit, tl.max(some, 1).to(tl.int32))
    entries += item.to(tl.int64)[:, None] * most_entries

    # Paths start at the selected rows, ordered by first leaf (of two with the same one, the higher row first); without
    # selected rows, one path starts at the root.
    w = tl.arange(0, WIDTH)[None, :]
    begin = (group * heads + head) * num_selected
    row = tl.load(selected_rows + begin[:, None] + w, mask=exists[:, None] & (w < num_selected), other=-1)
    first = column(table, row, FIRST_LEAF, row >= 0, NO_ROW)
    flipped = tl.where(row >= 0, row, NO_ROW) ^ NO_ROW  # higher rows have larger numbers
    row = tl.sort((first.to(tl.int64) << 32) | flipped.to(tl.int64)).to(tl.int32) ^ NO_ROW
    row = tl.where((w == 0) & (row == NO_ROW), root[:, None], row)
    below = row * 0 - 1
    count = tl.zeros([BLOCK], tl.int32)
    start, number, hole, row, below = _gaps(row, below, tl.load(level_ends + 1), table)
    count = _write_gaps(entries, count, start, number, hole, table, limit, LEAF_CHILDREN, True)
    for level in range(2, tl.max(tl.load(roots + 2 * tree + 1), 0) + 1):
        start, number, hole, row, below = _gaps(row, below, tl.load(level_ends + level), table)
        count = _write_gaps(entries, count, start, number, hole, table, limit, CHILDREN, False)
    tl.store(counts + item, count, mask=exists)
