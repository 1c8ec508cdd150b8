"""The pyramid of a head: means over the leaves below every row of a plan, for pooled keys and values.

A mean is the mean of the children's means, weighted by their leaf counts. A first launch copies the leaves and writes the
means of leaf families, a few families per program. Above these, a program climbs a run of adjacent subtrees level by level
and reads back from the hardware caches what it has just written, so that a deep binary tree takes two or three more
launches instead of one per level. The gradient of a leaf is the sum of the gradients of all rows above it, each divided by
its leaf count; each program of the backward pass walks up from a run of leaves.

Every level is rounded to the precision of the inputs; sums are in float32. Rounding errors of different children average
out, so the total error stays at about one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.levels import Levels, families
from hsa.attention.kernels.triton.launch import Operator, last_stride_1

SUBTREE = 64
"""Number of rows at the foot of the subtrees that one program climbs. Near the roots it may be greater, to save a launch."""
TILE = 4096
"""Number of values that a program holds at once."""


def pyramid(x: Tensor, plan: Levels, order: Tensor | None = None) -> Tensor:
    """Return the means of `x` over the leaves below every row, `[heads, rows, dim]` in the dtype of `x`.

    Args:
        x: `[leaves, heads, dim]` in float32, bfloat16 or float16.
        plan: Rows of the forest.
        order: `[heads, leaves]` leaf at each leaf slot of the tree; None for leaf i at slot i.
    """
    climb = _climb(plan)
    return operator(x, order, *_tables(plan), climb.starts, climb.stages, climb.families, plan.num_rows)


@dataclass(frozen=True, eq=False)
class _Climb:
    """Rows that each program writes, launch by launch.

    A launch (stage) has a table [levels + 1, programs + 1]: the first row of each program at each level, from the foot of
    the stage up. `starts` holds all tables; `stages` has (begin in `starts`, programs, levels, largest family) per stage.
    """

    starts: Tensor
    stages: list[int]
    families: list[int]  # first row of leaf families, end of their rows, members of the largest


def _climb(plan: Levels) -> _Climb:
    return plan.cached("climb", lambda: _build(plan))


def _build(plan: Levels) -> _Climb:
    # bounds_of[l] divides the rows of level l into the families of the level above.
    bounds_of = [plan.bounds[level] + families(plan, level) for level in range(plan.num_levels)]
    tables: list[np.ndarray] = []
    stages: list[int] = []
    begin, foot = 0, 1  # the leaves have a launch of their own
    while foot < plan.num_levels:
        few = plan.bounds[foot + 1] - plan.bounds[foot] <= 4 * SUBTREE
        top, subtrees = foot, np.arange(plan.bounds[foot], plan.bounds[foot + 1] + 1)  # first row of each, at the foot
        while top < plan.num_levels:
            wider = subtrees[bounds_of[top] - plan.bounds[top]]
            if top > foot and not few and np.diff(wider).max(initial=0) > SUBTREE:
                break
            top, subtrees = top + 1, wider
        # Adjacent subtrees that start in the same SUBTREE rows of the foot go to one program.
        first = np.flatnonzero(np.diff((subtrees[:-1] - plan.bounds[foot]) // SUBTREE, prepend=-1))
        starts = [plan.bounds[top] + np.append(first, len(subtrees) - 1)]
        for level in range(top - 1, foot - 1, -1):
            starts.append(bounds_of[level][starts[-1] - plan.bounds[level + 1]])
        tables += starts[::-1]
        above = slice(plan.bounds[foot + 1], plan.bounds[top + 1])
        widest = int(plan.num_children[above].max(initial=1))
        stages += [begin, len(first), top - foot, widest]
        begin += (top - foot + 1) * (len(first) + 1)
        foot = top
    starts_of_all = np.concatenate([np.empty(0), *tables]).astype(np.int32)
    first_row, end_row = plan.bounds[1:3]
    leaf_families = [first_row, end_row, int(plan.num_children[first_row:end_row].max(initial=1))]
    return _Climb(torch.from_numpy(starts_of_all).to(plan.device), stages, leaf_families)


def _tables(plan: Levels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t = plan.tensors
    return t["first_child"], t["num_children"], t["leaf_count"], t["parent"]


def _pyramid(
    x: Tensor,
    order: Tensor | None,
    first_child: Tensor,
    num_children: Tensor,
    leaf_count: Tensor,
    parent: Tensor,
    starts: Tensor,
    stages: list[int],
    families: list[int],
    num_rows: int,
) -> Tensor:
    leaves, heads, dim = x.shape
    x = last_stride_1(x)
    order = None if order is None else order.contiguous()
    out = _empty(x, num_rows)
    block_d = padded(dim)
    block_rows = max(1, TILE // block_d)
    if leaves == 0:
        return out
    first, last, largest = families
    children = min(16, block_rows, triton.next_power_of_2(largest))
    _leaf_kernel[(triton.cdiv(last - first, block_rows // children) * heads,)](
        x, order, out, first_child, num_children, x.stride(0), x.stride(1), leaves, num_rows, first, last, heads, dim,
        PARENTS=block_rows // children, CHILDREN=children, BLOCK_D=block_d,
    )  # fmt: skip
    for begin, programs, levels, widest in zip(*(stages[i::4] for i in range(4)), strict=True):
        # num_stages=1, because no load may move ahead of the barrier between levels.
        _climb_kernel[(programs, heads)](
            out, starts[begin:], first_child, num_children, leaf_count, num_rows, programs, levels, dim,
            BLOCK_ROWS=block_rows, BLOCK_CHILDREN=min(16, block_rows, triton.next_power_of_2(widest)), BLOCK_D=block_d,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def _empty(x: Tensor, *rest: Any) -> Tensor:
    num_rows = rest[-1]
    return x.new_empty(x.shape[1], num_rows, x.shape[2])


def _pyramid_backward(
    d_rows: Tensor, order: Tensor | None, leaf_count: Tensor, parent: Tensor, leaves: int, num_levels: int
) -> Tensor:
    heads, num_rows, dim = d_rows.shape
    d_rows = d_rows.contiguous()
    order = None if order is None else order.contiguous()
    d_x = d_rows.new_empty(leaves, heads, dim)
    if leaves:
        block_d = padded(dim)
        block_rows = max(1, TILE // block_d)
        _walk_up_kernel[(triton.cdiv(leaves, block_rows), heads)](
            d_rows, order, d_x, leaf_count, parent, leaves, num_rows, heads, num_levels, dim,
            BLOCK_ROWS=block_rows, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return d_x


def _empty_gradient(
    d_rows: Tensor, order: Tensor | None, leaf_count: Tensor, parent: Tensor, leaves: int, num_levels: int
) -> Tensor:
    return d_rows.new_empty(leaves, d_rows.shape[0], d_rows.shape[2])


def _keep(ctx, inputs, output) -> None:
    x, order, _, _, leaf_count, parent, _, stages, _, _ = inputs
    ctx.save_for_backward(order, leaf_count, parent)
    ctx.leaves, ctx.num_levels = len(x), 1 + sum(stages[2::4])


def _backward(ctx, d_rows: Tensor):
    return gradient(d_rows, *ctx.saved_tensors, ctx.leaves, ctx.num_levels), *(None,) * 9


operator = Operator("pyramid", _pyramid, _empty, _keep, _backward)
gradient = Operator("pyramid_backward", _pyramid_backward, _empty_gradient)


# These arguments differ from batch to batch; the kernels must not be compiled again for each value.
kernel = triton.jit(
    do_not_specialize=["leaves", "num_rows", "first_family", "end_family", "programs", "levels", "num_levels"],
    do_not_specialize_on_alignment=["starts"],
)


@kernel
def _leaf_kernel(
    x, order, out, first_child, num_children, x_leaf_stride, x_head_stride, leaves, num_rows, first_family, end_family,
    heads, dim, PARENTS: tl.constexpr, CHILDREN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the leaves of a few leaf families of one head, and store their means."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = first_family + tl.program_id(0) // heads * PARENTS + tl.arange(0, PARENTS)
    inside = row < end_family
    first = tl.load(first_child + row, mask=inside, other=0)
    count = tl.load(num_children + row, mask=inside, other=0)
    d = tl.arange(0, BLOCK_D)
    out += head * num_rows * dim
    total = tl.zeros([PARENTS, BLOCK_D], tl.float32)
    past, most = 0, tl.max(count)
    while past < most:
        member = past + tl.arange(0, CHILDREN)
        slot = first[:, None] + member  # [parents, children]
        exists = member < count[:, None]
        leaf = slot if order is None else tl.load(order + head * leaves + slot, mask=exists, other=0)
        mask = exists[:, :, None] & (d < dim)
        value = tl.load(
            x + leaf.to(tl.int64)[:, :, None] * x_leaf_stride + head * x_head_stride + d, mask=mask, other=0.0
        )
        tl.store(out + slot.to(tl.int64)[:, :, None] * dim + d, value, mask=mask)
        total += tl.sum(value.to(tl.float32), 1)
        past += CHILDREN
    mean = total / tl.maximum(count, 1).to(tl.float32)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * dim + d, mean.to(out.dtype.element_ty), mask=inside[:, None] & (d < dim))


@kernel
def _climb_kernel(
    out, starts, first_child, num_children, leaf_count, num_rows, programs, levels, dim,
    BLOCK_ROWS: tl.constexpr, BLOCK_CHILDREN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the means of a run of subtrees of one head, from the foot of the stage up."""
    head = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    out += head * num_rows * dim
    BLOCK_PARENTS: tl.constexpr = BLOCK_ROWS // BLOCK_CHILDREN
    member = tl.arange(0, BLOCK_CHILDREN)
    level = 0
    while level < levels:
        tl.debug_barrier()  # wait until all threads of this program have written the level below
        starts += programs + 1
        begin, end = tl.load(starts + program), tl.load(starts + program + 1)
        while begin < end:
            row = begin + tl.arange(0, BLOCK_PARENTS)
            inside = row < end
            first = tl.load(first_child + row, mask=inside, other=0)
            count = tl.load(num_children + row, mask=inside, other=0)
            total = tl.load(leaf_count + row, mask=inside, other=1)
            mean = tl.zeros([BLOCK_PARENTS, BLOCK_D], tl.float32)
            past, most = 0, tl.max(count)
            while past < most:
                child = first[:, None] + past + member  # [parents, children]
                exists = past + member < count[:, None]
                weight = tl.load(leaf_count + child, mask=exists, other=0).to(tl.float32) / total[:, None]
                source = out + child.to(tl.int64)[:, :, None] * dim + d
                value = tl.load(source, mask=exists[:, :, None] & (d < dim), other=0.0).to(tl.float32)
                mean += tl.sum(value * weight[:, :, None], 1)
                past += BLOCK_CHILDREN
            target = out + row.to(tl.int64)[:, None] * dim + d
            tl.store(target, mean.to(out.dtype.element_ty), mask=inside[:, None] & (d < dim))
            begin += BLOCK_PARENTS
        level += 1


@kernel
def _walk_up_kernel(
    d_rows, order, d_x, leaf_count, parent, leaves, num_rows, heads, num_levels, dim,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a run of leaf slots of one head, by walking up from each leaf to its root."""
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = slot < leaves
    mask = inside[:, None] & (d < dim)
    d_rows += head * num_rows * dim
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    row, level = slot, 0
    while level <= num_levels:  # all leaves of the plan have the same depth
        count = tl.load(leaf_count + row, mask=inside, other=1).to(tl.float32)
        value = tl.load(d_rows + row.to(tl.int64)[:, None] * dim + d, mask=mask, other=0.0).to(tl.float32)
        total += value / count[:, None]
        row = tl.load(parent + row, mask=inside, other=0)
        level += 1
    leaf = slot if order is None else tl.load(order + head * leaves + slot, mask=inside, other=0)
    target = d_x + (leaf.to(tl.int64)[:, None] * heads + head) * dim + d
    tl.store(target, total.to(d_x.dtype.element_ty), mask=mask)
