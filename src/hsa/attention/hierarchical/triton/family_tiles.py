"""Tiles of families in kernels: indices, loads and stores of their rows, and sums over families.

A tile is `GROUPS` runs of up to `SIZE` rows. A run is one family (`SINGLE`) or several small families; if all runs are full
and in order (`FULL`), their rows need no lookup. Products are products of small matrices, one per run.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLOTS = tl.constexpr(16)
"""Maximum number of families in a run."""


@triton.jit
def product(a, b, GROUPS: tl.constexpr, PRECISION: tl.constexpr):
    """Return [GROUPS, m, k] @ [GROUPS, k, n]; a single group as a matrix product, whose rows the warps share."""
    if GROUPS == 1:
        left, right = tl.reshape(a, (a.shape[1], a.shape[2])), tl.reshape(b, (b.shape[1], b.shape[2]))
        return tl.reshape(tl.dot(left, right, input_precision=PRECISION), (1, a.shape[1], b.shape[2]))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def three_products(a, b, c, x, y, z, GROUPS: tl.constexpr, PRECISION: tl.constexpr):
    """Return a @ x + b @ y + c @ z, summed in the accumulator of the products."""
    if GROUPS == 1:
        total = tl.dot(tl.reshape(a, a.shape[1:]), tl.reshape(x, x.shape[1:]), input_precision=PRECISION)
        total = tl.dot(tl.reshape(b, b.shape[1:]), tl.reshape(y, y.shape[1:]), acc=total, input_precision=PRECISION)
        total = tl.dot(tl.reshape(c, c.shape[1:]), tl.reshape(z, z.shape[1:]), acc=total, input_precision=PRECISION)
        return tl.reshape(total, (1, a.shape[1], x.shape[2]))
    total = tl.dot(a, x, input_precision=PRECISION)
    total = tl.dot(b, y, acc=total, input_precision=PRECISION)
    return tl.dot(c, z, acc=total, input_precision=PRECISION)


@triton.jit
def transposed(x):
    return tl.permute(x, (0, 2, 1))


@triton.jit
def find_rows(
    group, last_group, begin_ptr, end_ptr, parent_ptr, SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr
):  # fmt: skip
    """Return for the runs from `group` on: rows, whether they exist, their parents; first parents, whether runs exist.

    The first three are [GROUPS, SIZE], the others [GROUPS].
    """
    group = group + tl.arange(0, GROUPS)
    exists = group < last_group
    member = tl.arange(0, SIZE)[None, :]
    if FULL:
        rows = group[:, None] * SIZE + member
        valid = exists[:, None] & (member < SIZE)
        first = tl.load(parent_ptr + group * SIZE, mask=exists, other=0)
    else:
        begin = tl.load(begin_ptr + group, mask=exists, other=0)
        end = tl.load(end_ptr + group, mask=exists, other=0)
        rows = begin[:, None] + member
        valid = rows < end[:, None]
        first = tl.load(parent_ptr + begin, mask=exists, other=0)
    if SINGLE:
        parent = tl.where(valid, first[:, None], -1)
    else:
        parent = tl.load(parent_ptr + rows, mask=valid, other=-1)
    return rows, valid, parent, first, exists


@triton.jit
def load_rows(pointer, rows, valid, head, row_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows [GROUPS, SIZE, BLOCK] of a [rows, heads, WIDTH] tensor; zeros for missing rows and columns."""
    column = tl.arange(0, BLOCK)[None, None, :]
    mask = valid[:, :, None] & (column < WIDTH) if WIDTH != BLOCK else valid[:, :, None]
    offset = rows.to(tl.int64)[:, :, None] * row_stride + head.to(tl.int64) * head_stride
    return tl.load(pointer + offset + column, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, x, rows, valid, head, row_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, None, :]
    mask = valid[:, :, None] & (column < WIDTH) if WIDTH != BLOCK else valid[:, :, None]
    offset = rows.to(tl.int64)[:, :, None] * row_stride + head.to(tl.int64) * head_stride
    tl.store(pointer + offset + column, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def family_logits(
    q, k, positions, parent, valid, log_count, scale, unit, P: tl.constexpr, PRECISION: tl.constexpr,
    INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr,
    COUNTED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return `unit` times the logits [GROUPS, SIZE, SIZE] of every member with its siblings, and of a leaf with itself.

    They are −∞ for members that do not see each other. `COUNTED` adds `log_count`, which has the factor `unit` already.
    """
    logits = product(q, transposed(k), GROUPS, PRECISION) * (scale * unit)
    if P > 0:
        logits += product(positions, transposed(positions), GROUPS, PRECISION) * unit
    if COUNTED:
        logits += log_count[:, None, :]
    member = tl.arange(0, SIZE)
    i, j = member[None, :, None], member[None, None, :]
    sees = valid[:, None, :]
    if not SINGLE:
        sees = sees & (parent[:, :, None] == parent[:, None, :])
    if CAUSAL:
        itself = j <= i if LEAVES else j < i
        sees = sees & itself
    elif not (LEAVES and INCLUDE_SELF):
        sees = sees & (i != j)
    return tl.where(sees, logits, float("-inf"))


@triton.jit
def find_families(parent, first, exists, valid, SINGLE: tl.constexpr):
    """Return the parents [GROUPS, SLOTS] of a tile's families, whether they exist, and the slot of every row (−1: none)."""
    slots = tl.arange(0, SLOTS)[None, :]
    above = first[:, None] + slots
    if SINGLE:
        return above, exists[:, None] & (slots == 0), tl.where(valid, 0, -1)
    return above, above <= tl.max(parent, 1)[:, None], tl.where(valid, parent - first[:, None], -1)


@triton.jit
def membership(slot):
    """Return whether each row is in each family, [GROUPS, SLOTS, SIZE]."""
    return slot[:, None, :] == tl.arange(0, SLOTS)[None, :, None]


@triton.jit
def store_sums(pointer, x, share, above, is_family, slot, head, heads, SINGLE: tl.constexpr):
    """Store `share` times the sum of x [GROUPS, SIZE] over each family; rows outside families are ignored."""
    if SINGLE:
        total = tl.sum(tl.where(slot >= 0, x, 0.0), 1)[:, None]
    else:
        total = tl.sum(tl.where(membership(slot), x[:, None, :], 0.0), 2)
    tl.store(pointer + above.to(tl.int64) * heads + head, total * share, mask=is_family)


@triton.jit
def pool(
    pointer, weights, x, above, is_family, head, heads, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Store the sums of the members' rows of each family, with weights [GROUPS, SLOTS, SIZE]."""
    total = product(weights.to(x.dtype), x, GROUPS, PRECISION)
    store_rows(pointer, total, above, is_family, head, heads * WIDTH, WIDTH, WIDTH, BLOCK)


@triton.jit
def pool_all(
    pointer, plane, q, k, v, weights, share, first, exists, slot, head, heads, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Pool q, k and v of runs of one family each, as three rows of one product, stored `plane` numbers apart."""
    row = tl.arange(0, SLOTS)[None, :, None]
    weights = tl.where(slot >= 0, weights, 0.0)[:, None, :]
    total = three_products(
        tl.where(row == 0, weights, 0.0).to(q.dtype), tl.where(row == 1, weights, 0.0).to(q.dtype),
        tl.where(row == 2, weights, 0.0).to(q.dtype), q, k, v, GROUPS, PRECISION
    )  # fmt: skip
    total = total * share[:, None, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    offset = (first.to(tl.int64) * heads + head)[:, None, None] * WIDTH + row.to(tl.int64) * plane
    mask = exists[:, None, None] & (row < 3) & (column < WIDTH)
    tl.store(pointer + offset + column, total.to(pointer.dtype.element_ty), mask=mask)
