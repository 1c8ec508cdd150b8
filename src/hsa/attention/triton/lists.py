"""Multiscale attention from open families: lists of rows, made where they are read, a stretch of groups at a time.

A group of queries and a head have open rows: parents of the leaf families they read leaf by leaf. Open rows, everything
above them, and the root of the tree are *expanded*; the list of the group are the children of expanded rows that are not
expanded themselves. One kernel climbs from the open rows to the root and writes the lists, another attends to them. Lists
are short-lived: the groups are worked on in stretches whose lists fill at most `SCRATCH` numbers.

Open rows are sorted first, by their leaves, parents before what is below them. (An open row can lie below another where a
family has leaves and other members.) From then on the paths stay in order, paths that have met are neighbours, and the
entries of a family are the gaps between the children that its paths come from: one gap before each path, and for the last
path of a family also the one behind it.

The gradient makes the lists once more. Gradients of keys and values add up by atomic additions in float32, in no fixed
order: two runs may differ in the last bits. Everything else is reproducible.
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

from hsa.attention.triton.levels import Levels

SCRATCH = 2**26
"""Entries of lists in memory at once."""

# Columns of the table of rows: together they are one 32-byte sector of memory.
COLUMNS = tl.constexpr(8)
PARENT = tl.constexpr(0)
FIRST_CHILD = tl.constexpr(1)
NUM_CHILDREN = tl.constexpr(2)
LOG_COUNT = tl.constexpr(3)  # to base 2, the bits of a float32
FIRST_LEAF = tl.constexpr(4)
END_LEAF = tl.constexpr(5)
STANDS_FOR_LEAF = tl.constexpr(6)

NO_ROW = tl.constexpr(2**31 - 1)
LOG2E = tl.constexpr(1.4426950408889634)


def attend_lists(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    plan: Levels,
    *,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
    include_self: bool,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
) -> Tensor:
    """`[queries, heads, value_dim]`, see `hsa.multiscale_attention`. Rows that see nothing are 0.

    Args:
        q: `[queries, heads, dim]`.
        keys, values: pyramids `[kv_heads, rows, dim]`.
        open_rows: `[groups, heads or 1, width]` int32, −1: none.
        group_offsets: `[groups + 1]` int64, the rows of q of every group; together all rows.
        group_tree: `[groups]` int64, the tree whose keys the group reads.
        limit: `[queries]` int64: seen are entries whose leaves all come before this one; None: all.
        leaves: `[queries]` int64, the leaf that each query is; needed without `include_self`.
        order: `[kv_heads, leaves]` int64, the leaf whose key sits at each leaf slot; needed with `limit` if keys were moved.
        include_self: False hides each leaf from itself.
        pooled_bias: `[1 or heads]`, added to the logits of rows that do not stand for a leaf.
        most_queries: of a group.
    """
    rows = _rows(plan)
    out, _ = _attend(
        q,
        keys,
        values,
        open_rows,
        group_offsets,
        group_tree,
        rows.table,
        rows.roots,
        rows.level_ends,
        limit,
        None if include_self else leaves,
        order if limit is not None or not include_self else None,
        pooled_bias,
        scale,
        most_queries,
        rows.most_entries(open_rows.shape[2]),
        rows.widest,
    )
    return out


@dataclass(frozen=True, eq=False)
class _Rows:
    table: Tensor  # [rows, COLUMNS] int32
    roots: Tensor  # [trees, 2] int32, the lowest row of every root, and its level
    level_ends: Tensor  # [levels + 1] int32
    widest: list[int]  # the largest family of leaves, and of other rows
    families: list[np.ndarray]  # per level above the leaves, sizes of families, the largest first
    _most: dict[int, int] = field(default_factory=dict)

    def most_entries(self, width: int) -> int:
        """Of a list with `width` open rows: at every level, no more than its largest families hold."""
        if width not in self._most:
            most = sum(int(sizes[: max(width, 1)].sum()) for sizes in self.families)
            self._most[width] = triton.cdiv(most, 16) * 16  # lists begin where reads are wide
        return self._most[width]


def _rows(plan: Levels) -> _Rows:
    return plan.cached("rows", lambda: _build(plan))


def _build(plan: Levels) -> _Rows:
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
    return _Rows(flat.view(-1, COLUMNS.value), roots, level_ends, widest, families)


@torch.library.custom_op("hsa::attend_lists", mutates_args=())
def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor]:
    """The output, and log2 of the summed exponentials [heads, queries]: +∞ where nothing is seen."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    keys, values = keys.contiguous(), values.contiguous()
    order = None if order is None else order.contiguous()
    out = q.new_empty(len(q), q.shape[1], values.shape[2])
    mass = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    if len(q) == 0:
        return out, mass
    tiles = _tiles(q, values, most_queries)
    for lists in _lists(
        q, keys, open_rows, group_offsets, group_tree, table, roots, level_ends, limit, order, most_entries, widest
    ):
        _forward_kernel[(lists.groups, q.shape[1], triton.cdiv(most_queries, tiles["BLOCK_Q"]))](
            q,
            keys,
            values,
            out,
            mass,
            lists.entries,
            lists.counts,
            group_offsets,
            table,
            limit,
            leaves,
            order,
            pooled_bias,
            *_numbers(q, keys, pooled_bias, order, lists),
            scale,
            **tiles,
            num_stages=2,
        )
    return out, mass


@_attend.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(len(q), q.shape[1], values.shape[2])
    return out, q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@torch.library.custom_op("hsa::attend_lists_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, keys, values and pooled_bias (empty without one)."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    keys, values, d_out = keys.contiguous(), values.contiguous(), d_out.contiguous()
    order = None if order is None else order.contiguous()
    d_q = q.new_empty(q.shape)
    d_keys, d_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    tiles = _tiles(q, values, most_queries)
    blocks = triton.cdiv(max(most_queries, 1), tiles["BLOCK_Q"])
    d_bias = None if pooled_bias is None else mass.new_zeros(len(group_tree), q.shape[1], blocks)
    for lists in _lists(
        q, keys, open_rows, group_offsets, group_tree, table, roots, level_ends, limit, order, most_entries, widest
    ):
        _backward_kernel[(lists.groups, q.shape[1], blocks)](
            q,
            keys,
            values,
            out,
            mass,
            d_out,
            d_q,
            d_keys,
            d_values,
            d_bias,
            lists.entries,
            lists.counts,
            group_offsets,
            table,
            limit,
            leaves,
            order,
            pooled_bias,
            *_numbers(q, keys, pooled_bias, order, lists),
            scale,
            **tiles,
            num_stages=1,
        )
    d_keys, d_values = d_keys.to(q.dtype), d_values.to(q.dtype)
    if d_bias is None or pooled_bias is None:
        return d_q, d_keys, d_values, mass.new_empty(0)
    per_head = d_bias.sum((0, 2)) if len(pooled_bias) > 1 else d_bias.sum().view(1)
    return d_q, d_keys, d_values, per_head.to(pooled_bias.dtype)


@_attend_backward.register_fake
def _(
    d_out: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = mass.new_empty(0) if pooled_bias is None else pooled_bias.new_empty(pooled_bias.shape)
    d_keys, d_values = (x.new_empty(x.shape, dtype=q.dtype) for x in (keys, values))
    return q.new_empty(q.shape), d_keys, d_values, d_bias


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:13])
    ctx.options = inputs[13:]


def _backward(ctx, d_out: Tensor, d_mass: Tensor):
    out, mass, *inputs = ctx.saved_tensors
    *d_inputs, d_bias = _attend_backward(d_out, out, mass, *inputs, *ctx.options)
    return *d_inputs, *(None,) * 9, None if inputs[12] is None else d_bias, None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


@dataclass(frozen=True, eq=False)
class _Lists:
    """Lists of a stretch of groups; one head where all heads share them."""

    first_group: int
    groups: int
    entries: Tensor  # [groups · heads, most] int32, rows
    counts: Tensor  # [groups · heads] int32
    heads: int


def _lists(
    q: Tensor,
    keys: Tensor,
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    order: Tensor | None,
    most_entries: int,
    widest: list[int],
) -> Iterator[_Lists]:
    """The lists of all groups, stretch by stretch in the same memory, without entries that no query of a group sees."""
    if len(q) == 0:
        return
    order = order if limit is not None else None
    heads = open_rows.shape[1] if order is None else q.shape[1]  # leaves in another order are seen by head
    open_rows = open_rows.contiguous()
    groups = min(len(group_tree), max(1, SCRATCH // (heads * most_entries)))
    entries = open_rows.new_empty(groups * heads, most_entries)
    counts = open_rows.new_empty(groups * heads)
    width = triton.next_power_of_2(max(open_rows.shape[2], 2))
    leaf_children, children = (min(8, triton.next_power_of_2(max(x, 1))) for x in (widest[0], widest[1] - 1))
    warps = 1 if width * leaf_children <= 512 else 4
    block = max(1, 32 * warps // width)
    for first_group in range(0, len(group_tree), groups):
        here = min(groups, len(group_tree) - first_group)
        _list_kernel[(triton.cdiv(here * heads, block),)](
            open_rows,
            group_offsets,
            group_tree,
            table,
            roots,
            level_ends,
            limit,
            order,
            entries,
            counts,
            first_group,
            here * heads,
            heads,
            q.shape[1] // keys.shape[0],
            0 if order is None else order.shape[1],
            open_rows.shape[2],
            open_rows.shape[1] * open_rows.shape[2],
            open_rows.shape[2] if open_rows.shape[1] > 1 else 0,
            most_entries,
            BLOCK=block,
            WIDTH=width,
            LEAF_CHILDREN=leaf_children,
            CHILDREN=children,
            num_warps=warps,
            num_stages=1,
        )
        yield _Lists(first_group, here, entries, counts, heads)


def _tiles(q: Tensor, values: Tensor, most_queries: int) -> dict[str, int]:
    """Sizes of the pieces that a program of attention works on."""
    dim, value_dim = (max(16, triton.next_power_of_2(x.shape[2])) for x in (q, values))
    larger = max(dim, value_dim)
    if most_queries == 1:
        queries, warps = 1, max(1, larger // 64)
    else:
        most = max(16, 2**14 // (larger * q.element_size()))
        queries = min(64, most, max(16, triton.next_power_of_2(most_queries)))
        per_warp = 2**8 if q.dtype == torch.float32 else 2**10  # without tensor cores, products take registers
        warps = min(8, max(1, queries * larger // per_warp))
    return {
        "DIM": q.shape[2],
        "VALUE_DIM": values.shape[2],
        "BLOCK_Q": queries,
        "BLOCK_D": dim,
        "BLOCK_V": value_dim,
        "ENTRIES": 32,
        "num_warps": warps,
    }


def _numbers(
    q: Tensor, keys: Tensor, pooled_bias: Tensor | None, order: Tensor | None, lists: _Lists
) -> tuple[int, ...]:
    """Sizes and strides, as kernels take them."""
    return (
        q.stride(0),
        q.stride(1),
        len(q),
        q.shape[1],
        q.shape[1] // keys.shape[0],
        keys.shape[1],
        0 if order is None else order.shape[1],
        lists.entries.shape[1],
        lists.heads,
        1 if lists.heads > 1 else 0,
        lists.first_group,
        1 if pooled_bias is not None and len(pooled_bias) > 1 else 0,
    )


@triton.jit
def _column(table, row, COLUMN: tl.constexpr, exists, other):
    return tl.load(table + row.to(tl.int64) * COLUMNS + COLUMN, mask=exists, other=other)


@triton.jit
def _gaps(row, below, end, table):
    """The entries of the level whose rows end at `end`, and the climb to the next level.

    Args:
        row: [items, paths] at this level or waiting above it.
        below: the row that the path came through; −1: none, it starts here or above.

    Returns:
        Gaps: their first row, their number of entries, and the one row inside to leave out (NO_ROW: none). Then the next
        `row` and `below`.
    """
    w = tl.arange(0, row.shape[1])[None, :]
    before = tl.broadcast_to(tl.maximum(w - 1, 0), row.shape)
    after = tl.broadcast_to(tl.minimum(w + 1, row.shape[1] - 1), row.shape)
    here = (row >= 0) & (row < end)
    first = _column(table, row, FIRST_CHILD, here, 0)
    number = _column(table, row, NUM_CHILDREN, here, 0)
    above = _column(table, row, PARENT, here, 0)
    through = tl.where(below >= 0, below, first - 1)
    follows = (w > 0) & (tl.gather(row, before, 1) == row)
    is_last = (w == after) | (tl.gather(row, after, 1) != row)
    start = tl.where(follows, tl.gather(through, before, 1) + 1, first)
    inside = through >= start
    entries = tl.where(is_last, first + number - start - inside.to(tl.int32), through - start)
    entries = tl.where(here, entries, 0)  # below 0 where the path before has come through the same row
    hole = tl.where(inside, through, NO_ROW)
    return start, entries, hole, tl.where(here, above, row), tl.where(here, row, below)


@triton.jit
def _write_gaps(
    entries,
    count,
    start,
    number,
    hole,
    table,
    limit,
    order,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Append to every list [items] the entries of its gaps [items, paths]; its new length."""
    SIZE: tl.constexpr = start.shape[1] * CHILDREN
    for past in range(0, tl.max(tl.max(number, 1), 0), CHILDREN):
        member = past + tl.arange(0, CHILDREN)[None, None, :]
        row = start[:, :, None] + member
        row += (row >= hole[:, :, None]).to(tl.int32)
        row = tl.reshape(row, [start.shape[0], SIZE])
        exists = tl.reshape(member < number[:, :, None], [start.shape[0], SIZE])
        if limit is not None:
            if LEAVES:
                end = row + 1
                leaf = row
            else:
                end = _column(table, row, END_LEAF, exists, 0)
                stands_for_leaf = _column(table, row, STANDS_FOR_LEAF, exists, 0) != 0
                leaf = tl.where(stands_for_leaf, end - 1, -1)
            if order is not None:
                held = tl.load(order + leaf, mask=exists & (leaf >= 0), other=0).to(tl.int32)
                end = tl.where(leaf >= 0, held + 1, end)
            exists = exists & (end <= limit[:, None])
        place = count[:, None] + tl.cumsum(exists.to(tl.int32), 1) - 1
        tl.store(entries + place, row, mask=exists)
        count += tl.sum(exists.to(tl.int32), 1)
    return count


# Numbers that differ from batch to batch: to compile for their values would be to compile again and again.
kernel = triton.jit(
    do_not_specialize=[
        *("first_group", "num_items", "num_open", "open_group_stride", "open_head_stride"),
        *("num_queries", "num_leaves", "num_rows", "list_heads", "list_head_stride"),
    ],
    do_not_specialize_on_alignment=["roots", "level_ends"],
)


@kernel
def _list_kernel(
    open_rows,
    group_offsets,
    group_tree,
    table,
    roots,
    level_ends,
    limit_ptr,
    order,
    entries,
    counts,
    first_group,
    num_items,
    heads,
    heads_per_key,
    num_leaves,
    num_open,
    open_group_stride,
    open_head_stride,
    most_entries,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAF_CHILDREN: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """One program: the lists of a few items, an item being a group and a head."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = item < num_items
    group, head = (first_group + item // heads).to(tl.int64), item % heads
    tree = tl.load(group_tree + group, mask=exists, other=0)
    root = tl.load(roots + 2 * tree, mask=exists, other=NO_ROW)
    limit = None
    if limit_ptr is not None:  # the largest of the group
        query = tl.load(group_offsets + group, mask=exists, other=0)
        size = tl.load(group_offsets + group + 1, mask=exists, other=0) - query
        limit = tl.zeros([BLOCK], tl.int32)
        for past in range(0, tl.max(size, 0), 16):
            number = past + tl.arange(0, 16)[None, :]
            some = tl.load(limit_ptr + query[:, None] + number, mask=number < size[:, None], other=0)
            limit = tl.maximum(limit, tl.max(some, 1).to(tl.int32))
    order = None if order is None else order + ((head // heads_per_key).to(tl.int64) * num_leaves)[:, None]
    entries += item.to(tl.int64)[:, None] * most_entries

    # Paths start at the open rows, by first leaf, the higher of two that begin alike first; without any, at the root.
    w = tl.arange(0, WIDTH)[None, :]
    place = group * open_group_stride + head * open_head_stride
    row = tl.load(open_rows + place[:, None] + w, mask=exists[:, None] & (w < num_open), other=-1)
    first = _column(table, row, FIRST_LEAF, row >= 0, NO_ROW)
    flipped = tl.where(row >= 0, row, NO_ROW) ^ NO_ROW  # the higher a row, the larger its number
    row = tl.sort((first.to(tl.int64) << 32) | flipped.to(tl.int64)).to(tl.int32) ^ NO_ROW
    row = tl.where((w == 0) & (row == NO_ROW), root[:, None], row)
    below = row * 0 - 1
    count = tl.zeros([BLOCK], tl.int32)
    start, number, hole, row, below = _gaps(row, below, tl.load(level_ends + 1), table)
    count = _write_gaps(entries, count, start, number, hole, table, limit, order, LEAF_CHILDREN, True)
    for level in range(2, tl.max(tl.load(roots + 2 * tree + 1), 0) + 1):
        start, number, hole, row, below = _gaps(row, below, tl.load(level_ends + level), table)
        count = _write_gaps(entries, count, start, number, hole, table, limit, order, CHILDREN, False)
    tl.store(counts + item, count, mask=exists)


@triton.jit
def _product(a, b):
    """[m, d] · [n, d] → [m, n] in float32; a single row without tensor cores."""
    if a.shape[0] == 1:
        product = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[None, :]
    else:
        product = tl.dot(a, tl.trans(b), input_precision="ieee")
    return product


@triton.jit
def _average(weight, x):
    """[m, n] · [n, d] → [m, d] in float32."""
    if weight.shape[0] == 1:
        product = tl.sum(tl.trans(weight) * x.to(tl.float32), 0)[None, :]
    else:
        product = tl.dot(weight.to(x.dtype), x, input_precision="ieee")
    return product


@triton.jit
def _spread(weight, x):
    """[m, n]ᵀ · [m, d] → [n, d] in float32."""
    if weight.shape[0] == 1:
        product = tl.trans(weight) * x.to(tl.float32)
    else:
        product = tl.dot(tl.trans(weight.to(x.dtype)), x, input_precision="ieee")
    return product


@triton.jit
def _read(x, row, exists, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of a matrix with DIM columns."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row.to(tl.int64)[:, None] * DIM + d, mask=exists[:, None] & (d < DIM), other=0.0)


@triton.jit
def _add(x, row, exists, value, DIM: tl.constexpr):
    d = tl.arange(0, value.shape[1])
    tl.atomic_add(x + row.to(tl.int64)[:, None] * DIM + d, value, exists[:, None] & (d < DIM), sem="relaxed")


@triton.jit
def _logits(q, k, row, exists, table, order, bias, inside, limit, own, scale):
    """[queries, entries] to base 2, −∞ where an entry is not seen; and which entries are pooled."""
    stands_for_leaf = _column(table, row, STANDS_FOR_LEAF, exists, 1) != 0
    extra = _column(table, row, LOG_COUNT, exists, 0).to(tl.float32, bitcast=True) + tl.where(
        stands_for_leaf, 0.0, bias
    )
    seen = inside[:, None] & exists[None, :]
    if (limit is not None) or (own is not None):
        end = _column(table, row, END_LEAF, exists, 0)
        leaf = tl.where(stands_for_leaf, end - 1, -1)
        if order is not None:
            held = tl.load(order + leaf, mask=exists & stands_for_leaf, other=-1).to(tl.int32)
            end = tl.where(stands_for_leaf, held + 1, end)
            leaf = held
        if limit is not None:
            seen = seen & (end[None, :] <= limit[:, None])
        if own is not None:
            seen = seen & (leaf[None, :] != own[:, None])
    logit = tl.where(seen, _product(q, k) * (scale * LOG2E) + extra[None, :], -float("inf"))
    return logit, stands_for_leaf == 0


@kernel
def _forward_kernel(
    q_ptr,
    keys,
    values,
    out_ptr,
    mass_ptr,
    entries,
    counts,
    group_offsets,
    table,
    limit_ptr,
    leaves_ptr,
    order,
    pooled_bias,
    q_stride,
    q_head_stride,
    num_queries,
    heads,
    heads_per_key,
    num_rows,
    num_leaves,
    most_entries,
    list_heads,
    list_head_stride,
    first_group,
    bias_stride,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One program: a block of queries of one group, one head."""
    group, head = first_group + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.load(group_offsets + group) + tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = query < tl.load(group_offsets + group + 1)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    kv_head = head // heads_per_key
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    item = (group - first_group) * list_heads + head * list_head_stride
    entries += item * most_entries
    count = tl.load(counts + item)
    limit = None
    if limit_ptr is not None and BLOCK_Q > 1:  # a single query's list holds only what it sees
        limit = tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    order = None if order is None else order + kv_head * num_leaves
    bias = 0.0 if pooled_bias is None else tl.load(pooled_bias + head * bias_stride).to(tl.float32) * LOG2E
    d = tl.arange(0, BLOCK_D)
    source = q_ptr + query[:, None] * q_stride + head * q_head_stride + d
    q = tl.load(source, mask=inside[:, None] & (d < DIM), other=0.0)
    best = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for begin in range(0, count, ENTRIES):
        place = begin + tl.arange(0, ENTRIES)
        exists = place < count
        row = tl.load(entries + place, mask=exists, other=0)
        k = _read(keys, row, exists, DIM, BLOCK_D)
        v = _read(values, row, exists, VALUE_DIM, BLOCK_V)
        logit, _ = _logits(q, k, row, exists, table, order, bias, inside, limit, own, scale)
        better = tl.maximum(best, tl.max(logit, 1))
        finite = tl.where(better == -float("inf"), 0.0, better)
        weight = tl.exp2(logit - finite[:, None])
        fade = tl.exp2(best - finite)
        mass = mass * fade + tl.sum(weight, 1)
        out = out * fade[:, None] + _average(weight, v)
        best = better

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    e = tl.arange(0, BLOCK_V)
    target = out_ptr + (query[:, None] * heads + head) * VALUE_DIM + e
    tl.store(target, (out / mass[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None] & (e < VALUE_DIM))
    total = tl.where(some, best + tl.log2(mass), float("inf"))
    tl.store(mass_ptr + head * num_queries + query, total, mask=inside)


@kernel
def _backward_kernel(
    q_ptr,
    keys,
    values,
    out_ptr,
    mass_ptr,
    d_out_ptr,
    d_q_ptr,
    d_keys,
    d_values,
    d_bias_ptr,
    entries,
    counts,
    group_offsets,
    table,
    limit_ptr,
    leaves_ptr,
    order,
    pooled_bias,
    q_stride,
    q_head_stride,
    num_queries,
    heads,
    heads_per_key,
    num_rows,
    num_leaves,
    most_entries,
    list_heads,
    list_head_stride,
    first_group,
    bias_stride,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One program: a block of queries of one group, one head, over the same entries as in the forward pass."""
    group, head = first_group + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.load(group_offsets + group) + tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = query < tl.load(group_offsets + group + 1)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    kv_head = head // heads_per_key
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    item = (group - first_group) * list_heads + head * list_head_stride
    entries += item * most_entries
    count = tl.load(counts + item)
    limit = None
    if limit_ptr is not None and BLOCK_Q > 1:  # a single query's list holds only what it sees
        limit = tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    order = None if order is None else order + kv_head * num_leaves
    bias = 0.0 if pooled_bias is None else tl.load(pooled_bias + head * bias_stride).to(tl.float32) * LOG2E
    d = tl.arange(0, BLOCK_D)
    source = q_ptr + query[:, None] * q_stride + head * q_head_stride + d
    q = tl.load(source, mask=inside[:, None] & (d < DIM), other=0.0)
    d_keys += kv_head * num_rows * DIM
    d_values += kv_head * num_rows * VALUE_DIM
    out_row = query * heads + head
    d_out = _read(d_out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    out = _read(out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    shared = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)  # what every logit of a query loses
    mass = tl.load(mass_ptr + head * num_queries + query, mask=inside, other=float("inf"))
    d_q = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    d_bias = tl.zeros([BLOCK_Q], tl.float32)
    for begin in range(0, count, ENTRIES):
        place = begin + tl.arange(0, ENTRIES)
        exists = place < count
        row = tl.load(entries + place, mask=exists, other=0)
        k = _read(keys, row, exists, DIM, BLOCK_D)
        logit, pooled = _logits(q, k, row, exists, table, order, bias, inside, limit, own, scale)
        weight = tl.exp2(logit - mass[:, None])
        _add(d_values, row, exists, _spread(weight, d_out), VALUE_DIM)
        v = _read(values, row, exists, VALUE_DIM, BLOCK_V)
        d_logit = weight * (_product(d_out, v) - shared[:, None])
        d_bias += tl.sum(tl.where(pooled[None, :], d_logit, 0.0), 1)
        d_logit *= scale
        d_q += _average(d_logit, k)
        _add(d_keys, row, exists, _spread(d_logit, q), DIM)

    target = d_q_ptr + out_row[:, None] * DIM + tl.arange(0, BLOCK_D)
    tl.store(target, d_q.to(d_q_ptr.dtype.element_ty), mask=inside[:, None] & (tl.arange(0, BLOCK_D) < DIM))
    if d_bias_ptr is not None:
        program = (group * heads + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(d_bias_ptr + program, tl.sum(d_bias, 0))
