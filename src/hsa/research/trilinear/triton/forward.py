"""Three-way attention forward: flash attention with one more loop.

A program keeps a tile of queries. For a tile of the second set, held in shared memory, it runs over the rows j of the first
set: queries ∘ k1_j against the tile's keys on tensor cores, the online softmax, weights times the tile's values, ∘ v1_j.
Queries are scaled by a row in registers, so that nothing goes back to shared memory inside the loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.triton.launch import last_stride_1
from hsa.research.trilinear.triton.tiles import (
    LOG2E,
    as_product,
    constants,
    find_tile,
    numbers,
    programs,
    reach,
    read_row,
    read_rows,
    rows_of_tree,
    sees,
    tile_of,
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
    """The output, and log2 of the summed exponentials `[heads, queries]`: +∞ where nothing is seen."""
    out, mass = q.new_empty(*q.shape[:2], v2.shape[2]), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    if out.shape[:2].numel() == 0:
        return out, mass
    q, k1, k2, v1, v2 = (last_stride_1(x) for x in (q, k1, k2, v1, v2))
    tile = tile_of("forward", q, v2)
    _forward_kernel[(programs(q, offsets, tile),)](
        q,
        k1,
        k2,
        v1,
        v2,
        out,
        mass,
        offsets,
        first_offsets,
        second_offsets,
        *numbers(q, k1, k2, v1, v2, offsets, left, right),
        scale,
        LIMITED=left is not None or right is not None,
        **constants(tile, q, v2),
    )
    return out, mass


@triton.jit
def _meet_rows(
    best,
    mass,
    out,
    q,
    keys,
    values,
    k1,
    v1,
    k1_row,
    v1_row,
    begin,
    end,
    i,
    seen,
    left,
    right,
    log2_scale,
    MASKED: tl.constexpr,
    LIMITED: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The rows begin … end of the first set with one tile of the second; `seen` [queries, tile] matters if MASKED."""
    next_key = read_row(k1, begin, end, k1_row, DIM, BLOCK_D)
    for j in range(begin, end):
        key = next_key
        next_key = read_row(k1, j + 1, end, k1_row, DIM, BLOCK_D)
        value = read_row(v1, j, end, v1_row, VALUE_DIM, BLOCK_V).to(tl.float32)
        logit = tl.dot(q * key, keys, input_precision="ieee")
        if MASKED:
            visible = seen
            if LIMITED:
                visible = seen & sees(i, j, left, right)[:, None]
            logit = tl.where(visible, logit * log2_scale, -float("inf"))
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
    q,
    k1,
    k2,
    v1,
    v2,
    out_ptr,
    mass_ptr,
    offsets,
    first_offsets,
    second_offsets,
    q_row,
    q_head,
    k1_row,
    k1_head,
    k2_row,
    k2_head,
    v1_row,
    v1_head,
    v2_row,
    v2_head,
    num_queries,
    heads,
    trees,
    left,
    right,
    scale,
    LIMITED: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: a tile of queries of one tree, one head. Later queries see more if causal, and begin first."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = (program % heads).to(tl.int64)
    tree, begin = find_tile(offsets, trees, program // heads, ROWS)
    first, length = rows_of_tree(offsets, tree)
    if begin >= length:
        return
    first1, length1 = rows_of_tree(first_offsets, tree)
    first2, length2 = rows_of_tree(second_offsets, tree)
    k1 += first1 * k1_row + head * k1_head
    v1 += first1 * v1_row + head * v1_head
    k2 += first2 * k2_row + head * k2_head
    v2 += first2 * v2_row + head * v2_head
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
        k = start + tl.arange(0, COLUMNS)
        keys = tl.trans(read_rows(k2, k, k < high2, k2_row, DIM, BLOCK_D))
        values = read_rows(v2, k, k < high2, v2_row, VALUE_DIM, BLOCK_V)
        seen = (k < high2)[None, :]
        if LIMITED:
            seen = seen & sees(i[:, None], k[None, :], left, right)
        # Rows j that need no mask: none where the tile itself needs one.
        whole = (start >= all_low) & (start + COLUMNS <= all_high2) & (all_low < all_high1)
        plain = tl.where(whole, all_low, high1)
        plain_end = tl.where(whole, all_high1, high1)
        best, mass, out = _meet_rows(
            best, mass, out, queries, keys, values, k1, v1, k1_row, v1_row, low1, plain, i, seen, left, right,
            log2_scale, True, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
        )  # fmt: skip
        best, mass, out = _meet_rows(
            best, mass, out, queries, keys, values, k1, v1, k1_row, v1_row, plain, plain_end, i, seen, left, right,
            log2_scale, False, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
        )  # fmt: skip
        if LIMITED:
            best, mass, out = _meet_rows(
                best, mass, out, queries, keys, values, k1, v1, k1_row, v1_row, plain_end, high1, i, seen, left, right,
                log2_scale, True, LIMITED, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    out_row = heads * VALUE_DIM
    out_ptr += first * out_row + head * VALUE_DIM
    write_rows(out_ptr, i, inside, out_row, out / mass[:, None], VALUE_DIM, BLOCK_V)
    total = tl.where(some, best + tl.log2(mass), float("inf"))
    tl.store(mass_ptr + head * num_queries + first + i, total, mask=inside)
