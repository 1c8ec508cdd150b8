"""Kernels of multiscale attention over lists of rows: a flash-style pass per block of queries, and its gradient.

The backward pass builds the lists again. It sums the gradients of keys and values with atomic additions in float32, in no
fixed order, so two runs may differ in the last bits. Everything else is reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.levels import Levels
from hsa.attention.kernels.triton.launch import Operator, last_stride_1
from hsa.attention.multiscale.triton.lists import (
    END_LEAF,
    LOG_COUNT,
    STANDS_FOR_LEAF,
    Lists,
    column,
    kernel,
    make_lists,
    rows_of,
)

LOG2E = tl.constexpr(1.4426950408889634)


def attend_lists(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    selected_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    plan: Levels,
    *,
    limit: Tensor | None,
    leaves: Tensor | None,
    include_self: bool,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
) -> Tensor:
    """Return `hsa.multiscale_attention`, `[queries, heads, value_dim]`. Queries that see no key get 0.

    Args:
        q: `[queries, heads, dim]` queries.
        keys, values: `[kv_heads, rows, dim]` pyramids of keys and values.
        selected_rows: `[groups, heads or 1, width]` int32 rows of the selected families, padded with −1.
        group_offsets: `[groups + 1]` int64 first row of q of every group, and the number of rows.
        group_tree: `[groups]` int64 tree whose keys the group attends to.
        plan: Rows of the forest.
        limit: `[queries]` int64 leaf number at or before which the leaves of an entry must end; None for no limit.
        leaves: `[queries]` int64 leaf of each query; needed without `include_self`.
        include_self: Whether leaves attend to themselves.
        pooled_bias: `[1 or heads]` number to add to the logits of pooled nodes.
        scale: Factor of the dot products.
        most_queries: Number of queries of the largest group.
    """
    rows = rows_of(plan)
    out, _ = operator(
        q, keys, values, selected_rows, group_offsets, group_tree, rows.table, rows.roots, rows.level_ends,
        limit, None if include_self else leaves, pooled_bias, scale, most_queries,
        rows.most_entries(selected_rows.shape[2]), rows.widest,
    )  # fmt: skip
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    selected_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor]:
    """Return the output, and log2 of the sum of exponentials `[heads, queries]`: +∞ for a query that sees no key."""
    q = last_stride_1(q)
    keys, values = keys.contiguous(), values.contiguous()
    out, mass = _empty(q, keys, values)
    if len(q) == 0:
        return out, mass
    tiles = _tiles(q, values, most_queries)
    for lists in make_lists(
        q, selected_rows, group_offsets, group_tree, table, roots, level_ends, limit, most_entries, widest
    ):
        _forward_kernel[(lists.groups, q.shape[1], triton.cdiv(most_queries, tiles["BLOCK_Q"]))](
            q, keys, values, out, mass, lists.entries, lists.counts, group_offsets, table, limit, leaves, pooled_bias,
            *_numbers(q, keys, pooled_bias, lists), scale, **tiles, num_stages=2,
        )  # fmt: skip
    return out, mass


def _empty(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors: an output `[queries, heads, value_dim]`, and a number per head and query."""
    out = q.new_empty(len(q), q.shape[1], values.shape[2])
    return out, q.new_empty(q.shape[1], len(q), dtype=torch.float32)


def _attend_backward(
    d_out: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    selected_rows: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    table: Tensor,
    roots: Tensor,
    level_ends: Tensor,
    limit: Tensor | None,
    leaves: Tensor | None,
    pooled_bias: Tensor | None,
    scale: float,
    most_queries: int,
    most_entries: int,
    widest: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, keys, values and pooled_bias (empty without one)."""
    q = last_stride_1(q)
    keys, values, d_out = keys.contiguous(), values.contiguous(), d_out.contiguous()
    d_q = q.new_empty(q.shape)
    d_keys, d_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    tiles = _tiles(q, values, most_queries)
    blocks = triton.cdiv(max(most_queries, 1), tiles["BLOCK_Q"])
    d_bias = None if pooled_bias is None else mass.new_zeros(len(group_tree), q.shape[1], blocks)
    for lists in make_lists(
        q, selected_rows, group_offsets, group_tree, table, roots, level_ends, limit, most_entries, widest
    ):
        _backward_kernel[(lists.groups, q.shape[1], blocks)](
            q, keys, values, out, mass, d_out, d_q, d_keys, d_values, d_bias,
            lists.entries, lists.counts, group_offsets, table, limit, leaves, pooled_bias,
            *_numbers(q, keys, pooled_bias, lists), scale, **tiles, num_stages=1,
        )  # fmt: skip
    d_keys, d_values = d_keys.to(q.dtype), d_values.to(q.dtype)
    if d_bias is None or pooled_bias is None:
        return d_q, d_keys, d_values, mass.new_empty(0)
    per_head = d_bias.sum((0, 2)) if len(pooled_bias) > 1 else d_bias.sum().view(1)
    return d_q, d_keys, d_values, per_head.to(pooled_bias.dtype)


def _empty_gradients(
    d_out: Tensor, out: Tensor, mass: Tensor, q: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pooled_bias = rest[8]
    d_bias = mass.new_empty(0) if pooled_bias is None else pooled_bias.new_empty(pooled_bias.shape)
    d_keys, d_values = (x.new_empty(x.shape, dtype=q.dtype) for x in (keys, values))
    return q.new_empty(q.shape), d_keys, d_values, d_bias


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.options = inputs[12:]


def _backward(ctx, d_out: Tensor, d_mass: Tensor):
    out, mass, *inputs = ctx.saved_tensors
    *d_inputs, d_bias = gradients(d_out, out, mass, *inputs, *ctx.options)
    return *d_inputs, *(None,) * 8, None if inputs[11] is None else d_bias, None, None, None, None


operator = Operator("attend_lists", _attend, _empty, _keep, _backward)
gradients = Operator("attend_lists_backward", _attend_backward, _empty_gradients)


def _tiles(q: Tensor, values: Tensor, most_queries: int) -> dict[str, int]:
    """Return the tile sizes of a program."""
    dim, value_dim = (padded(x.shape[2]) for x in (q, values))
    larger = max(dim, value_dim)
    if most_queries == 1:
        queries, warps = 1, max(1, larger // 64)
    else:
        most = max(16, 2**14 // (larger * q.element_size()))
        queries = min(64, most, padded(most_queries))
        per_warp = 2**8 if q.dtype == torch.float32 else 2**10  # without tensor cores, products need more registers
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


def _numbers(q: Tensor, keys: Tensor, pooled_bias: Tensor | None, lists: Lists) -> tuple[int, ...]:
    """Return sizes and strides, in the order of the kernel arguments."""
    return (
        q.stride(0),
        q.stride(1),
        len(q),
        q.shape[1],
        q.shape[1] // keys.shape[0],
        keys.shape[1],
        lists.entries.shape[1],
        lists.heads,
        1 if lists.heads > 1 else 0,
        lists.first_group,
        1 if pooled_bias is not None and len(pooled_bias) > 1 else 0,
    )


@triton.jit
def _product(a, b):
    """Return [m, d] · [n, d]ᵀ → [m, n] in float32, without tensor cores if m is 1."""
    if a.shape[0] == 1:
        product = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[None, :]
    else:
        product = tl.dot(a, tl.trans(b), input_precision="ieee")
    return product


@triton.jit
def _average(weight, x):
    """Return [m, n] · [n, d] → [m, d] in float32."""
    if weight.shape[0] == 1:
        product = tl.sum(tl.trans(weight) * x.to(tl.float32), 0)[None, :]
    else:
        product = tl.dot(weight.to(x.dtype), x, input_precision="ieee")
    return product


@triton.jit
def _spread(weight, x):
    """Return [m, n]ᵀ · [m, d] → [n, d] in float32."""
    if weight.shape[0] == 1:
        product = tl.trans(weight) * x.to(tl.float32)
    else:
        product = tl.dot(tl.trans(weight.to(x.dtype)), x, input_precision="ieee")
    return product


@triton.jit
def _read(x, row, exists, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows [rows, BLOCK] of a matrix with DIM columns."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row.to(tl.int64)[:, None] * DIM + d, mask=exists[:, None] & (d < DIM), other=0.0)


@triton.jit
def _add(x, row, exists, value, DIM: tl.constexpr):
    d = tl.arange(0, value.shape[1])
    tl.atomic_add(x + row.to(tl.int64)[:, None] * DIM + d, value, exists[:, None] & (d < DIM), sem="relaxed")


@triton.jit
def _logits(q, k, row, exists, table, bias, inside, limit, own, scale):
    """Return logits [queries, entries] to base 2, −∞ where an entry is hidden; and whether entries are pooled."""
    stands_for_leaf = column(table, row, STANDS_FOR_LEAF, exists, 1) != 0
    extra = column(table, row, LOG_COUNT, exists, 0).to(tl.float32, bitcast=True) + tl.where(stands_for_leaf, 0.0, bias)
    seen = inside[:, None] & exists[None, :]
    if (limit is not None) or (own is not None):
        end = column(table, row, END_LEAF, exists, 0)
        leaf = tl.where(stands_for_leaf, end - 1, -1)
        if limit is not None:
            seen = seen & (end[None, :] <= limit[:, None])
        if own is not None:
            seen = seen & (leaf[None, :] != own[:, None])
    logit = tl.where(seen, _product(q, k) * (scale * LOG2E) + extra[None, :], -float("inf"))
    return logit, stands_for_leaf == 0


@triton.jit
def _locate(group_offsets, first_group, heads_per_key, BLOCK_Q: tl.constexpr):
    """Return group, head, key/value head and queries of a program, and whether these queries exist."""
    group, head = first_group + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.load(group_offsets + group) + tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    return group, head, head // heads_per_key, query, query < tl.load(group_offsets + group + 1)


@triton.jit
def _block_inputs(
    group, head, query, inside, q_ptr, entries, counts, pooled_bias, q_stride, q_head_stride, most_entries, list_heads,
    list_head_stride, bias_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the list of a group and head, its length, the bias of pooled rows, and the queries."""
    item = group * list_heads + head * list_head_stride
    count = tl.load(counts + item)
    bias = 0.0 if pooled_bias is None else tl.load(pooled_bias + head * bias_stride).to(tl.float32) * LOG2E
    d = tl.arange(0, BLOCK_D)
    source = q_ptr + query[:, None] * q_stride + head * q_head_stride + d
    q = tl.load(source, mask=inside[:, None] & (d < DIM), other=0.0)
    return entries + item * most_entries, count, bias, q


@kernel
def _forward_kernel(
    q_ptr, keys, values, out_ptr, mass_ptr, entries, counts, group_offsets, table, limit_ptr, leaves_ptr, pooled_bias,
    q_stride, q_head_stride, num_queries, heads, heads_per_key, num_rows, most_entries, list_heads,
    list_head_stride, first_group, bias_stride, scale, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Compute the output of a block of queries of one group, in one head."""
    group, head, kv_head, query, inside = _locate(group_offsets, first_group, heads_per_key, BLOCK_Q)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    limit = None
    if limit_ptr is not None and BLOCK_Q > 1:  # the list of a single query has no hidden entries
        limit = tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    entries, count, bias, q = _block_inputs(
        group - first_group, head, query, inside, q_ptr, entries, counts, pooled_bias, q_stride, q_head_stride,
        most_entries, list_heads, list_head_stride, bias_stride, DIM, BLOCK_D
    )  # fmt: skip
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    best = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for begin in range(0, count, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        exists = entry < count
        row = tl.load(entries + entry, mask=exists, other=0)
        k = _read(keys, row, exists, DIM, BLOCK_D)
        v = _read(values, row, exists, VALUE_DIM, BLOCK_V)
        logit, _ = _logits(q, k, row, exists, table, bias, inside, limit, own, scale)
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
    q_ptr, keys, values, out_ptr, mass_ptr, d_out_ptr, d_q_ptr, d_keys, d_values, d_bias_ptr, entries, counts,
    group_offsets, table, limit_ptr, leaves_ptr, pooled_bias,
    q_stride, q_head_stride, num_queries, heads, heads_per_key, num_rows, most_entries, list_heads,
    list_head_stride, first_group, bias_stride, scale, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries of one group, in one head, over the entries of the forward pass."""
    group, head, kv_head, query, inside = _locate(group_offsets, first_group, heads_per_key, BLOCK_Q)
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    limit = None
    if limit_ptr is not None and BLOCK_Q > 1:  # the list of a single query has no hidden entries
        limit = tl.load(limit_ptr + query, mask=inside, other=0).to(tl.int32)
    own = None if leaves_ptr is None else tl.load(leaves_ptr + query, mask=inside, other=-2).to(tl.int32)
    entries, count, bias, q = _block_inputs(
        group - first_group, head, query, inside, q_ptr, entries, counts, pooled_bias, q_stride, q_head_stride,
        most_entries, list_heads, list_head_stride, bias_stride, DIM, BLOCK_D
    )  # fmt: skip
    keys += kv_head * num_rows * DIM
    values += kv_head * num_rows * VALUE_DIM
    d_keys += kv_head * num_rows * DIM
    d_values += kv_head * num_rows * VALUE_DIM
    out_row = query * heads + head
    d_out = _read(d_out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    out = _read(out_ptr, out_row, inside, VALUE_DIM, BLOCK_V)
    # The softmax subtracts this from the gradient of every weight of a query.
    shared = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    mass = tl.load(mass_ptr + head * num_queries + query, mask=inside, other=float("inf"))
    d_q = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    d_bias = tl.zeros([BLOCK_Q], tl.float32)
    for begin in range(0, count, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        exists = entry < count
        row = tl.load(entries + entry, mask=exists, other=0)
        k = _read(keys, row, exists, DIM, BLOCK_D)
        logit, pooled = _logits(q, k, row, exists, table, bias, inside, limit, own, scale)
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
