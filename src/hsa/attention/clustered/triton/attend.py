"""Kernel that attends from a tile of queries to its exact keys and to its lists, with an online softmax.

Each step gathers runs of eight rows of the tables. A row is active for an interval of queries: from its entry's first
query on, and, if it is pooled, until its own group, node or chunk is opened.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_queries, load_tile


@triton.jit
def _step(x, keys, values, active, top, mass, out, scale, PRECISION: tl.constexpr):
    """Attend to some keys `[columns, D]`, and return the new maximum, mass and output. The scale is positive."""
    logit = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
    logit = tl.where(active, logit, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1) * scale)
    return _accumulate(logit * scale, values, new, top, mass, out, PRECISION)


@triton.jit
def _accumulate(logit, values, new, top, mass, out, PRECISION: tl.constexpr):
    """Add values, weighted by logits, to a running softmax."""
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(logit - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weight, 1)
    out = tl.dot(weight.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return new, mass, out


@triton.jit
def attend(
    q, k, v, k_table, v_table, key_list, pooled_list, ends, counts, tiles, bias, out, lse,
    heads, kv_heads, lists, chunks, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    LOG_GROUP: tl.constexpr, LOG_NODE: tl.constexpr, LOG_CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    number = tl.program_id(0) // heads
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    listed = head // (heads // lists)
    row, count, first_chunk, visible, exact, end, offset, _ = load_tile(tiles, number)
    query = tl.arange(0, TILE)
    column, value_column = tl.arange(0, D), tl.arange(0, DV)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, D)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, DV], tl.float32)

    last = end + (count - 1 if CAUSAL else 0)
    for begin in range(0, last - exact, BLOCK):
        key = exact + begin + tl.arange(0, BLOCK)
        there = key < last
        rows = tl.where(there, key, exact).to(tl.int64)[:, None]
        y = tl.load(k + rows * k_row + kv_head * k_head + column[None, :], mask=column[None, :] < DIM, other=0.0)
        z = tl.load(
            v + rows * v_row + kv_head * v_head + value_column[None, :],
            mask=value_column[None, :] < VALUE_DIM,
            other=0.0,
        )
        limit = end + query if CAUSAL else end + 0 * query
        active = there[None, :] & (key[None, :] < limit[:, None])
        top, mass, total = _step(x, y, z, active, top, mass, total, scale, PRECISION)

    table = chunks * (CHUNK + GROUPS + NODES + 1)
    k_table += kv_head * table * DIM
    v_table += kv_head * table * VALUE_DIM
    base = offset.to(tl.int64) * lists + listed * visible
    key_list += base * GROUPS
    pooled_list += base * (NODES + 2)
    ends += base * (NODES + 2) * 8
    num_keys = tl.load(counts + (number * lists + listed) * 2)
    num_pooled = tl.load(counts + (number * lists + listed) * 2 + 1)
    index = tl.arange(0, ENTRIES * 8) // 8
    within = tl.arange(0, ENTRIES * 8) % 8

    # Entries are loaded one step ahead, because the addresses of keys and values depend on them. Behind the last one, it is
    # repeated without a query for which it is active: rows of another sequence might hold values that are not finite.
    entry = tl.load(key_list + tl.minimum(index, num_keys - 1), mask=num_keys > 0, other=0)
    for begin in range(0, num_keys, ENTRIES):
        following = tl.load(key_list + tl.minimum(begin + ENTRIES + index, num_keys - 1))
        rows = ((entry >> 8) + within).to(tl.int64)[:, None]
        y = tl.load(k_table + rows * DIM + column[None, :], mask=column[None, :] < DIM, other=0.0)
        z = tl.load(
            v_table + rows * VALUE_DIM + value_column[None, :], mask=value_column[None, :] < VALUE_DIM, other=0.0
        )
        since = tl.where(begin + index < num_keys, entry & 255, 255)
        active = query[:, None] >= since[None, :]
        top, mass, total = _step(x, y, z, active, top, mass, total, scale, PRECISION)
        entry = following

    pooled_bias = tl.load(bias + head) if BIASED else 0.0
    first_of_nodes = chunks * (CHUNK + GROUPS)
    first_of_roots = first_of_nodes + chunks * NODES
    last_root = first_of_roots + first_chunk + visible - 1
    entry = tl.load(pooled_list + tl.minimum(index, num_pooled - 1), mask=num_pooled > 0, other=0)
    for begin in range(0, num_pooled, ENTRIES):
        following = tl.load(pooled_list + tl.minimum(begin + ENTRIES + index, num_pooled - 1))
        is_group, is_root = entry >> 8 < first_of_nodes, entry >> 8 >= first_of_roots
        inside = is_group | is_root | (within < NODES)
        there = inside & (begin + index < num_pooled)
        until = tl.load(ends + begin * 8 + tl.arange(0, ENTRIES * 8), mask=there, other=0).to(tl.int32)
        since = entry & 255
        log_count = tl.where(is_group, LOG_GROUP, tl.where(is_root, LOG_CHUNK, LOG_NODE)) + pooled_bias
        rows = tl.minimum((entry >> 8) + tl.where(inside, within, 0), last_root).to(tl.int64)[:, None]
        y = tl.load(k_table + rows * DIM + column[None, :], mask=column[None, :] < DIM, other=0.0)
        z = tl.load(
            v_table + rows * VALUE_DIM + value_column[None, :], mask=value_column[None, :] < VALUE_DIM, other=0.0
        )
        active = (query[:, None] >= since[None, :]) & (query[:, None] < until[None, :])
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + log_count[None, :]
        logit = tl.where(active, logit, float("-inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        top, mass, total = _accumulate(logit, z, new, top, mass, total, PRECISION)
        entry = following

    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    rows = (row + query).to(tl.int64)
    there = query < count
    to = out + (rows * heads + head)[:, None] * VALUE_DIM + value_column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (value_column[None, :] < VALUE_DIM))
    tl.store(lse + rows * heads + head, (top + tl.log2(mass)) * 0.6931471805599453, mask=there)
