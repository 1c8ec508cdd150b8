"""Backward kernels of three-way attention: one for the queries, and one for each of the two other sets.

Each keeps a tile of its own rows and a tile of another set, loops over single rows of the third set, and recomputes the
weights from the summed exponentials. Weights of many pairs underflow in float16, so they are multiplied by a factor (see
`raised`). There are no atomic additions, so gradients are deterministic.

    d_logit(i; j, k) = weight(i; j, k) · (Σ_c d_out(i) ∘ v1(j) ∘ v2(k) − Σ_c d_out(i) ∘ out(i))
    d_q(i)  = scale · Σ_j k1(j) ∘ Σ_k d_logit(i; j, k) k2(k)
    d_k1(j) = scale · Σ_i q(i) ∘ Σ_k d_logit(i; j, k) k2(k)        d_v1(j) = Σ_i d_out(i) ∘ Σ_k weight(i; j, k) v2(k)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels import available
from hsa.research.trilinear.call import Rows
from hsa.research.trilinear.triton.tiles import (
    LOG2E,
    KernelCall,
    as_product,
    columns,
    find_set,
    find_tile,
    hide,
    part_of,
    raised,
    reach,
    read_row,
    read_rows,
    sees,
    write_rows,
)


def backward(
    d_out: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    offsets: Tensor,
    first_offsets: Tensor,
    second_offsets: Tensor,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k1, k2, v1, v2."""
    offsets_of_sets = offsets, first_offsets, second_offsets
    with available.device_of(q):
        call = KernelCall(Rows(q, k1, k2, v1, v2), offsets_of_sets, left, right, scale).packed()
        d_out = d_out.contiguous()
        d_q, shared = gradient_of_queries(call, d_out, out, mass)
        d_k1, d_v1 = gradients_of_first(call, d_out, shared, mass)
        d_k2, d_v2 = gradients_of_first(call.swapped(), d_out, shared, mass)
    return d_q, d_k1, d_k2, d_v1, d_v2


def gradient_of_queries(call: KernelCall, d_out: Tensor, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and Σ_c d_out ∘ out, `[heads, queries]`."""
    d_q, shared = call.rows.q.new_empty(call.rows.q.shape), torch.empty_like(mass)
    call.launch("queries", _queries_kernel, out, mass, d_out, shared, d_q)
    return d_q, shared


def gradients_of_first(call: KernelCall, d_out: Tensor, shared: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values of the first set."""
    d_k, d_v = (x.new_empty(x.shape) for x in (call.rows.k1, call.rows.v1))
    call.launch("keys", _keys_kernel, mass, d_out, shared, d_k, d_v)
    return d_k, d_v


@triton.jit
def _queries_meet_rows(
    d_q, q, d_out, keys, values, mass, shared, k1, v1, k1_row, v1_row, begin, end, i, seen, left, right, log2_scale,
    MASKED: tl.constexpr, LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add rows begin … end of the first set, with a tile of the second; `seen` [queries, tile] is used if MASKED."""
    next_key = read_row(k1, begin, end, k1_row, DIM, BLOCK_D)
    next_value = read_row(v1, begin, end, v1_row, VALUE_DIM, BLOCK_V)
    for j in range(begin, end):
        key, value = next_key, next_value
        next_key = read_row(k1, j + 1, end, k1_row, DIM, BLOCK_D)
        next_value = read_row(v1, j + 1, end, v1_row, VALUE_DIM, BLOCK_V)
        logit = tl.dot(q * key, tl.trans(keys), input_precision="ieee")
        d_weight = tl.dot(d_out * value, tl.trans(values), input_precision="ieee")
        logit = logit * log2_scale - mass[:, None]
        if MASKED:
            logit = hide(logit, seen, i, j, left, right, LIMITED)
        weight = tl.exp2(logit)
        d_logit = weight * (d_weight - shared[:, None])
        d_q += tl.dot(d_logit.to(keys.dtype), keys, input_precision="ieee") * key.to(tl.float32)
    return d_q


@triton.jit(do_not_specialize=["num_queries", "trees", "left", "right"])
def _queries_kernel(
    q, k1, k2, v1, v2, out, mass_ptr, d_out, shared_ptr, d_q_ptr, offsets, first_offsets, second_offsets,
    q_row, q_head, k1_row, k1_head, k2_row, k2_head, v1_row, v1_head, v2_row, v2_head,
    num_queries, heads, trees, left, right, scale,
    LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Process a tile of queries of one tree and head, as in the forward pass; write Σ_c d_out ∘ out to `shared`."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head, tree, begin, first, length = find_tile(offsets, trees, heads, program, ROWS)
    if begin >= length:
        return
    k1, v1, length1 = find_set(k1, v1, first_offsets, tree, head, k1_row, k1_head, v1_row, v1_head)
    k2, v2, length2 = find_set(k2, v2, second_offsets, tree, head, k2_row, k2_head, v2_row, v2_head)
    i = begin + tl.arange(0, ROWS)
    inside = i < length
    queries = as_product(read_rows(q + first * q_row + head * q_head, i, inside, q_row, DIM, BLOCK_D))
    out_row = heads * VALUE_DIM
    here = first * out_row + head * VALUE_DIM
    d_outs = read_rows(d_out + here, i, inside, out_row, VALUE_DIM, BLOCK_V)
    outs = read_rows(out + here, i, inside, out_row, VALUE_DIM, BLOCK_V)
    shared = tl.sum(d_outs.to(tl.float32) * outs.to(tl.float32), 1)
    d_outs = as_product(d_outs)
    here = head * num_queries + first + i
    tl.store(shared_ptr + here, shared, mask=inside)
    lift = raised(length1, length2, left, right, LIMITED)
    mass = tl.load(mass_ptr + here, mask=inside, other=float("inf")) - lift
    low1, high1, all_low, all_high1 = reach(begin, length, length1, left, right, ROWS, LIMITED)
    low2, high2, _, all_high2 = reach(begin, length, length2, left, right, ROWS, LIMITED)
    d_q = tl.zeros([ROWS, BLOCK_D], tl.float32)
    log2_scale = scale * LOG2E
    for start in range(low2, high2, COLUMNS):
        k, seen, whole = columns(start, high2, all_low, all_high2, i, left, right, COLUMNS, LIMITED)
        keys = read_rows(k2, k, k < high2, k2_row, DIM, BLOCK_D)
        values = read_rows(v2, k, k < high2, v2_row, VALUE_DIM, BLOCK_V)
        for part in tl.static_range(3 if LIMITED else 2):
            first_row, end_row = part_of(part, low1, high1, whole, all_low, all_high1)
            d_q = _queries_meet_rows(
                d_q, queries, d_outs, keys, values, mass, shared, k1, v1, k1_row, v1_row, first_row, end_row,
                i, seen, left, right, log2_scale, part != 1, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    row = heads * DIM
    write_rows(d_q_ptr + first * row + head * DIM, i, inside, row, d_q * (scale * tl.exp2(-lift)), DIM, BLOCK_D)


@triton.jit
def _keys_meet_queries(
    d_k, d_v, own_k, own_v, keys, values, q, d_out, mass, shared, q_row, out_row, begin, end, j, k, seen, left, right,
    log2_scale, lift,
    MASKED: tl.constexpr, LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add queries begin … end, with tiles j and k of the two other sets; `seen` [own, other] is used if MASKED."""
    for i in range(begin, end):
        query = read_row(q, i, end, q_row, DIM, BLOCK_D)
        d_outs = read_row(d_out, i, end, out_row, VALUE_DIM, BLOCK_V)
        logit = tl.dot(own_k * query, tl.trans(keys), input_precision="ieee")
        logit = logit * log2_scale - (tl.load(mass + i) - lift)
        if MASKED:
            visible = seen
            if LIMITED:
                visible = seen & sees(i, k, left, right)[None, :] & sees(i, j, left, right)[:, None]
            logit = tl.where(visible, logit, -float("inf"))
        weight = tl.exp2(logit)
        d_v += tl.dot(weight.to(values.dtype), values, input_precision="ieee") * d_outs.to(tl.float32)
        d_weight = tl.dot(own_v * d_outs, tl.trans(values), input_precision="ieee")
        d_logit = weight * (d_weight - tl.load(shared + i))
        d_k += tl.dot(d_logit.to(keys.dtype), keys, input_precision="ieee") * query.to(tl.float32)
    return d_k, d_v


@triton.jit(do_not_specialize=["num_queries", "trees", "left", "right"])
def _keys_kernel(
    q, own_k, k2, own_v, v2, mass, d_out, shared, d_k_ptr, d_v_ptr, offsets, own_offsets, second_offsets,
    q_row, q_head, own_k_row, own_k_head, k2_row, k2_head, own_v_row, own_v_head, v2_row, v2_head,
    num_queries, heads, trees, left, right, scale,
    LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Process a tile of keys and values of one tree and head. Earlier tiles start first: if causal, they have more work."""
    head, tree, begin, own_first, own_length = find_tile(own_offsets, trees, heads, tl.program_id(0), ROWS)
    if begin >= own_length:
        return
    out_row = heads * VALUE_DIM
    q, d_out, length = find_set(q, d_out, offsets, tree, head, q_row, q_head, out_row, VALUE_DIM)
    k2, v2, length2 = find_set(k2, v2, second_offsets, tree, head, k2_row, k2_head, v2_row, v2_head)
    first = tl.load(offsets + tree).to(tl.int64)
    mass += head * num_queries + first
    shared += head * num_queries + first
    j = begin + tl.arange(0, ROWS)
    inside = j < own_length
    own_k += own_first * own_k_row + head * own_k_head
    own_v += own_first * own_v_row + head * own_v_head
    own_keys = as_product(read_rows(own_k, j, inside, own_k_row, DIM, BLOCK_D))
    own_values = as_product(read_rows(own_v, j, inside, own_v_row, VALUE_DIM, BLOCK_V))
    low2, high2 = 0, length2
    last = tl.minimum(begin + ROWS, own_length) - 1
    if LIMITED:  # j and k must be visible to the same query
        low2 = tl.maximum(begin - left - right, 0)
        high2 = tl.minimum(last + left + right + 1, length2)
    d_k = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_v = tl.zeros([ROWS, BLOCK_V], tl.float32)
    log2_scale = scale * LOG2E
    lift = raised(own_length, length2, left, right, LIMITED)
    for start in range(low2, high2, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        keys = read_rows(k2, k, k < high2, k2_row, DIM, BLOCK_D)
        values = read_rows(v2, k, k < high2, v2_row, VALUE_DIM, BLOCK_V)
        low, high, all_low, all_high = 0, length, 0, length
        if LIMITED:  # queries that see parts of both tiles, and those that see both completely
            last2 = tl.minimum(start + COLUMNS, high2) - 1
            low = tl.maximum(tl.maximum(begin, start) - right, 0)
            high = tl.minimum(tl.minimum(last, last2) + left + 1, length)
            all_low = tl.maximum(tl.maximum(last, last2) - right, 0)
            all_high = tl.minimum(tl.minimum(begin, start) + left + 1, length)
        seen = inside[:, None] & (k < high2)[None, :]
        whole = (begin + ROWS <= own_length) & (start + COLUMNS <= high2)
        for part in tl.static_range(3 if LIMITED else 2):
            first_query, end_query = part_of(part, low, high, whole, all_low, all_high)
            d_k, d_v = _keys_meet_queries(
                d_k, d_v, own_keys, own_values, keys, values, q, d_out, mass, shared, q_row, out_row,
                first_query, end_query, j, k, seen, left, right, log2_scale, lift,
                part != 1, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    row = heads * DIM
    write_rows(d_k_ptr + own_first * row + head * DIM, j, inside, row, d_k * (scale * tl.exp2(-lift)), DIM, BLOCK_D)
    row = heads * VALUE_DIM
    write_rows(d_v_ptr + own_first * row + head * VALUE_DIM, j, inside, row, d_v * tl.exp2(-lift), VALUE_DIM, BLOCK_V)
