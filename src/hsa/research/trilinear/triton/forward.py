"""Forward kernel of three-way attention: flash attention with one more loop.

A program keeps a tile of queries. For each tile of the second set, held in shared memory, it loops over the rows j of the
first set: it multiplies queries ∘ k1_j by the keys of the tile on tensor cores, updates the online softmax, and adds the
weights times the values of the tile, ∘ v1_j. Queries are multiplied by k1_j in registers, so the inner loop does not write
to shared memory.
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
    reach,
    read_row,
    read_rows,
    write_rows,
)


def forward(
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
) -> tuple[Tensor, Tensor]:
    """Return the output, and log2 of the summed exponentials `[heads, queries]`, +∞ for rows that see nothing."""
    rows = Rows(q, k1, k2, v1, v2)
    out, mass = new_results(rows)
    with available.device_of(q):
        call = KernelCall(rows, (offsets, first_offsets, second_offsets), left, right, scale).packed()
        call.launch("forward", _forward_kernel, out, mass)
    return out, mass


def new_results(rows: Rows) -> tuple[Tensor, Tensor]:
    q, v = rows.q, rows.v2
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@triton.jit
def _meet_rows(
    best, mass, out, q, keys, values, k1, v1, k1_row, v1_row, begin, end, i, seen, left, right, log2_scale,
    MASKED: tl.constexpr, LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add rows begin … end of the first set, with a tile of the second; `seen` [queries, tile] is used if MASKED."""
    next_key = read_row(k1, begin, end, k1_row, DIM, BLOCK_D)
    for j in range(begin, end):
        key = next_key
        next_key = read_row(k1, j + 1, end, k1_row, DIM, BLOCK_D)
        value = read_row(v1, j, end, v1_row, VALUE_DIM, BLOCK_V).to(tl.float32)
        logit = tl.dot(q * key, keys, input_precision="ieee")
        if MASKED:
            logit = hide(logit * log2_scale, seen, i, j, left, right, LIMITED)
            better = tl.maximum(best, tl.max(logit, 1))
            finite = tl.where(better == -float("inf"), 0.0, better)
            weight = tl.exp2(logit - finite[:, None])
            fade = tl.exp2(best - finite)
        else:
            better = tl.maximum(best, tl.max(logit, 1) * log2_scale)
            weight = tl.exp2(logit * log2_scale - better[:, None])
            fade = tl.exp2(best - better)
        mass = mass * fade + tl.sum(weight, 1)
        average = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        out = out * fade[:, None] + average * value
        best = better
    return best, mass, out


@triton.jit(do_not_specialize=["num_queries", "trees", "left", "right"])
def _forward_kernel(
    q, k1, k2, v1, v2, out_ptr, mass_ptr, offsets, first_offsets, second_offsets,
    q_row, q_head, k1_row, k1_head, k2_row, k2_head, v1_row, v1_head, v2_row, v2_head,
    num_queries, heads, trees, left, right, scale,
    LIMITED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Process a tile of queries of one tree and head. Later tiles start first: if causal, they have more work."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head, tree, begin, first, length = find_tile(offsets, trees, heads, program, ROWS)
    if begin >= length:
        return
    k1, v1, length1 = find_set(k1, v1, first_offsets, tree, head, k1_row, k1_head, v1_row, v1_head)
    k2, v2, length2 = find_set(k2, v2, second_offsets, tree, head, k2_row, k2_head, v2_row, v2_head)
    i = begin + tl.arange(0, ROWS)
    inside = i < length
    queries = as_product(read_rows(q + first * q_row + head * q_head, i, inside, q_row, DIM, BLOCK_D))
    low1, high1, all_low, all_high1 = reach(begin, length, length1, left, right, ROWS, LIMITED)
    low2, high2, _, all_high2 = reach(begin, length, length2, left, right, ROWS, LIMITED)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    log2_scale = scale * LOG2E
    for start in range(low2, high2, COLUMNS):
        k, seen, whole = columns(start, high2, all_low, all_high2, i, left, right, COLUMNS, LIMITED)
        keys = tl.trans(read_rows(k2, k, k < high2, k2_row, DIM, BLOCK_D))
        values = read_rows(v2, k, k < high2, v2_row, VALUE_DIM, BLOCK_V)
        for part in tl.static_range(3 if LIMITED else 2):
            first_row, end_row = part_of(part, low1, high1, whole, all_low, all_high1)
            best, mass, out = _meet_rows(
                best, mass, out, queries, keys, values, k1, v1, k1_row, v1_row, first_row, end_row,
                i, seen, left, right, log2_scale, part != 1, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    out_row = heads * VALUE_DIM
    out_ptr += first * out_row + head * VALUE_DIM
    write_rows(out_ptr, i, inside, out_row, out / mass[:, None], VALUE_DIM, BLOCK_V)
    total = tl.where(some, best + tl.log2(mass), float("inf"))
    tl.store(mass_ptr + head * num_queries + first + i, total, mask=inside)
