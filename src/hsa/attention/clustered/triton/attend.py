"""Kernel that attends from a tile of queries to its exact keys and to its lists, with an online softmax.

Lists come from `lower`: groups that are open for the whole tile, which need no mask; groups that are opened later; and
pooled rows, each for an interval of queries. Programs of one head follow each other, so that its keys and values stay in the
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_queries, load_tile


@triton.jit
def _rows(table, index, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a table `[rows, WIDTH]`, padded with zeros to a power of two."""
    column = tl.arange(0, PADDED)
    at = table + index[:, None] * stride + column[None, :]
    return tl.load(at) if WIDTH == PADDED else tl.load(at, mask=column[None, :] < WIDTH, other=0.0)


@triton.jit
def _step(logit, values, top, mass, out, scale, PRECISION: tl.constexpr):
    """Add values, weighted by their logits times a scale, to a running softmax. The scale is positive."""
    new = tl.maximum(top, tl.max(logit, 1) * scale)
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(logit * scale - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(weight, 1)
    out = tl.dot(weight.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return new, mass, out


@triton.jit
def _runs(entry, SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the rows `[ENTRIES · SIZE]` of the groups of some entries."""
    return tl.reshape(((entry >> 8) * SIZE)[:, None] + tl.arange(0, SIZE)[None, :], [ENTRIES * SIZE])


@triton.jit
def attend(
    q, k, v, k_table, v_table, key_list, pooled_list, counts, tiles, bias, out, lse,
    num_tiles, heads, kv_heads, lists, chunks, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    TILE: tl.constexpr, LOG_TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    LOG_GROUP: tl.constexpr, LOG_NODE: tl.constexpr, LOG_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_tiles
    number = tl.program_id(0) % num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    listed = head // (heads // lists)
    row, count, first_chunk, visible, exact, end, offset, before = load_tile(tiles, number)
    query = tl.arange(0, TILE)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, DV], tl.float32)

    # Exact keys: first whole blocks that all queries see, then the others.
    k += exact.to(tl.int64) * k_row + kv_head * k_head
    v += exact.to(tl.int64) * v_row + kv_head * v_head
    last = end - exact + (count - 1 if CAUSAL else 0)
    whole = (end - exact) // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        logit = tl.dot(x, tl.trans(_rows(k, key, k_row, DIM, DIM)), input_precision=PRECISION)
        top, mass, total = _step(logit, _rows(v, key, v_row, VALUE_DIM, DV), top, mass, total, scale, PRECISION)
    for begin in range(whole, last, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        there = tl.minimum(key, last - 1)
        logit = tl.dot(x, tl.trans(_rows(k, there, k_row, DIM, DIM)), input_precision=PRECISION)
        limit = tl.minimum(end - exact + query, last) if CAUSAL else last + 0 * query
        logit = tl.where(key[None, :] < limit[:, None], logit, float("-inf"))
        top, mass, total = _step(logit, _rows(v, there, v_row, VALUE_DIM, DV), top, mass, total, scale, PRECISION)

    # Pooled rows. Entries are loaded one step ahead, because the addresses of keys and values depend on them.
    k_table += kv_head * chunks * (CHUNK + GROUPS + NODES + 1) * DIM
    v_table += kv_head * chunks * (CHUNK + GROUPS + NODES + 1) * VALUE_DIM
    base = (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    counts += (listed * num_tiles + number) * 4
    num_pooled = tl.load(counts + 2)
    pooled_list += base
    pooled_bias = tl.load(bias + head) if BIASED else 0.0
    groups, nodes = visible * GROUPS, visible * (GROUPS + NODES)
    to_group = chunks * CHUNK + first_chunk * GROUPS
    to_node = chunks * (CHUNK + GROUPS) + first_chunk * NODES - groups
    to_root = chunks * (CHUNK + GROUPS + NODES) + first_chunk - nodes
    index = tl.arange(0, BLOCK)
    entry = tl.load(pooled_list + index, mask=index < num_pooled, other=0)
    for begin in range(0, num_pooled, BLOCK):
        node = entry >> (2 * LOG_TILE + 1)
        is_group, is_node = node < groups, node < nodes
        rows = node + tl.where(is_group, to_group, tl.where(is_node, to_node, to_root))
        log_count = tl.where(is_group, LOG_GROUP, tl.where(is_node, LOG_NODE, LOG_CHUNK)) + pooled_bias
        since, active = (entry >> (LOG_TILE + 1)) & (TILE - 1), (entry & (2 * TILE - 1)).to(tl.uint32)
        entry = tl.load(pooled_list + begin + BLOCK + index, mask=index < num_pooled - BLOCK - begin, other=0)
        logit = tl.dot(x, tl.trans(_rows(k_table, rows.to(tl.int64), DIM, DIM, DIM)), input_precision=PRECISION)
        # One comparison: the difference of earlier queries is negative, and large as an unsigned integer.
        is_active = (query[:, None] - since[None, :]).to(tl.uint32) < active[None, :]
        logit = tl.where(is_active, logit * scale + log_count[None, :], float("-inf"))
        values = _rows(v_table, rows.to(tl.int64), VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = _step(logit, values, top, mass, total, 1.0, PRECISION)

    # Keys of groups that are open for all queries, then of the others, which are listed from the end on.
    SIZE: tl.constexpr = CHUNK // GROUPS
    k_table += first_chunk.to(tl.int64) * CHUNK * DIM
    v_table += first_chunk.to(tl.int64) * CHUNK * VALUE_DIM
    step = tl.arange(0, ENTRIES)
    key_list += base + (before * lists + listed).to(tl.int64) * ENTRIES
    num_whole = tl.load(counts)
    opened = tl.load(key_list + step)
    for begin in range(0, num_whole, ENTRIES):
        keys = _runs(opened, SIZE, ENTRIES)
        opened = tl.load(key_list + tl.minimum(begin + ENTRIES, num_whole - ENTRIES) + step)
        logit = tl.dot(x, tl.trans(_rows(k_table, keys, DIM, DIM, DIM)), input_precision=PRECISION)
        values = _rows(v_table, keys, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = _step(logit, values, top, mass, total, scale, PRECISION)
    key_list += visible * GROUPS + ENTRIES - 1
    num_later = tl.load(counts + 1)
    opened = tl.load(key_list - step, mask=num_later > 0, other=0)
    for begin in range(0, num_later, ENTRIES):
        keys = _runs(opened, SIZE, ENTRIES)
        since = tl.reshape(tl.broadcast_to((opened & 255)[:, None], [ENTRIES, SIZE]), [ENTRIES * SIZE])
        opened = tl.load(key_list - tl.minimum(begin + ENTRIES, (num_later - 1) // ENTRIES * ENTRIES) - step)
        logit = tl.dot(x, tl.trans(_rows(k_table, keys, DIM, DIM, DIM)), input_precision=PRECISION)
        logit = tl.where(query[:, None] >= since[None, :], logit, float("-inf"))
        values = _rows(v_table, keys, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = _step(logit, values, top, mass, total, scale, PRECISION)

    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    at = (row + query).to(tl.int64)
    value_column = tl.arange(0, DV)
    to = out + (at * heads + head)[:, None] * VALUE_DIM + value_column[None, :]
    there = query < count
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (value_column[None, :] < VALUE_DIM))
    tl.store(lse + at * heads + head, (top + tl.log2(mass)) * 0.6931471805599453, mask=there)
