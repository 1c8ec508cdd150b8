"""Multiscale attention straight from the open families, without lists in memory.

A group of queries and a head have open rows: parents of the leaf families they read leaf by leaf. Open rows, everything
above them, and the root of the tree are *expanded*; the group attends to the children of expanded rows that are not expanded
themselves. One program climbs from the open rows to the root, and at every level takes the children of the rows it reaches,
without those it comes from, into a running softmax.

Open rows are sorted first, by their leaves, parents before what is below them. (An open row can lie below another where a
family has leaves and other members.) From then on the paths stay in order, paths that have met are neighbours, and the
entries of a family are the gaps between the children that its paths come from: one gap before each path, and for the last
path of a family also the one behind it.

The gradient climbs once more. Gradients of keys and values add up in float32 by atomic additions, in no fixed order: two
runs may differ in the last bits. Everything else is reproducible.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.triton.levels import Levels

MOST_OPEN = 256
"""Open rows of a group and head that a program can hold."""

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
        open_rows: `[groups, heads or 1, width]` int32, −1: none; at most MOST_OPEN.
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
        rows.widest,
    )
    return out


@dataclass(frozen=True, eq=False)
class _Rows:
    table: Tensor  # [rows, COLUMNS] int32
    roots: Tensor  # [trees, 2] int32, the lowest row of every root, and its level
    level_ends: Tensor  # [levels + 1 + 3] int32, the last one repeated: kernels look at a few levels at once
    widest: list[int]  # the largest family of leaves, and of other rows


_rows_of: WeakKeyDictionary[Levels, _Rows] = WeakKeyDictionary()


def _rows(plan: Levels) -> _Rows:
    if plan not in _rows_of:
        _rows_of[plan] = _build(plan)
    return _rows_of[plan]


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
    parts = [table.ravel(), roots_and_levels.ravel(), np.pad(plan.bounds[1:], (0, 3), mode="edge")]
    everything = torch.from_numpy(np.concatenate([x.astype(np.int32) for x in parts])).to(plan.device)
    flat, roots, level_ends = everything.split([len(x) for x in parts])
    above = plan.bounds[min(2, len(plan.bounds) - 1)]
    widest = [int(x.max(initial=1)) for x in (plan.num_children[:above], plan.num_children[above:])]
    return _Rows(flat.view(-1, COLUMNS.value), roots, level_ends, widest)


@dataclass(frozen=True)
class _Tiles:
    """Sizes of the pieces that a program works on."""

    queries: int
    width: int  # open rows
    leaf_rows: int  # expanded rows at a time, and children of each at a time, at the leaf level
    leaf_children: int
    levels: int  # at a time, above
    rows: int
    children: int
    dim: int
    value_dim: int
    warps: int


def _tiles(q: Tensor, values: Tensor, open_rows: Tensor, most_queries: int, widest: list[int]) -> _Tiles:
    width = triton.next_power_of_2(max(open_rows.shape[2], 2))
    dim, value_dim = (max(16, triton.next_power_of_2(x.shape[2])) for x in (q, values))
    larger = max(dim, value_dim)
    if most_queries == 1:
        queries, warps = 1, max(1, larger // 64)
    else:
        queries = min(64, max(16, triton.next_power_of_2(most_queries)))
        warps = min(8, max(1, queries * larger // 1024))
    # Not fewer than threads: the compiler would take loads of entries' numbers for cheap, repeat them in every layout it
    # needs, and (Triton 3.6) fail over the order of the copies.
    entries = 32 * warps
    leaf_rows, leaf_children = _shape(width, widest[0], entries)
    # A path leaves one child of a family out, its own: below a binary node there is one entry.
    levels = min(4, max(1, entries // (width * triton.next_power_of_2(max(widest[1] - 1, 1)))))
    rows, children = _shape(width * levels, max(widest[1] - 1, 1), entries)
    return _Tiles(queries, width, leaf_rows, leaf_children, levels, rows, children, dim, value_dim, warps)


def _shape(paths: int, family: int, entries: int) -> tuple[int, int]:
    """Paths and children of each at a time, `entries` together; at least 16, for the tensor cores."""
    children = min(triton.next_power_of_2(family), entries, max(8, entries // paths))
    rows = min(paths, entries // children)
    return rows, max(children, 16 // rows)


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
    widest: list[int],
) -> tuple[Tensor, Tensor]:
    """The output, and log2 of the summed exponentials [heads, queries]: +∞ where nothing is seen."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    keys, values, open_rows = keys.contiguous(), values.contiguous(), open_rows.contiguous()
    out = q.new_empty(len(q), q.shape[1], values.shape[2])
    mass = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    if len(q) == 0:
        return out, mass
    tiles = _tiles(q, values, open_rows, most_queries, widest)
    grid = (len(group_tree), q.shape[1], triton.cdiv(most_queries, tiles.queries))
    _forward_kernel[grid](
        q,
        keys,
        values,
        out,
        mass,
        *_walk(open_rows, group_offsets, group_tree, table, roots, level_ends, limit, leaves, order),
        pooled_bias,
        *_numbers(q, keys, open_rows, pooled_bias, order),
        scale,
        **_constants(q, values, tiles),
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
    widest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, keys, values and pooled_bias (empty without one)."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    keys, values, open_rows = keys.contiguous(), values.contiguous(), open_rows.contiguous()
    d_q = q.new_empty(q.shape)
    d_keys, d_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    tiles = _tiles(q, values, open_rows, most_queries, widest)
    grid = (len(group_tree), q.shape[1], triton.cdiv(max(most_queries, 1), tiles.queries))
    d_bias = None if pooled_bias is None else mass.new_zeros(grid)
    if len(q):
        _backward_kernel[grid](
            q,
            keys,
            values,
            out,
            mass,
            d_out.contiguous(),
            d_q,
            d_keys,
            d_values,
            d_bias,
            *_walk(open_rows, group_offsets, group_tree, table, roots, level_ends, limit, leaves, order),
            pooled_bias,
            *_numbers(q, keys, open_rows, pooled_bias, order),
            scale,
            **_constants(q, values, tiles),
        )
    if d_bias is None or pooled_bias is None:
        return d_q, d_keys.to(q.dtype), d_values.to(q.dtype), mass.new_empty(0)
    per_head = d_bias.sum((0, 2)) if len(pooled_bias) > 1 else d_bias.sum().view(1)
    return d_q, d_keys.to(q.dtype), d_values.to(q.dtype), per_head.to(pooled_bias.dtype)


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
    widest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = mass.new_empty(0) if pooled_bias is None else pooled_bias.new_empty(pooled_bias.shape)
    d_keys, d_values = (x.new_empty(x.shape, dtype=q.dtype) for x in (keys, values))
    return q.new_empty(q.shape), d_keys, d_values, d_bias


def _walk(
    open_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    order: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """What a program needs to find its entries, as kernels take it."""
    order = None if order is None else order.contiguous()
    return open_rows, group_offsets, group_tree, table, roots, level_ends, limit, leaves, order


def _numbers(
    q: Tensor, keys: Tensor, open_rows: Tensor, pooled_bias: Tensor | None, order: Tensor | None
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
        open_rows.shape[2],
        open_rows.shape[1] * open_rows.shape[2],
        open_rows.shape[2] if open_rows.shape[1] > 1 else 0,
        1 if pooled_bias is not None and len(pooled_bias) > 1 else 0,
    )


def _constants(q: Tensor, values: Tensor, tiles: _Tiles) -> dict[str, int]:
    return {
        "DIM": q.shape[2],
        "VALUE_DIM": values.shape[2],
        "BLOCK_Q": tiles.queries,
        "BLOCK_D": tiles.dim,
        "BLOCK_V": tiles.value_dim,
        "WIDTH": tiles.width,
        "LEAF_ROWS": tiles.leaf_rows,
        "LEAF_CHILDREN": tiles.leaf_children,
        "LEVELS": tiles.levels,
        "ROWS": tiles.rows,
        "CHILDREN": tiles.children,
        "num_warps": tiles.warps,
        "num_stages": 1,
    }


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:13])
    ctx.options = inputs[13:]


def _backward(ctx, d_out: Tensor, d_mass: Tensor):
    out, mass, *inputs = ctx.saved_tensors
    *d_inputs, d_bias = _attend_backward(d_out, out, mass, *inputs, *ctx.options)
    return *d_inputs, *(None,) * 9, None if inputs[12] is None else d_bias, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


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
def _column(table, row, COLUMN: tl.constexpr, exists, other):
    return tl.load(table + row.to(tl.int64) * COLUMNS + COLUMN, mask=exists, other=other)


@triton.jit
def _paths(open_rows, table, root, number, WIDTH: tl.constexpr):
    """[WIDTH] where paths start: open rows by first leaf, the higher of two that begin alike first, then NO_ROW.

    Without any, the root.
    """
    w = tl.arange(0, WIDTH)
    row = tl.load(open_rows + w, mask=w < number, other=-1)
    exists = row >= 0
    first = _column(table, row, FIRST_LEAF, exists, NO_ROW)
    flipped = tl.where(exists, row, NO_ROW) ^ NO_ROW  # the higher a row, the larger its number
    key = (first.to(tl.int64) << 32) | flipped.to(tl.int64)
    row = tl.sort(key).to(tl.int32) ^ NO_ROW
    return tl.where((w == 0) & (row == NO_ROW), root, row)


@triton.jit
def _gaps(row, below, end, table):
    """The entries of the level whose rows end at `end`, and the climb to the next level.

    Args:
        row: [paths] at this level or waiting above it.
        below: the row that the path came through; −1: none, it starts here or above.

    Returns:
        Gaps: their first row, their number of entries, and the one row inside to leave out (NO_ROW: none). Then the next
        `row` and `below`.
    """
    w = tl.arange(0, row.shape[0])
    before, after = tl.maximum(w - 1, 0), tl.minimum(w + 1, row.shape[0] - 1)
    here = (row >= 0) & (row < end)
    first = _column(table, row, FIRST_CHILD, here, 0)
    number = _column(table, row, NUM_CHILDREN, here, 0)
    above = _column(table, row, PARENT, here, 0)
    through = tl.where(below >= 0, below, first - 1)
    follows = (w > 0) & (tl.gather(row, before, 0) == row)
    is_last = (w == after) | (tl.gather(row, after, 0) != row)
    start = tl.where(follows, tl.gather(through, before, 0) + 1, first)
    inside = through >= start
    entries = tl.where(is_last, first + number - start - inside.to(tl.int32), through - start)
    entries = tl.where(here, tl.maximum(entries, 0), 0)  # below 0 where the path before has come through the same row
    hole = tl.where(inside, through, NO_ROW)
    return start, entries, hole, tl.where(here, above, row), tl.where(here, row, below)


@triton.jit
def _both(a, b):
    """Two vectors as one."""
    return tl.reshape(tl.join(a, b), [2 * a.shape[0]])


@triton.jit
def _gaps_of_levels(row, below, level_ends, level, table, LEVELS: tl.constexpr):
    """As `_gaps`, of one, two or four levels from `level` on together."""
    start, entries, hole, row, below = _gaps(row, below, tl.load(level_ends + level), table)
    if LEVELS > 1:
        start1, entries1, hole1, row, below = _gaps(row, below, tl.load(level_ends + level + 1), table)
        start, entries, hole = _both(start, start1), _both(entries, entries1), _both(hole, hole1)
    if LEVELS > 2:
        start2, entries2, hole2, row, below = _gaps(row, below, tl.load(level_ends + level + 2), table)
        start3, entries3, hole3, row, below = _gaps(row, below, tl.load(level_ends + level + 3), table)
        start = _both(start, _both(start2, start3))
        entries = _both(entries, _both(entries2, entries3))
        hole = _both(hole, _both(hole2, hole3))
    return start, entries, hole, row, below


@triton.jit
def _some(start, number, hole, begin, ROWS: tl.constexpr):
    """The gaps `begin` to `begin + ROWS` of those that have entries."""
    if start.shape[0] > ROWS:
        up_to_here = tl.cumsum((number > 0).to(tl.int32), 0)
        wanted = begin + tl.arange(0, ROWS)
        index = tl.sum((up_to_here[None, :] <= wanted[:, None]).to(tl.int32), 1)  # of the gap with that rank
        exists = index < start.shape[0]
        index = tl.minimum(index, start.shape[0] - 1)
        start, hole = tl.gather(start, index, 0), tl.gather(hole, index, 0)
        number = tl.where(exists, tl.gather(number, index, 0), 0)
    return start, number, hole


@triton.jit
def _entries(
    start,
    number,
    hole,
    past,
    table,
    order,
    bias,
    limit,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Entries of gaps, from the one with number `past` on, that somebody may attend to.

    Returns:
        Rows [ROWS · CHILDREN]; which of them are entries; their bias: log2 of the leaf count and the pooled bias where it
        applies; the end of their leaves; the leaf they stand for (−1: pooled).
    """
    member = past + tl.arange(0, CHILDREN)[None, :]
    row = start[:, None] + member
    if not LEAVES:
        row += (row >= hole[:, None]).to(tl.int32)
    row = tl.reshape(row, [ROWS * CHILDREN])
    exists = tl.reshape(member < number[:, None], [ROWS * CHILDREN])
    if LEAVES:
        leaf = row
        end = row + 1
        logit = tl.zeros([ROWS * CHILDREN], tl.float32)
    else:
        stands_for_leaf = _column(table, row, STANDS_FOR_LEAF, exists, 1) != 0
        leaf = tl.where(stands_for_leaf, _column(table, row, FIRST_LEAF, exists, 0), -1)
        end = _column(table, row, END_LEAF, exists, 0)
        logit = _column(table, row, LOG_COUNT, exists, 0).to(tl.float32, bitcast=True)
        logit += tl.where(stands_for_leaf, 0.0, bias)
    if order is not None:
        held = tl.load(order + leaf, mask=exists & (leaf >= 0), other=-1).to(tl.int32)
        end = tl.where(leaf >= 0, held + 1, end)
        leaf = held
    if limit is not None:
        exists = exists & (end <= tl.max(limit, 0))
    return row, exists, logit, end, leaf


@triton.jit
def _logits(q, k, bias, exists, end, leaf, inside, limit, own, scale):
    """[queries, entries] to base 2; −∞ where an entry is not seen."""
    seen = inside[:, None] & exists[None, :]
    if limit is not None:
        seen = seen & (end[None, :] <= limit[:, None])
    if own is not None:
        seen = seen & (leaf[None, :] != own[:, None])
    return tl.where(seen, _product(q, k) * (scale * LOG2E) + bias[None, :], -float("inf"))


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
def _forward_level(
    best,
    mass,
    out,
    q,
    keys,
    values,
    start,
    number,
    hole,
    table,
    order,
    bias,
    inside,
    limit,
    own,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Take one level's entries into the running softmax."""
    for begin in range(0, tl.sum((number > 0).to(tl.int32), 0), ROWS):
        some_start, some_number, some_hole = _some(start, number, hole, begin, ROWS)
        for past in range(0, tl.max(some_number, 0), CHILDREN):
            row, exists, logit, end, leaf = _entries(
                some_start, some_number, some_hole, past, table, order, bias, limit, ROWS, CHILDREN, LEAVES
            )
            k = _read(keys, row, exists, DIM, q.shape[1])
            logit = _logits(q, k, logit, exists, end, leaf, inside, limit, own, scale)
            better = tl.maximum(best, tl.max(logit, 1))
            finite = tl.where(better == -float("inf"), 0.0, better)
            weight = tl.exp2(logit - finite[:, None])
            v = _read(values, row, exists, VALUE_DIM, out.shape[1])
            fade = tl.exp2(best - finite)
            mass = mass * fade + tl.sum(weight, 1)
            out = out * fade[:, None] + _average(weight, v)
            best = better
    return best, mass, out


@triton.jit
def _forward_kernel(
    q_ptr,
    keys,
    values,
    out_ptr,
    mass_ptr,
    open_rows,
    group_offsets,
    group_tree,
    table,
    roots,
    level_ends,
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
    num_open,
    open_group_stride,
    open_head_stride,
    bias_stride,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    LEAF_CHILDREN: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """One program: a block of queries of one group, one head."""
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.load(group_offsets + group) + tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = query < tl.load(group_offsets + group + 1)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    kv_head = head // heads_per_key
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    order = None if order is None else order + kv_head * num_leaves
    limit = None if limit_ptr is None else tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    bias = 0.0 if pooled_bias is None else tl.load(pooled_bias + head * bias_stride).to(tl.float32) * LOG2E
    d = tl.arange(0, BLOCK_D)
    source = q_ptr + query[:, None] * q_stride + head * q_head_stride + d
    q = tl.load(source, mask=inside[:, None] & (d < DIM), other=0.0)
    best = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)

    tree = tl.load(group_tree + group)
    root = tl.load(roots + 2 * tree)
    root_level = tl.max(tl.load(roots + 2 * tree + 1 + tl.arange(0, 1)), 0)
    open_rows += group * open_group_stride + head * open_head_stride
    row = _paths(open_rows, table, root, num_open, WIDTH)
    first, size, none, row, below = _gaps_of_levels(row, row * 0 - 1, level_ends, 1, table, 1)
    best, mass, out = _forward_level(
        best, mass, out, q, keys, values, first, size, none, table, order, bias, inside, limit, own, scale,
        DIM, VALUE_DIM, LEAF_ROWS, LEAF_CHILDREN, True,
    )  # fmt: skip
    for level in range(2, root_level + 1, LEVELS):
        start, number, hole, row, below = _gaps_of_levels(row, below, level_ends, level, table, LEVELS)
        best, mass, out = _forward_level(
            best, mass, out, q, keys, values, start, number, hole, table, order, bias, inside, limit, own, scale,
            DIM, VALUE_DIM, ROWS, CHILDREN, False,
        )  # fmt: skip

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    e = tl.arange(0, BLOCK_V)
    target = out_ptr + (query[:, None] * heads + head) * VALUE_DIM + e
    tl.store(target, (out / mass[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None] & (e < VALUE_DIM))
    total = tl.where(some, best + tl.log2(mass), float("inf"))
    tl.store(mass_ptr + head * num_queries + query, total, mask=inside)


@triton.jit
def _backward_level(
    d_q,
    d_bias,
    q,
    d_out,
    mass,
    shared,
    keys,
    values,
    d_keys,
    d_values,
    start,
    number,
    hole,
    table,
    order,
    bias,
    inside,
    limit,
    own,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Gradients through one level's entries. `shared`: d_out · out, what every logit of a query loses."""
    for begin in range(0, tl.sum((number > 0).to(tl.int32), 0), ROWS):
        some_start, some_number, some_hole = _some(start, number, hole, begin, ROWS)
        for past in range(0, tl.max(some_number, 0), CHILDREN):
            row, exists, logit, end, leaf = _entries(
                some_start, some_number, some_hole, past, table, order, bias, limit, ROWS, CHILDREN, LEAVES
            )
            k = _read(keys, row, exists, DIM, q.shape[1])
            v = _read(values, row, exists, VALUE_DIM, d_out.shape[1])
            weight = tl.exp2(_logits(q, k, logit, exists, end, leaf, inside, limit, own, scale) - mass[:, None])
            _add(d_values, row, exists, _spread(weight, d_out), VALUE_DIM)
            d_logit = weight * (_product(d_out, v) - shared[:, None])
            if not LEAVES:
                d_bias += tl.sum(tl.where((leaf < 0)[None, :], d_logit, 0.0), 1)
            d_logit *= scale
            d_q += _average(d_logit, k)
            _add(d_keys, row, exists, _spread(d_logit, q), DIM)
    return d_q, d_bias


@triton.jit
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
    open_rows,
    group_offsets,
    group_tree,
    table,
    roots,
    level_ends,
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
    num_open,
    open_group_stride,
    open_head_stride,
    bias_stride,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    LEAF_CHILDREN: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """One program: a block of queries of one group, one head, over the same entries as in the forward pass."""
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.load(group_offsets + group) + tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = query < tl.load(group_offsets + group + 1)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    kv_head = head // heads_per_key
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    d_keys += kv_head * num_rows * DIM
    d_values += kv_head * num_rows * VALUE_DIM
    order = None if order is None else order + kv_head * num_leaves
    limit = None if limit_ptr is None else tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    bias = 0.0 if pooled_bias is None else tl.load(pooled_bias + head * bias_stride).to(tl.float32) * LOG2E
    d = tl.arange(0, BLOCK_D)
    source = q_ptr + query[:, None] * q_stride + head * q_head_stride + d
    q = tl.load(source, mask=inside[:, None] & (d < DIM), other=0.0)
    out_row = query * heads + head
    d_out = _read(d_out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    out = _read(out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    shared = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    mass = tl.load(mass_ptr + head * num_queries + query, mask=inside, other=float("inf"))
    d_q = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    d_bias = tl.zeros([BLOCK_Q], tl.float32)

    tree = tl.load(group_tree + group)
    root = tl.load(roots + 2 * tree)
    root_level = tl.max(tl.load(roots + 2 * tree + 1 + tl.arange(0, 1)), 0)
    open_rows += group * open_group_stride + head * open_head_stride
    row = _paths(open_rows, table, root, num_open, WIDTH)
    first, size, none, row, below = _gaps_of_levels(row, row * 0 - 1, level_ends, 1, table, 1)
    d_q, d_bias = _backward_level(
        d_q, d_bias, q, d_out, mass, shared, keys, values, d_keys, d_values, first, size, none, table, order, bias,
        inside, limit, own, scale, DIM, VALUE_DIM, LEAF_ROWS, LEAF_CHILDREN, True,
    )  # fmt: skip
    for level in range(2, root_level + 1, LEVELS):
        start, number, hole, row, below = _gaps_of_levels(row, below, level_ends, level, table, LEVELS)
        d_q, d_bias = _backward_level(
            d_q, d_bias, q, d_out, mass, shared, keys, values, d_keys, d_values, start, number, hole, table, order, bias,
            inside, limit, own, scale, DIM, VALUE_DIM, ROWS, CHILDREN, False,
        )  # fmt: skip

    target = d_q_ptr + out_row[:, None] * DIM + d
    tl.store(target, d_q.to(d_q_ptr.dtype.element_ty), mask=inside[:, None] & (d < DIM))
    if d_bias_ptr is not None:
        program = (group * heads + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(d_bias_ptr + program, tl.sum(d_bias, 0))
