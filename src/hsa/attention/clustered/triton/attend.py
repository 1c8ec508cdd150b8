"""Kernel that attends from a tile of queries to its exact keys and to its lists, with an online softmax.

Lists come from `lower`: open groups, with the first query for which they are open, and pooled rows, each for an interval of
queries. Programs of one head follow each other, so that its keys and values stay in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import (
    interval_of,
    is_active,
    load_queries,
    load_rows,
    load_tile,
    of_members,
    rows_of_groups,
)

MOST_MASS: tl.constexpr = tl.constexpr(2.0**64)
"""Limit of the sum of weights with a fixed reference, and of its inverse: no weight that matters overflows or vanishes."""


@triton.jit
def add_values(logit, values, top, mass, out, scale, PRECISION: tl.constexpr, FIXED: tl.constexpr = False):
    """Add values, weighted by their logits times a scale, to a running softmax. The scale is positive.

    Args:
        top: Reference of the weights: the largest logit so far, or, if it is fixed, any finite number.
    """
    if FIXED:
        weight = tl.exp2(logit * scale - top[:, None])
        mass += tl.sum(weight, 1)
        out = tl.dot(weight.to(values.dtype), values, out, input_precision=PRECISION)
        return top, mass, out
    new = tl.maximum(top, tl.max(logit, 1) * scale)
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(logit * scale - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weight, 1)
    out = tl.dot(weight.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return new, mass, out


@triton.jit
def attend(
    q, k, v, k_pages, v_pages, key_list, pooled_rows, pooled_kinds, counts, tiles, bias, out, lse,
    num_tiles, heads, kv_heads, lists, pages, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    FIXED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_tiles
    number = tl.program_id(0) % num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    listed = head // (heads // lists)
    row, count, first_chunk, visible, exact, end, _, offset, tile = load_tile(tiles, number)
    query = tl.arange(0, TILE)
    there = query < count
    to_lse = lse + (row + query).to(tl.int64) * heads + head
    if AGAIN:  # only where weights of the first launch were out of range
        is_done = tl.abs(tl.load(to_lse, mask=there, other=0.0)) < float("inf")
        if tl.sum(is_done.to(tl.int32), 0) == TILE:
            return
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, DV], tl.float32)

    # Exact keys.
    k += exact.to(tl.int64) * k_row + kv_head * k_head
    v += exact.to(tl.int64) * v_row + kv_head * v_head
    last = end - exact + (count - 1 if CAUSAL else 0)
    limit = tl.minimum(end - exact + query, last) if CAUSAL else last + 0 * query
    for begin in range(0, last, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        near = tl.minimum(key, last - 1)
        logit = tl.dot(x, tl.trans(load_rows(k, near, k_row, DIM, DIM)), input_precision=PRECISION)
        logit = tl.where(key[None, :] < limit[:, None], logit, float("-inf"))
        top, mass, total = add_values(
            logit, load_rows(v, near, v_row, VALUE_DIM, DV), top, mass, total, scale, PRECISION
        )

    # Pooled rows. Entries are loaded one step ahead, because the addresses of keys and values depend on them.
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += kv_head * pages * (PAGE * DIM)
    v_pages += kv_head * pages * (PAGE * VALUE_DIM)
    base = (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    counts += (tile * lists + listed) * 2
    num_pooled = tl.load(counts + 1)
    at = base + (number * lists + listed).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pooled_bias = tl.load(bias + head) if BIASED else 0.0
    rows = tl.load(pooled_rows + at, mask=num_pooled > 0, other=0)
    kind = tl.load(pooled_kinds + at, mask=num_pooled > 0, other=0)
    for begin in range(0, num_pooled, BLOCK):
        log_count, since, active = interval_of(kind)
        if BIASED:
            log_count += pooled_bias
        pooled = rows.to(tl.int64)
        following = tl.minimum(begin + BLOCK, (num_pooled - 1) // BLOCK * BLOCK)
        rows, kind = tl.load(pooled_rows + at + following), tl.load(pooled_kinds + at + following)
        logit = tl.dot(x, tl.trans(load_rows(k_pages, pooled, DIM, DIM, DIM)), input_precision=PRECISION)
        is_seen = is_active(query[:, None], since[None, :], active[None, :])
        logit = tl.where(is_seen, logit * scale + log_count[None, :], float("-inf"))
        values = load_rows(v_pages, pooled, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = add_values(logit, values, top, mass, total, 1.0, PRECISION)

    # Keys of open groups. The largest logit so far remains the reference of their weights, which saves a tenth of the time.
    # Where a logit is so much larger that weights may overflow, a second launch computes the tile again.
    if FIXED:
        top = tl.where(top == float("-inf"), 0.0, top)
    SIZE: tl.constexpr = CHUNK // GROUPS
    k_pages += first_chunk.to(tl.int64) * (PAGE * DIM)
    v_pages += first_chunk.to(tl.int64) * (PAGE * VALUE_DIM)
    step = tl.arange(0, ENTRIES)
    key_list += base + (number * lists + listed).to(tl.int64) * ENTRIES
    num_open = tl.load(counts)
    opened = tl.load(key_list + step, mask=num_open > 0, other=0)
    for begin in range(0, num_open, ENTRIES):
        keys, since = rows_of_groups(opened >> 8, SIZE, GROUPS, PAGE), of_members(opened & 255, SIZE)
        opened = tl.load(key_list + tl.minimum(begin + ENTRIES, (num_open - 1) // ENTRIES * ENTRIES) + step)
        logit = tl.dot(x, tl.trans(load_rows(k_pages, keys, DIM, DIM, DIM)), input_precision=PRECISION)
        logit = tl.where(query[:, None] >= since[None, :], logit, float("-inf"))
        values = load_rows(v_pages, keys, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = add_values(logit, values, top, mass, total, scale, PRECISION, FIXED)

    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    value_column = tl.arange(0, DV)
    to = out + ((row + query).to(tl.int64) * heads + head)[:, None] * VALUE_DIM + value_column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (value_column[None, :] < VALUE_DIM))
    sums = (top + tl.log2(mass)) * 0.6931471805599453
    if FIXED:
        sums = tl.where((mass < MOST_MASS) & (mass > 1 / MOST_MASS), sums, float("inf"))
    tl.store(to_lse, sums, mask=there)
