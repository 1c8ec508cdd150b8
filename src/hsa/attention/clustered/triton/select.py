"""Kernels that select groups: a bound per query, the first query of a tile that reaches it, and lists of open rows.

No matrix of scores is written: `first_rows` keeps, per tile, list and group, one byte. `lower` turns these bytes into
two lists per tile and list, in a fixed order. An entry is a run of eight rows of the tables and the first query for which
they are active, packed into one integer:

- keys: the keys of an open group;
- pooled: the groups of an open node, the nodes of an open chunk, and eight chunks at a time.

Logits are in powers of two. Bounds and estimates leave out the scale and the size of a group, which all groups share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_queries, load_tile


@triton.jit
def normalizers(
    q, k, k_table, tiles, bounds, heads, kv_heads, chunks, q_row, q_head, k_row, k_head, scale, log_threshold,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, CAUSAL: tl.constexpr, LOG_NODE: tl.constexpr, LOG_GROUP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: the log-sum-exp of exact keys and pooled nodes, plus the log of the threshold."""
    head = tl.program_id(0) % heads
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, exact, end, _, _ = load_tile(tiles, tl.program_id(0) // heads)
    if visible == 0:
        return
    query = tl.arange(0, TILE)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, D)
    column = tl.arange(0, D)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    # First the exact keys of k, then the nodes of the visible chunks.
    last = end + (count - 1 if CAUSAL else 0)
    for begin in range(0, last - exact, BLOCK):
        key = exact + begin + tl.arange(0, BLOCK)
        there = key < last
        rows = tl.where(there, key, exact).to(tl.int64)
        y = tl.load(
            k + rows[:, None] * k_row + kv_head * k_head + column[None, :], mask=column[None, :] < DIM, other=0.0
        )
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        limit = end + query if CAUSAL else end + 0 * query
        logit = tl.where(there[None, :] & (key[None, :] < limit[:, None]), logit, float("-inf"))
        top, mass = _add(logit, top, mass)
    base = k_table + kv_head * (chunks * (CHUNK + GROUPS + NODES + 1)) * DIM
    base += (chunks * (CHUNK + GROUPS) + first_chunk * NODES).to(tl.int64) * DIM
    for begin in range(0, visible * NODES, BLOCK):
        node = begin + tl.arange(0, BLOCK)
        there = node < visible * NODES
        rows = tl.where(there, node, 0).to(tl.int64)
        y = tl.load(base + rows[:, None] * DIM + column[None, :], mask=column[None, :] < DIM, other=0.0)
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + LOG_NODE
        logit = tl.where(there[None, :], logit, float("-inf"))
        top, mass = _add(logit, top, mass)
    bound = (top + tl.log2(mass) + log_threshold - LOG_GROUP) / scale
    tl.store(bounds + (row + query).to(tl.int64) * heads + head, bound, mask=query < count)


@triton.jit
def _add(logit, top, mass):
    """Add logits to a running log-sum-exp."""
    new = tl.maximum(top, tl.max(logit, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    mass = mass * tl.exp2(top - base) + tl.sum(tl.exp2(logit - base[:, None]), 1)
    return new, mass


@triton.jit
def _estimates(
    x, means, spreads, begin, groups, weight,
    DIM: tl.constexpr, D: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the estimates `[groups, queries]` of a block of groups, without scale and size, and which groups exist.

    Groups are the rows of the product, so that a minimum over the queries stays inside a few threads.
    """
    column = tl.arange(0, D)
    group = begin + tl.arange(0, BLOCK)
    there = group < groups
    rows = tl.where(there, group, 0).to(tl.int64)
    offsets = rows[:, None] * DIM + column[None, :]
    mean = tl.load(means + offsets, mask=column[None, :] < DIM, other=0.0)
    estimate = tl.dot(mean, tl.trans(x), input_precision=PRECISION)
    if SPREAD != 0:
        spread = tl.load(spreads + offsets, mask=column[None, :] < DIM, other=0.0)
        deviation = tl.abs(tl.dot(spread, tl.trans(x), input_precision=PRECISION))
        estimate += deviation if SPREAD == 1 else deviation * weight  # without a product for the default weight
    return estimate, there


@triton.jit
def largest(
    q, k_table, spread, tiles, bounds, heads, kv_heads, chunks, q_row, q_head, number, weight,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: its `number`-th largest estimate, or −∞ if there are fewer groups."""
    head = tl.program_id(0) % heads
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, _, _, _, _ = load_tile(tiles, tl.program_id(0) // heads)
    if visible == 0:
        return
    query = tl.arange(0, TILE)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, D)
    means = k_table + kv_head * (chunks * (CHUNK + GROUPS + NODES + 1)) * DIM
    means += (chunks * CHUNK + first_chunk * GROUPS).to(tl.int64) * DIM
    spreads = spread + (kv_head * chunks * GROUPS + first_chunk * GROUPS) * DIM
    best = tl.full([TILE, KEPT], float("-inf"), tl.float32)
    for begin in range(0, visible * GROUPS, KEPT):
        estimate, there = _estimates(
            x, means, spreads, begin, visible * GROUPS, weight, DIM, D, SPREAD, PRECISION, KEPT
        )
        # NaN counts as −∞, as in a comparison.
        estimate = tl.where(there[:, None] & (estimate == estimate), estimate, float("-inf"))
        best = tl.topk(tl.reshape(tl.join(best, tl.trans(estimate)), [TILE, 2 * KEPT]), KEPT)
    bound = tl.max(tl.where(tl.arange(0, KEPT)[None, :] == number - 1, best, float("-inf")), 1)
    bound = tl.where(
        bound == float("-inf"), bound, bound - 1e-5 - 1e-6 * tl.abs(bound)
    )  # `first_rows` may round the same estimate otherwise
    tl.store(bounds + (row + query).to(tl.int64) * heads + head, bound, mask=query < count)


@triton.jit
def first_rows(
    q, k_table, spread, tiles, bounds, first, heads, kv_heads, lists, chunks, q_row, q_head, weight,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, CAUSAL: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first query of a tile for which each group is open; 255 if there is none."""
    listed = tl.program_id(0) % lists
    row, count, first_chunk, visible, _, _, offset, _ = load_tile(tiles, tl.program_id(0) // lists)
    groups = visible * GROUPS
    share = heads // lists
    kv_head = (listed * share // (heads // kv_heads)).to(tl.int64)
    query = tl.arange(0, TILE)
    since = query if CAUSAL else 0 * query
    means = k_table + kv_head * (chunks * (CHUNK + GROUPS + NODES + 1)) * DIM
    means += (chunks * CHUNK + first_chunk * GROUPS).to(tl.int64) * DIM
    spreads = spread + (kv_head * chunks * GROUPS + first_chunk * GROUPS) * DIM
    out = first + (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    for member in range(share):
        head = listed * share + member
        x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, D)
        bound = tl.load(bounds + (row + query).to(tl.int64) * heads + head, mask=query < count, other=float("inf"))
        for begin in range(0, groups, BLOCK):
            estimate, there = _estimates(x, means, spreads, begin, groups, weight, DIM, D, SPREAD, PRECISION, BLOCK)
            opened = tl.min(tl.where(estimate >= bound[None, :], since[None, :], 255), 1)
            group = begin + tl.arange(0, BLOCK)
            opened = tl.where(group == 0, 0, opened)
            if member > 0:
                before = tl.load(out + group, mask=there, other=255).to(tl.int32)
                opened = tl.minimum(opened, before)
            tl.store(out + group, opened.to(tl.uint8), mask=there)


@triton.jit
def lower(
    first, tiles, key_list, pooled_list, ends, counts, lists, chunks,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the lists of a tile, and for each of the eight rows of a pooled entry the query at which it ends."""
    program = tl.program_id(0)
    listed = program % lists
    _, _, first_chunk, visible, _, _, offset, _ = load_tile(tiles, program // lists)
    base = offset.to(tl.int64) * lists + listed * visible
    first += base * GROUPS
    key_list += base * GROUPS
    pooled_list += base * (NODES + 2)
    ends += base * (NODES + 2) * 8
    group = tl.reshape(tl.arange(0, BLOCK * GROUPS), [BLOCK, NODES, GROUPS // NODES])
    node = tl.reshape(tl.arange(0, BLOCK * NODES), [BLOCK, NODES])
    chunk = tl.arange(0, BLOCK)
    eight = tl.arange(0, 8)
    keys = 0
    pooled = 0
    first_of_groups = chunks * CHUNK
    first_of_nodes = first_of_groups + chunks * GROUPS
    first_of_roots = first_of_nodes + chunks * NODES
    for begin in range(0, visible, BLOCK):
        inside = begin * GROUPS + group
        opened = tl.load(first + inside, mask=inside < visible * GROUPS, other=255).to(tl.int32)
        node_opened = tl.min(opened, 2)
        chunk_opened = tl.min(node_opened, 1)
        nodes, roots = begin * NODES + node, begin + chunk
        row = (first_chunk * GROUPS + inside) * (CHUNK // GROUPS)
        index, number = _append(
            key_list + keys, tl.reshape(opened, [BLOCK * GROUPS]), tl.reshape(row, [BLOCK * GROUPS])
        )
        keys += number
        # The groups of open nodes.
        row = first_of_groups + (first_chunk * NODES + nodes) * (GROUPS // NODES)
        parent = tl.reshape(node_opened, [BLOCK * NODES])
        index, number = _append(pooled_list + pooled, parent, tl.reshape(row, [BLOCK * NODES]))
        end = tl.reshape(opened, [BLOCK * NODES, GROUPS // NODES]).to(tl.uint8)
        tl.store(ends + (pooled + index[:, None]) * 8 + eight[None, :], end, mask=(parent < 255)[:, None])
        pooled += number
        # The nodes of open chunks.
        index, number = _append(pooled_list + pooled, chunk_opened, first_of_nodes + (first_chunk + roots) * NODES)
        to = ends + (pooled + index[:, None]) * 8 + tl.arange(0, NODES)[None, :]
        tl.store(to, node_opened.to(tl.uint8), mask=(chunk_opened < 255)[:, None])
        pooled += number
        # All chunks, eight at a time.
        is_first = (roots % 8 == 0) & (roots < visible)
        index, number = _append(pooled_list + pooled, tl.where(is_first, 0, 255), first_of_roots + first_chunk + roots)
        end = tl.where(roots < visible, chunk_opened, 0).to(tl.uint8)
        tl.store(ends + pooled * 8 + chunk, end, mask=chunk < number * 8)
        pooled += number
    tl.store(counts + program * 2, keys)
    tl.store(counts + program * 2 + 1, pooled)


@triton.jit
def _append(to, opened, row):
    """Store the opened entries one after another; return their indices and their number."""
    listed = opened < 255
    index = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.store(to + index, (row << 8) | opened, mask=listed)
    return index, tl.sum(listed.to(tl.int32), 0)
