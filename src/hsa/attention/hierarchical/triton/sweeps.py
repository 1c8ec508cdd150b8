"""Kernels of hierarchical attention, forward and backward. A program processes one tile of families for one head.

    up      attention within families: the siblings' average y, the masses, and the pooled rows of the parents
    down    out(C) = out(P) + weight(P)·side(C)·y(C),  weight(C) = weight(P)·down(C)
    d_down  the gradient of `down`, from the leaves up
    d_up    the gradient of `up`, from the roots down; weights are computed again

A tile is `GROUPS` runs of up to `SIZE` rows. A run is one family (`SINGLE`) or several small families. Attention within a
run is one small product [SIZE, SIZE]; entries between different families are masked. Families of 16 in runs of 16 waste
nothing, and if all runs are full and in order (`FULL`), their rows need no lookup. Rows of the leaf level (`LEAVES`) are in
the user's tensors; rows above, numbered from 0 after the leaves, are in buffers that `up` fills.

The levels near the roots, where a tree has few rows, are processed by one program per bundle of trees (`top`): a launch per
level would take longer. `down` and `d_up` process the leaves from last to first, to reuse what the previous sweep left in
the cache.

Masses (`inner`, `outer`) are stored as logarithms to base 2; their gradients are those of natural logarithms. A member
without siblings has outer −∞, a leaf that does not see itself has inner −∞; shares are computed without subtracting
infinities.

`POWER` other than 0 selects entmax instead of softmax (`entmax/`): the row of a member then has one more entry for its
inside, y is the siblings' part of the row, not divided by their share, `outer` is the share of the inside, and `inner` is
the value of the family minus the value for logits 0. Everything else is the same. With `ANY`, α differs between levels and
heads, and has a gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.hierarchical.entmax.triton.family import (
    ANY,
    gradient_of_logits,
    gradient_of_power,
    sparse_weights,
    split_diagonal,
    with_diagonal,
)
from hsa.attention.hierarchical.triton.family_tiles import (
    family_logits,
    find_families,
    find_rows,
    load_rows,
    membership,
    pool,
    pool_all,
    product,
    store_rows,
    store_sums,
    transposed,
)
from hsa.attention.kernels.triton.overlap import finish_after_previous_launch, wait_for_previous_launch

LOG2E = tl.constexpr(1.4426950408889634)
# Arguments whose values and alignment differ from batch to batch: kernels must not be recompiled for them.
VARYING = ["num_groups", "num_bundles", "levels", "begin", "end", "root"]
UNALIGNED = [
    *("parent_ptr", "count_ptr", "up_count_ptr", "inside_ptr", "begin_ptr", "end_ptr", "bundle_ptr"),
    *("inner_ptr", "outer_ptr", "weight_ptr", "d_weight_ptr", "d_inner_ptr", "power_ptr", "d_power_ptr"),
]
kernel = triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)


@triton.jit
def _weights(
    q, k, positions, parent, valid, count, scale, P: tl.constexpr, PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr,
    CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the softmax weights of every member over its siblings, and the log2 of their mass (−∞ without siblings)."""
    log_count = count
    if not LEAVES:
        log_count = tl.log2(count)
    logits = family_logits(
        q, k, positions, parent, valid, log_count, scale, LOG2E, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES, SINGLE,
        not LEAVES, GROUPS, SIZE
    )  # fmt: skip
    top = tl.max(logits, 2)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logits - top[:, :, None])
    mass = tl.sum(weights, 2)
    alone = mass == 0.0
    mass = tl.where(alone, 1.0, mass)
    return weights * (1.0 / mass)[:, :, None], tl.where(alone, float("-inf"), tl.log2(mass) + top)


@triton.jit
def _shares(inner, outer):
    """Return the shares of siblings and of own children in a member's row; both 0 if it has neither."""
    no_inner, no_outer = inner == float("-inf"), outer == float("-inf")
    neither = no_inner | no_outer
    gap = tl.where(neither, 0.0, outer) - tl.where(neither, 0.0, inner)
    less = tl.exp2(-tl.abs(gap))
    larger, smaller = 1.0 / (1.0 + less), less / (1.0 + less)
    side, down = tl.where(gap > 0, larger, smaller), tl.where(gap > 0, smaller, larger)
    side = tl.where(no_outer, 0.0, tl.where(no_inner, 1.0, side))
    down = tl.where(no_inner, 0.0, tl.where(no_outer, 1.0, down))
    return side, down


@triton.jit
def _stored_shares(outer_ptr, inner_ptr, entry, valid, POWER: tl.constexpr):
    """Return the shares of siblings and of own children. With entmax, `up` stores the latter, and y includes the former."""
    outer = tl.load(outer_ptr + entry, mask=valid, other=0.0)
    if POWER != 0:
        return tl.full(outer.shape, 1.0, tl.float32), outer
    return _shares(tl.load(inner_ptr + entry, mask=valid, other=0.0), outer)


@triton.jit
def _mass(inner, outer):
    """Return log2(2^inner + 2^outer)."""
    high, low = tl.maximum(inner, outer), tl.minimum(inner, outer)
    empty = low == float("-inf")
    gap = tl.where(empty, 0.0, high) - tl.where(empty, 0.0, low)
    return tl.where(empty, high, high + tl.log2(1.0 + tl.exp2(-gap)))


@triton.jit
def _inside(inner_ptr, inside_ptr, rows, entry, valid, LEAVES: tl.constexpr, POWER: tl.constexpr):
    """Return the inner mass of every row, and the weight of its inside as an entry of entmax; zeros for leaves."""
    inner = tl.zeros(rows.shape, tl.float32)
    inside = inner
    if not LEAVES:
        if POWER == 0:
            inner = tl.load(inner_ptr + entry, mask=valid, other=float("-inf"))
        else:
            inner = tl.load(inner_ptr + entry, mask=valid, other=0.0)
            inside = tl.load(inside_ptr + rows, mask=valid, other=0.0)
    return inner, inside


@triton.jit
def _load_tile(
    group, last_group, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr, position_row,
    position_head, parent_ptr, count_ptr, begin_ptr, end_ptr, heads, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr,
    FULL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the results of `find_rows`, then q, k, v, positions (if P > 0), leaf counts, and indices row · heads + head."""
    rows, valid, parent, first, exists = find_rows(
        group, last_group, begin_ptr, end_ptr, parent_ptr, SINGLE, FULL, GROUPS, SIZE
    )
    q = load_rows(q_ptr, rows, valid, head, q_row, q_head, D, BLOCK_D)
    k = load_rows(k_ptr, rows, valid, head, k_row, k_head, D, BLOCK_D)
    v = load_rows(v_ptr, rows, valid, head, v_row, v_head, DV, BLOCK_DV)
    positions = q
    if P > 0:
        positions = load_rows(position_ptr, rows, valid, head, position_row, position_head, P, BLOCK_P)
    count = tl.full((GROUPS, SIZE), 1.0, tl.float32)
    if not LEAVES:
        count = tl.load(count_ptr + rows, mask=valid, other=1).to(tl.float32)
    entry = rows.to(tl.int64) * heads + head
    return rows, valid, parent, first, exists, q, k, v, positions, count, entry


@triton.jit
def _up_tile(
    group, last_group, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr, position_row,
    position_head, y_ptr, outer_ptr, inner_ptr, up_q_ptr, plane, parent_ptr, count_ptr, up_count_ptr, inside_ptr, power_ptr,
    begin_ptr, end_ptr, heads, scale, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr,
    CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    rows, valid, parent, first, exists, q, k, v, positions, count, entry = _load_tile(
        group, last_group, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr,
        position_row, position_head, parent_ptr, count_ptr, begin_ptr, end_ptr, heads, D, DV, P, BLOCK_D, BLOCK_DV, BLOCK_P,
        LEAVES, SINGLE, FULL, GROUPS, SIZE
    )  # fmt: skip
    # All loads come before the first store, so that they wait for memory together.
    above, is_family, slot = find_families(parent, first, exists, valid, SINGLE)
    share = 1.0 / tl.load(up_count_ptr + above, mask=is_family, other=1).to(tl.float32)
    inner, inside = _inside(inner_ptr, inside_ptr, rows, entry, valid, LEAVES, POWER)

    if SINGLE and D == DV:
        parts, of_family = count, 1.0 / tl.load(up_count_ptr + first, mask=exists, other=1).to(tl.float32)
        if not LEAVES:  # counts may overflow half precision; for leaves they are 1
            parts, of_family = count * of_family[:, None], tl.full((GROUPS,), 1.0, tl.float32)
    else:
        parts = count / tl.load(up_count_ptr + parent, mask=valid, other=1).to(tl.float32)

    if POWER == 0:
        weights, outer = _weights(
            q, k, positions, parent, valid, count, scale, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES, SINGLE, GROUPS,
            SIZE
        )  # fmt: skip
        mass = outer
        if not LEAVES:
            mass = _mass(inner, outer)
    else:
        r = POWER
        if POWER == ANY:
            r = tl.load(power_ptr + head)
        weights, _, mass, _, _ = sparse_weights(
            q, k, positions, parent, valid, count, inner, inside, scale, r, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES,
            SINGLE, GROUPS, SIZE, POWER, WEIGHTED
        )  # fmt: skip
        if not LEAVES:
            outer, weights = split_diagonal(weights, SIZE)  # the children's share is stored as outer
    y = product(weights.to(v.dtype), v, GROUPS, PRECISION)
    store_rows(y_ptr, y, rows, valid, head, heads * DV, DV, DV, BLOCK_DV)
    if not LEAVES:
        tl.store(outer_ptr + entry, outer, mask=valid)
    store_sums(inner_ptr, count * mass, share, above, is_family, slot, head, heads, SINGLE)

    # Rows of the parents: means over the leaves below them.
    if SINGLE and D == DV:
        pool_all(
            up_q_ptr, plane, q, k, v, parts, of_family, first, exists, slot, head, heads, D, BLOCK_D, GROUPS, PRECISION
        )
    else:
        weights = tl.where(membership(slot), parts[:, None, :], 0.0)
        pool(up_q_ptr, weights, q, above, is_family, head, heads, D, BLOCK_D, GROUPS, PRECISION)
        pool(up_q_ptr + plane, weights, k, above, is_family, head, heads, D, BLOCK_D, GROUPS, PRECISION)
        pool(up_q_ptr + plane + plane, weights, v, above, is_family, head, heads, DV, BLOCK_DV, GROUPS, PRECISION)


@triton.jit
def _down_tile(
    begin, end, head, y_ptr, outer_ptr, inner_ptr, weight_ptr, out_ptr, up_out_ptr, parent_ptr, root, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, LEAVES: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = begin + tl.arange(0, ROWS)
    valid = rows < end
    parent = tl.load(parent_ptr + rows, mask=valid, other=0).to(tl.int64)
    rows = rows.to(tl.int64)
    column = tl.arange(0, BLOCK_DV)[None, :]
    mask = valid[:, None] & (column < DV)
    entry, above = rows * heads + head, parent * heads + head
    below_root = parent >= root  # a root has out 0 and weight 1
    weight = tl.load(weight_ptr + above, mask=valid & ~below_root, other=1.0)
    read = mask
    if POWER != 0:  # entmax: rows that get no weight from above are not read
        read = mask & (weight != 0.0)[:, None]
    y = tl.load(y_ptr + entry[:, None] * DV + column, mask=read, other=0.0).to(tl.float32)
    out = tl.load(up_out_ptr + above[:, None] * DV + column, mask=mask & ~below_root[:, None], other=0.0)
    if LEAVES:
        out += weight[:, None] * y
    else:
        side, down = _stored_shares(outer_ptr, inner_ptr, entry, valid, POWER)
        out += (weight * side)[:, None] * y
        tl.store(weight_ptr + entry, weight * down, mask=valid)
    tl.store(out_ptr + entry[:, None] * DV + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _d_down_tile(
    group, last_group, head, d_out_ptr, d_out_row, d_out_head, y_ptr, outer_ptr, inner_ptr, d_weight_ptr, up_d_out_ptr,
    parent_ptr, begin_ptr, end_ptr, heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    LEAVES: tl.constexpr, SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    POWER: tl.constexpr
):  # fmt: skip
    rows, valid, parent, first, exists = find_rows(
        group, last_group, begin_ptr, end_ptr, parent_ptr, SINGLE, FULL, GROUPS, SIZE
    )
    d_out = load_rows(d_out_ptr, rows, valid, head, d_out_row, d_out_head, DV, BLOCK_DV)
    y = load_rows(y_ptr, rows, valid, head, heads * DV, DV, DV, BLOCK_DV)
    if LEAVES:  # as the diagonal of a product: cheaper than a sum across threads
        member = tl.arange(0, SIZE)
        pairs = product(d_out, transposed(y), GROUPS, PRECISION)
        d_weight = tl.sum(tl.where((member[:, None] == member[None, :])[None], pairs, 0.0), 2)
    else:
        d_weight = tl.sum(d_out * y.to(tl.float32), 2)
        entry = rows.to(tl.int64) * heads + head
        side, down = _stored_shares(outer_ptr, inner_ptr, entry, valid, POWER)
        d_weight = d_weight * side + down * tl.load(d_weight_ptr + entry, mask=valid, other=0.0)
    above, is_family, slot = find_families(parent, first, exists, valid, SINGLE)
    store_sums(d_weight_ptr, d_weight, 1.0, above, is_family, slot, head, heads, SINGLE)
    parts = tl.where(membership(slot), 1.0, 0.0)
    pool(up_d_out_ptr, parts, d_out, above, is_family, head, heads, DV, BLOCK_DV, GROUPS, PRECISION)


@triton.jit
def _d_up_tile(
    group, last_group, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr, position_row,
    position_head, d_out_ptr, d_out_row, d_out_head, inner_ptr, weight_ptr, d_weight_ptr, d_inner_ptr, d_q_ptr, d_k_ptr,
    d_v_ptr, d_position_ptr, up_d_q_ptr, up_d_k_ptr, up_d_v_ptr, parent_ptr, count_ptr, up_count_ptr, inside_ptr, power_ptr,
    begin_ptr, end_ptr, root, heads, scale, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr,
    CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    rows, valid, parent, first, exists, q, k, v, positions, count, entry = _load_tile(
        group, last_group, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr,
        position_row, position_head, parent_ptr, count_ptr, begin_ptr, end_ptr, heads, D, DV, P, BLOCK_D, BLOCK_DV, BLOCK_P,
        LEAVES, SINGLE, FULL, GROUPS, SIZE
    )  # fmt: skip
    d_out = load_rows(d_out_ptr, rows, valid, head, d_out_row, d_out_head, DV, BLOCK_DV).to(v.dtype)
    if SINGLE:  # one parent per run
        owner, has_owner = first[:, None], exists[:, None]
    else:
        owner, has_owner = parent, valid
    from_above = has_owner & (owner < root)  # a root has weight 1 and gradients 0
    above = owner.to(tl.int64) * heads + head
    weight = tl.load(weight_ptr + above, mask=from_above, other=1.0)
    d_mass = tl.load(d_inner_ptr + above, mask=from_above, other=0.0)
    share = 1.0 / tl.load(up_count_ptr + owner, mask=has_owner, other=1).to(tl.float32)
    inner, inside = _inside(inner_ptr, inside_ptr, rows, entry, valid, LEAVES, POWER)
    of_inside = inner
    if not LEAVES:
        share = count * share
        of_inside = tl.load(d_weight_ptr + entry, mask=valid, other=0.0)
    d_mass = d_mass * share
    if POWER == 0:
        weights, outer = _weights(
            q, k, positions, parent, valid, count, scale, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES, SINGLE, GROUPS,
            SIZE
        )  # fmt: skip
    else:
        r = POWER
        if POWER == ANY:
            r = tl.load(power_ptr + head)
        weights, slope, _, x, uniform = sparse_weights(
            q, k, positions, parent, valid, count, inner, inside, scale, r, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES,
            SINGLE, GROUPS, SIZE, POWER, WEIGHTED
        )  # fmt: skip

    # y has an effect through w·side·y; the masses have one through the shares and through the parent's mass.
    d_power = 0.0
    d_weights = product(d_out, transposed(v), GROUPS, PRECISION)
    if POWER == 0:
        of_y = tl.sum(weights * d_weights, 2)
        factor, d_outer = weight, d_mass
        if not LEAVES:
            side, down = _shares(inner, outer)
            d_gap = side * down * weight * (of_y - of_inside)
            d_outer = d_mass * side + d_gap
            tl.store(d_inner_ptr + entry, d_mass * down - d_gap, mask=valid)
            factor = weight * side
        d_logits = weights * (factor[:, :, None] * (d_weights - of_y[:, :, None]) + d_outer[:, :, None])
        weights = weights * factor[:, :, None]
    else:
        if not LEAVES:
            d_weights = with_diagonal(d_weights, of_inside, SIZE)
        d_weights = d_weights * weight[:, :, None]
        d_logits = gradient_of_logits(d_weights, d_mass, weights, slope)
        if POWER == ANY:
            d_r = gradient_of_power(d_weights, d_mass, weights, slope, x, uniform, r)
            d_power = tl.sum(tl.where(valid, d_r, 0.0))
        if not LEAVES:
            down, weights = split_diagonal(weights, SIZE)
            d_inner, d_logits = split_diagonal(d_logits, SIZE)
            tl.store(d_inner_ptr + entry, d_inner, mask=valid)
        weights = weights * weight[:, :, None]

    d_v = product(transposed(weights.to(v.dtype)), d_out, GROUPS, PRECISION)
    d_v += share[:, :, None] * load_rows(up_d_v_ptr, owner, from_above, head, heads * DV, DV, DV, BLOCK_DV)
    store_rows(d_v_ptr, d_v, rows, valid, head, heads * DV, DV, DV, BLOCK_DV)
    if P > 0:
        both = (d_logits + transposed(d_logits)).to(q.dtype)
        d_positions = product(both, positions, GROUPS, PRECISION)
        store_rows(d_position_ptr, d_positions, rows, valid, head, heads * P, P, P, BLOCK_P)
    d_logits = (d_logits * scale).to(q.dtype)
    d_q = product(d_logits, k, GROUPS, PRECISION)
    d_q += share[:, :, None] * load_rows(up_d_q_ptr, owner, from_above, head, heads * D, D, D, BLOCK_D)
    store_rows(d_q_ptr, d_q, rows, valid, head, heads * D, D, D, BLOCK_D)
    d_k = product(transposed(d_logits), q, GROUPS, PRECISION)
    d_k += share[:, :, None] * load_rows(up_d_k_ptr, owner, from_above, head, heads * D, D, D, BLOCK_D)
    store_rows(d_k_ptr, d_k, rows, valid, head, heads * D, D, D, BLOCK_D)
    return d_power


@triton.jit
def _bundle_groups(bundle_ptr, level, num_bundles, bundle):
    """Return the first run of a bundle of trees at a level, and the run after its last."""
    first = bundle_ptr + level * (num_bundles + 1) + bundle
    return tl.load(first), tl.load(first + 1)


@kernel
def up(
    q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr, position_row, position_head, y_ptr,
    outer_ptr, inner_ptr, up_q_ptr, plane, parent_ptr, count_ptr, up_count_ptr, inside_ptr, power_ptr, begin_ptr, end_ptr,
    num_groups, heads, scale, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr,
    CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr, TURN: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_launch(OVERLAP, TURN)
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    _up_tile(
        tile * GROUPS, num_groups, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr,
        position_row, position_head, y_ptr, outer_ptr, inner_ptr, up_q_ptr, plane, parent_ptr, count_ptr, up_count_ptr,
        inside_ptr, power_ptr, begin_ptr, end_ptr, heads, scale, D, DV, P, BLOCK_D, BLOCK_DV, BLOCK_P, PRECISION,
        INCLUDE_SELF, CAUSAL, LEAVES, SINGLE, FULL, GROUPS, SIZE, POWER, WEIGHTED
    )  # fmt: skip
    finish_after_previous_launch(OVERLAP, TURN)


@kernel
def down(
    y_ptr, outer_ptr, inner_ptr, weight_ptr, out_ptr, up_out_ptr, parent_ptr, begin, end, root, heads, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, LEAVES: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_launch(OVERLAP)
    last_first = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, head = last_first // heads, last_first % heads
    _down_tile(
        begin + tile * ROWS, end, head, y_ptr, outer_ptr, inner_ptr, weight_ptr, out_ptr, up_out_ptr, parent_ptr, root,
        heads, DV, BLOCK_DV, LEAVES, POWER, ROWS
    )  # fmt: skip


@kernel
def top(
    q_ptr, k_ptr, v_ptr, position_ptr, position_row, position_head, y_ptr, outer_ptr, inner_ptr, weight_ptr, out_ptr, plane,
    parent_ptr, count_ptr, inside_ptr, power_ptr, begin_ptr, end_ptr, bundle_ptr, num_bundles, levels, root, heads, scale,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr,
    SINGLE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Run both sweeps over the top levels of a bundle of trees."""
    wait_for_previous_launch(OVERLAP)
    bundle, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    level = 0
    while level < levels:
        group, last_group = _bundle_groups(bundle_ptr, level, num_bundles, bundle)
        while group < last_group:
            _up_tile(
                group, last_group, head, q_ptr, k_ptr, v_ptr, heads * D, D, heads * D, D, heads * DV, DV, position_ptr,
                position_row, position_head, y_ptr, outer_ptr, inner_ptr, q_ptr, plane, parent_ptr, count_ptr, count_ptr,
                inside_ptr, power_ptr + level * heads, begin_ptr, end_ptr, heads, scale, D, DV, P, BLOCK_D, BLOCK_DV,
                BLOCK_P, PRECISION, INCLUDE_SELF, CAUSAL, False, SINGLE, False, GROUPS, SIZE, POWER, WEIGHTED
            )  # fmt: skip
            group += GROUPS
        tl.debug_barrier()  # the next level reads what this one wrote
        level += 1
    while level > 0:
        level -= 1
        group, last_group = _bundle_groups(bundle_ptr, level, num_bundles, bundle)
        row, end = tl.load(begin_ptr + group), tl.load(end_ptr + last_group - 1)
        while row < end:
            _down_tile(
                row, end, head, y_ptr, outer_ptr, inner_ptr, weight_ptr, out_ptr, out_ptr, parent_ptr, root, heads, DV,
                BLOCK_DV, False, POWER, ROWS
            )  # fmt: skip
            row += ROWS
        tl.debug_barrier()


@kernel
def d_down(
    d_out_ptr, d_out_row, d_out_head, y_ptr, outer_ptr, inner_ptr, d_weight_ptr, up_d_out_ptr, parent_ptr, begin_ptr,
    end_ptr, num_groups, heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, LEAVES: tl.constexpr,
    SINGLE: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, POWER: tl.constexpr,
    TURN: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_launch(OVERLAP, TURN)
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    _d_down_tile(
        tile * GROUPS, num_groups, head, d_out_ptr, d_out_row, d_out_head, y_ptr, outer_ptr, inner_ptr, d_weight_ptr,
        up_d_out_ptr, parent_ptr, begin_ptr, end_ptr, heads, DV, BLOCK_DV, PRECISION, LEAVES, SINGLE, FULL, GROUPS,
        SIZE, POWER
    )  # fmt: skip
    finish_after_previous_launch(OVERLAP, TURN)


@kernel
def d_up(
    q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr, position_row, position_head, d_out_ptr,
    d_out_row, d_out_head, inner_ptr, weight_ptr, d_weight_ptr, d_inner_ptr, d_q_ptr, d_k_ptr, d_v_ptr, d_position_ptr,
    d_power_ptr, up_d_q_ptr, up_d_k_ptr, up_d_v_ptr, parent_ptr, count_ptr, up_count_ptr, inside_ptr, power_ptr,
    begin_ptr, end_ptr, num_groups, root, heads, scale, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr, FULL: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr, TURN: tl.constexpr,
    OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_launch(OVERLAP, TURN)
    last_first = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, head = last_first // heads, last_first % heads
    d_power = _d_up_tile(
        tile * GROUPS, num_groups, head, q_ptr, k_ptr, v_ptr, q_row, q_head, k_row, k_head, v_row, v_head, position_ptr,
        position_row, position_head, d_out_ptr, d_out_row, d_out_head, inner_ptr, weight_ptr, d_weight_ptr, d_inner_ptr,
        d_q_ptr, d_k_ptr, d_v_ptr, d_position_ptr, up_d_q_ptr, up_d_k_ptr, up_d_v_ptr, parent_ptr, count_ptr, up_count_ptr,
        inside_ptr, power_ptr, begin_ptr, end_ptr, root, heads, scale, D, DV, P, BLOCK_D, BLOCK_DV, BLOCK_P, PRECISION,
        INCLUDE_SELF, CAUSAL, LEAVES, SINGLE, FULL, GROUPS, SIZE, POWER, WEIGHTED
    )  # fmt: skip
    if POWER == ANY:
        tl.store(d_power_ptr + last_first, d_power)
    finish_after_previous_launch(OVERLAP, TURN)


@kernel
def d_top(
    q_ptr, k_ptr, v_ptr, position_ptr, position_row, position_head, y_ptr, outer_ptr, inner_ptr, weight_ptr, d_out_ptr,
    d_weight_ptr, d_inner_ptr, d_q_ptr, d_k_ptr, d_v_ptr, d_position_ptr, d_power_ptr, parent_ptr, count_ptr, inside_ptr,
    power_ptr, begin_ptr, end_ptr, bundle_ptr, num_bundles, levels, root, heads, scale, D: tl.constexpr,
    DV: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr, SINGLE: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Run the gradient of `top`."""
    wait_for_previous_launch(OVERLAP)
    bundle, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    level = 0
    while level < levels:
        group, last_group = _bundle_groups(bundle_ptr, level, num_bundles, bundle)
        while group < last_group:
            _d_down_tile(
                group, last_group, head, d_out_ptr, heads * DV, DV, y_ptr, outer_ptr, inner_ptr, d_weight_ptr,
                d_out_ptr, parent_ptr, begin_ptr, end_ptr, heads, DV, BLOCK_DV, PRECISION, False, SINGLE, False, GROUPS,
                SIZE, POWER
            )  # fmt: skip
            group += GROUPS
        tl.debug_barrier()  # the next level reads what this one wrote
        level += 1
    while level > 0:
        level -= 1
        group, last_group = _bundle_groups(bundle_ptr, level, num_bundles, bundle)
        d_power = tl.full((), 0.0, tl.float32)
        while group < last_group:
            d_power += _d_up_tile(
                group, last_group, head, q_ptr, k_ptr, v_ptr, heads * D, D, heads * D, D, heads * DV, DV, position_ptr,
                position_row, position_head, d_out_ptr, heads * DV, DV, inner_ptr, weight_ptr, d_weight_ptr, d_inner_ptr,
                d_q_ptr, d_k_ptr, d_v_ptr, d_position_ptr, d_q_ptr, d_k_ptr, d_v_ptr, parent_ptr, count_ptr, count_ptr,
                inside_ptr, power_ptr + level * heads, begin_ptr, end_ptr, root, heads, scale, D, DV, P, BLOCK_D,
                BLOCK_DV, BLOCK_P, PRECISION, INCLUDE_SELF, CAUSAL, False, SINGLE, False, GROUPS, SIZE, POWER, WEIGHTED
            )  # fmt: skip
            group += GROUPS
        if POWER == ANY:
            tl.store(d_power_ptr + (level * num_bundles + bundle) * heads + head, d_power)
        tl.debug_barrier()
