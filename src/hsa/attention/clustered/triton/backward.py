"""Kernels of the gradients of clustered attention. Selections have no gradient; every sum has one fixed order.

    attend_gradients    per tile and head: the gradient of its queries, and for every listed row its part of the gradients
                        of the row's key and value, in the order of the lists
    transpose           per chunk and list: the parts of every row of the chunk, as a list
    reduce              per row and key/value head: the sum of these parts
    finish              per block of keys: the gradients of its rows and of the means above them, passed down to the keys,
                        plus those of the tiles that see the keys exactly

Weights are computed again from the log-sum-exp. Scores are laid out as `[rows, queries]`: only the product for the queries
needs them transposed. A part has the gradient of the key in its first columns and that of the value in the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.lists import chunk_rows
from hsa.attention.clustered.triton.tiles import (
    interval_of,
    is_active,
    load_queries,
    load_rows,
    load_tile,
    of_members,
    rows_of_groups,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_sums(sums, at, there):
    """Load a number per query; 0 for queries that are not there."""
    return tl.load(sums + at, mask=there, other=0.0)


@triton.jit
def _d_logits(weights, values, d_out, delta, PRECISION: tl.constexpr):
    """Return the gradients of logits `[rows, queries]`."""
    return weights * (tl.dot(values, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])


@triton.jit
def _store_parts(
    parts, at, weights, d_logits, x, d_out, unit,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the keys and values of rows, as far as they come from these queries."""
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    to = parts + at.to(tl.int64)[:, None] * (DIM + VALUE_DIM)
    d_key = tl.dot(d_logits.to(x.dtype), x, input_precision=PRECISION) * unit
    tl.store(to + column[None, :], d_key.to(x.dtype))
    d_value = tl.dot(weights.to(d_out.dtype), d_out, input_precision=PRECISION).to(x.dtype)
    if VALUE_DIM == DV:
        tl.store(to + DIM + value_column[None, :], d_value)
    else:
        tl.store(to + DIM + value_column[None, :], d_value, mask=value_column[None, :] < VALUE_DIM)


@triton.jit
def attend_gradients(
    q, k, v, k_pages, v_pages, key_list, pooled_rows, pooled_kinds, counts, offsets, tiles, bias,
    out, d_out, lse, d_lse, deltas, d_q, d_bias, parts,
    num_tiles, heads, kv_heads, lists, pages, capacity, q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, unit,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr, OF_LSE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the queries of a tile, and store parts of those of the rows of its lists.

    Args:
        offsets: First part of every tile and list.
        capacity: Number of parts of all lists. Heads that share a list have their parts this far from each other.
        unit: Factor of the dot products.
    """
    head = tl.program_id(0) // num_tiles
    number = tl.program_id(0) % num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    share = heads // lists
    listed = head // share
    row, count, first_chunk, visible, exact, end, _, offset, tile = load_tile(tiles, number)
    query = tl.arange(0, TILE)
    there = query < count
    at = (row + query).to(tl.int64) * heads + head
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, DIM)
    g = load_queries(d_out, row, count, head, d_row, d_head, TILE, VALUE_DIM, DV)
    o = load_queries(out, row, count, head, heads * VALUE_DIM, VALUE_DIM, TILE, VALUE_DIM, DV)
    sums = _row_sums(lse, at, there) * LOG2_E
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if OF_LSE:
        delta -= _row_sums(d_lse, at, there)
    tl.store(deltas + at, delta, mask=there)
    scale = unit * LOG2_E
    total = tl.zeros([TILE, DIM], tl.float32)

    # Exact keys. Their own gradients follow in `finish`.
    k += exact.to(tl.int64) * k_row + kv_head * k_head
    v += exact.to(tl.int64) * v_row + kv_head * v_head
    last = end - exact + (count - 1 if CAUSAL else 0)
    limit = tl.minimum(end - exact + query, last) if CAUSAL else last + 0 * query
    for begin in range(0, last, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        near = tl.minimum(key, last - 1)
        y = load_rows(k, near, k_row, DIM, DIM)
        logits = tl.dot(y, tl.trans(x), input_precision=PRECISION) * scale - sums[None, :]
        weights = tl.where(key[:, None] < limit[None, :], tl.exp2(logits), 0.0)
        d_logits = _d_logits(weights, load_rows(v, near, v_row, VALUE_DIM, DV), g, delta, PRECISION)
        total = tl.dot(tl.trans(d_logits.to(y.dtype)), y, total, input_precision=PRECISION)

    # Pooled rows. Entries are loaded one step ahead, because the addresses of keys and values depend on them.
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += kv_head * pages * (PAGE * DIM)
    v_pages += kv_head * pages * (PAGE * VALUE_DIM)
    base = (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    padding = (number * lists + listed).to(tl.int64)
    counts += (tile * lists + listed) * 2
    num_pooled = tl.load(counts + 1)
    part = tl.load(offsets + number * lists + listed) + (head % share) * capacity
    step = tl.arange(0, BLOCK)
    entry = base + padding * BLOCK + step
    pooled_bias = tl.load(bias + head) if BIASED else 0.0
    of_bias = tl.zeros([BLOCK], tl.float32)
    rows = tl.load(pooled_rows + entry, mask=num_pooled > 0, other=0)
    kind = tl.load(pooled_kinds + entry, mask=num_pooled > 0, other=0)
    for begin in range(0, num_pooled, BLOCK):
        log_count, since, active = interval_of(kind)
        if BIASED:
            log_count += pooled_bias
        pooled = rows.to(tl.int64)
        following = tl.minimum(begin + BLOCK, (num_pooled - 1) // BLOCK * BLOCK)
        rows, kind = tl.load(pooled_rows + entry + following), tl.load(pooled_kinds + entry + following)
        y = load_rows(k_pages, pooled, DIM, DIM, DIM)
        logits = tl.dot(y, tl.trans(x), input_precision=PRECISION) * scale + (log_count[:, None] - sums[None, :])
        is_seen = is_active(query[None, :], since[:, None], active[:, None])
        weights = tl.where(is_seen, tl.exp2(logits), 0.0)
        values = load_rows(v_pages, pooled, VALUE_DIM, VALUE_DIM, DV)
        d_logits = _d_logits(weights, values, g, delta, PRECISION)
        if BIASED:
            of_bias += tl.sum(d_logits, 1)
        total = tl.dot(tl.trans(d_logits.to(y.dtype)), y, total, input_precision=PRECISION)
        _store_parts(parts, part + begin + step, weights, d_logits, x, g, unit, DIM, VALUE_DIM, DV, PRECISION)
    if BIASED:
        tl.store(d_bias + tile * heads + head, tl.sum(of_bias, 0))
    part += (num_pooled + BLOCK - 1) // BLOCK * BLOCK

    # Keys of open groups.
    SIZE: tl.constexpr = CHUNK // GROUPS
    k_pages += first_chunk.to(tl.int64) * (PAGE * DIM)
    v_pages += first_chunk.to(tl.int64) * (PAGE * VALUE_DIM)
    which = tl.arange(0, ENTRIES)
    key_list += base + padding * ENTRIES
    num_open = tl.load(counts)
    opened = tl.load(key_list + which, mask=num_open > 0, other=0)
    for begin in range(0, num_open, ENTRIES):
        keys, since = rows_of_groups(opened >> 8, SIZE, GROUPS, PAGE), of_members(opened & 255, SIZE)
        opened = tl.load(key_list + tl.minimum(begin + ENTRIES, (num_open - 1) // ENTRIES * ENTRIES) + which)
        y = load_rows(k_pages, keys, DIM, DIM, DIM)
        logits = tl.dot(y, tl.trans(x), input_precision=PRECISION) * scale - sums[None, :]
        weights = tl.where(query[None, :] >= since[:, None], tl.exp2(logits), 0.0)
        d_logits = _d_logits(weights, load_rows(v_pages, keys, VALUE_DIM, VALUE_DIM, DV), g, delta, PRECISION)
        total = tl.dot(tl.trans(d_logits.to(y.dtype)), y, total, input_precision=PRECISION)
        _store_parts(parts, part + begin * SIZE + step, weights, d_logits, x, g, unit, DIM, VALUE_DIM, DV, PRECISION)

    to = d_q + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(to, (total * unit).to(d_q.dtype.element_ty), mask=there[:, None])


@triton.jit
def _transpose(lists, running, rows, is_listed, capacity, units):
    """Append to the list of each unit, a column, the rows of the tiles that have it, in their order."""
    flags = is_listed.to(tl.int32)
    rank = running[None, :] + tl.cumsum(flags, 0) - flags
    tl.store(lists + units[None, :] * capacity + rank, rows, mask=is_listed)
    return running + tl.sum(flags, 0)


@triton.jit
def transpose(
    first, tiles, readers, chunks, prefixes, counts, offsets, transposed, lengths, lists,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the parts of every unit of a chunk: the keys of each group, the means of groups, of nodes and of the chunk."""
    listed = tl.program_id(0) % lists
    at = chunks + tl.program_id(0) // lists * 5
    number, begin_readers, num_readers, before = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    UNITS: tl.constexpr = 2 * GROUPS + NODES + 1
    SIZE: tl.constexpr = CHUNK // GROUPS
    transposed += (before.to(tl.int64) * lists + listed * num_readers) * UNITS
    lengths += tl.program_id(0) * UNITS
    group, node = tl.arange(0, GROUPS), tl.arange(0, NODES)
    of_groups = tl.zeros([GROUPS], tl.int32)
    of_means = tl.zeros([GROUPS], tl.int32)
    of_nodes = tl.zeros([NODES], tl.int32)
    of_root = tl.zeros([1], tl.int32)
    for begin in range(0, num_readers, BLOCK):
        reader = begin + tl.arange(0, BLOCK)
        there = reader < num_readers
        tile = tl.load(readers + begin_readers + reader, mask=there, other=0)
        visible = tl.load(tiles + tile * 9 + 3)
        of_selection, offset, of_layout = (
            tl.load(tiles + tile * 9 + 6), tl.load(tiles + tile * 9 + 7), tl.load(tiles + tile * 9 + 8)
        )  # fmt: skip
        from_groups = (of_selection.to(tl.int64) * lists + listed * visible + number) * GROUPS
        opened = tl.load(first + from_groups[:, None] + group[None, :], mask=there[:, None], other=255).to(tl.int32)
        is_open, is_mean, is_node, is_root, _, _, _ = chunk_rows(opened, there, BLOCK, NODES, GROUPS)
        prefix = prefixes + (offset.to(tl.int64) * lists + listed * visible + number) * 2
        before_open, before_pooled = tl.load(prefix, mask=there, other=0), tl.load(prefix + 1, mask=there, other=0)
        num_pooled = tl.load(counts + (of_layout * lists + listed) * 2 + 1, mask=there, other=0)
        part = tl.load(offsets + tile * lists + listed, mask=there, other=0)
        from_pooled = part + before_pooled
        from_open = part + (num_pooled + ROWS - 1) // ROWS * ROWS + before_open * SIZE
        ranks = tl.cumsum(is_open.to(tl.int32), 1) - is_open.to(tl.int32)
        of_groups = _transpose(transposed, of_groups, from_open[:, None] + ranks * SIZE, is_open, num_readers, group)
        ranks = tl.cumsum(is_mean.to(tl.int32), 1) - is_mean.to(tl.int32)
        of_means = _transpose(transposed, of_means, from_pooled[:, None] + ranks, is_mean, num_readers, GROUPS + group)
        from_pooled += tl.sum(is_mean.to(tl.int32), 1)
        ranks = tl.cumsum(is_node.to(tl.int32), 1) - is_node.to(tl.int32)
        of_nodes = _transpose(
            transposed, of_nodes, from_pooled[:, None] + ranks, is_node, num_readers, 2 * GROUPS + node
        )
        from_pooled += tl.sum(is_node.to(tl.int32), 1)
        root = 2 * GROUPS + NODES + tl.arange(0, 1)
        of_root = _transpose(transposed, of_root, from_pooled[:, None], is_root[:, None], num_readers, root)
    tl.store(lengths + group, of_groups)
    tl.store(lengths + GROUPS + group, of_means)
    tl.store(lengths + 2 * GROUPS + node, of_nodes)
    tl.store(lengths + 2 * GROUPS + NODES + tl.arange(0, 1), of_root)


@triton.jit
def _add_parts(
    parts, transposed, lengths, num_readers, num_lists, share, capacity, unit,
    UNITS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum `[SIZE, PADDED]` of the parts of a unit over all lists that read it.

    Args:
        transposed, lengths: Those of the first of `num_lists` lists.
    """
    member, column, entry = tl.arange(0, SIZE), tl.arange(0, PADDED), tl.arange(0, BLOCK)
    # Rows of a group fill a warp, so that the entries of a column are in one thread. Sums across threads are taken once.
    ENTRIES: tl.constexpr = 1 if SIZE > 1 else BLOCK
    total = tl.zeros([ENTRIES, SIZE, PADDED], tl.float32)
    for number in range(num_lists):
        length = tl.load(lengths + number * UNITS + unit)
        entries = transposed + (number * UNITS + unit) * num_readers
        at = tl.load(entries + entry, mask=entry < length, other=-1)
        for begin in range(0, length, BLOCK):
            following = tl.load(entries + begin + BLOCK + entry, mask=begin + BLOCK + entry < length, other=-1)
            mask = (at >= 0)[:, None, None] & (column < WIDTH)[None, None, :]
            for sharing in range(share):
                rows = (at + sharing * capacity).to(tl.int64)[:, None] + member[None, :]
                x = tl.load(parts + rows[:, :, None] * WIDTH + column[None, None, :], mask=mask, other=0.0)
                total += tl.sum(x.to(tl.float32), 0, keep_dims=True) if SIZE > 1 else x.to(tl.float32)
            at = following
    return tl.sum(total, 0)


@triton.jit
def _store_sums(sums, total, AGAIN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store sums `[SIZE, PADDED]` of rows. With `AGAIN`, add them to what is there."""
    column = tl.arange(0, PADDED)[None, :]
    to = sums + tl.arange(0, SIZE)[:, None] * WIDTH + column
    if AGAIN:
        total += tl.load(to, mask=column < WIDTH, other=0.0)
    tl.store(to, total, mask=column < WIDTH)


@triton.jit
def reduce(
    parts, transposed, lengths, chunks, sums, lists, kv_heads, pages, share, capacity,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    AGAIN: tl.constexpr, KEYS: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a unit of a chunk: the keys of a group, or the mean of a group, of a node or of the chunk.

    Args:
        sums: `[kv_heads, pages, rows of a page, WIDTH]` gradients of keys and values, side by side.
        AGAIN: Whether other slabs have stored sums before.
        KEYS, MEANS: Number of parts of groups, and of means, that are read at once.
    """
    UNITS: tl.constexpr = 2 * GROUPS + NODES + 1
    SIZE: tl.constexpr = CHUNK // GROUPS
    kv_head = tl.program_id(0) % kv_heads
    unit = tl.program_id(0) // kv_heads % UNITS
    number = tl.program_id(0) // (kv_heads * UNITS)
    at = chunks + number * 5
    page, num_readers, before = tl.load(at), tl.load(at + 3), tl.load(at + 4)
    num_lists = lists // kv_heads
    transposed += (before.to(tl.int64) * lists + kv_head * num_lists * num_readers) * UNITS
    lengths += (number * lists + kv_head * num_lists) * UNITS
    sums += (kv_head.to(tl.int64) * pages + page) * ((CHUNK + GROUPS + NODES + 1) * WIDTH)
    if unit < GROUPS:
        total = _add_parts(
            parts, transposed, lengths, num_readers, num_lists, share, capacity, unit, UNITS, SIZE, WIDTH, PADDED, KEYS
        )
        _store_sums(sums + unit * (SIZE * WIDTH), total, AGAIN, SIZE, WIDTH, PADDED)
    else:
        mean = _add_parts(
            parts, transposed, lengths, num_readers, num_lists, share, capacity, unit, UNITS, 1, WIDTH, PADDED, MEANS
        )
        _store_sums(sums + (CHUNK - GROUPS + unit) * WIDTH, mean, AGAIN, 1, WIDTH, PADDED)


@triton.jit
def _passed_down(
    sums, row, stride, slot, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Return the gradients `[keys, PADDED]` of the keys at some slots of a page, with their shares of those of the means.

    Args:
        sums: Gradients of rows, `stride` numbers apart.
        row: First row of the page.
        slot: Index of each key in the page.
    """
    SIZE: tl.constexpr = CHUNK // GROUPS
    NODE: tl.constexpr = CHUNK // NODES
    total = load_rows(sums, row + slot, stride, WIDTH, PADDED).to(tl.float32)
    total += load_rows(sums, row + CHUNK + slot // SIZE, stride, WIDTH, PADDED).to(tl.float32) / SIZE
    total += load_rows(sums, row + CHUNK + GROUPS + slot // NODE, stride, WIDTH, PADDED).to(tl.float32) / NODE
    return (
        total + load_rows(sums, row + CHUNK + GROUPS + NODES + 0 * slot, stride, WIDTH, PADDED).to(tl.float32) / CHUNK
    )


@triton.jit
def finish(
    q, k, v, d_out, lse, deltas, blocks, tiles, order, k_sums, v_sums, d_k, d_v,
    heads, kv_heads, pages, k_stride, v_stride, q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, unit,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, WINDOWS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, PAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a block of keys and values.

    Args:
        k_sums, v_sums: Gradients of the rows of pages, which are `k_stride` and `v_stride` numbers apart.
        PAGES: Whether there are such gradients to pass down.
        EXACT: Whether tiles see the keys exactly.
    """
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    at = blocks + tl.program_id(0) // kv_heads * 6
    first_key, num_keys, page, index = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    key = tl.arange(0, BLOCK)
    near = tl.minimum(key, num_keys - 1)
    d_key = tl.zeros([BLOCK, DIM], tl.float32)
    d_value = tl.zeros([BLOCK, DV], tl.float32)
    if PAGES:
        if page >= 0:
            slot = index + near
            row = kv_head * pages + page
            if not WINDOWS:
                slots = tl.arange(0, CHUNK)
                keys = tl.load(order + row * CHUNK + slots).to(tl.int32)
                slot = tl.sum(tl.where(keys[None, :] == slot[:, None], slots[None, :], 0), 1)
            row *= CHUNK + GROUPS + NODES + 1
            d_key = _passed_down(k_sums, row, k_stride, slot, CHUNK, GROUPS, NODES, DIM, DIM)
            d_value = _passed_down(v_sums, row, v_stride, slot, CHUNK, GROUPS, NODES, VALUE_DIM, DV)
    if EXACT:
        first_tile, num_tiles = tl.load(at + 4), tl.load(at + 5)
        y = load_rows(k + first_key.to(tl.int64) * k_row + kv_head * k_head, near, k_row, DIM, DIM)
        z = load_rows(v + first_key.to(tl.int64) * v_row + kv_head * v_head, near, v_row, VALUE_DIM, DV)
        scale = unit * LOG2_E
        query = tl.arange(0, TILE)
        share = heads // kv_heads
        for step in range(num_tiles * share):
            at = tiles + (first_tile + step // share) * 4
            row, count, exact, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
            head = kv_head * share + step % share
            there = query < count
            limit = end + tl.minimum(query, count - 1) if CAUSAL else end + 0 * query
            is_seen = (
                (first_key + key >= exact)[:, None] & ((first_key + key)[:, None] < limit[None, :]) & there[None, :]
            )
            of_queries = (row + query).to(tl.int64) * heads + head
            x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, DIM)
            g = load_queries(d_out, row, count, head, d_row, d_head, TILE, VALUE_DIM, DV)
            sums = _row_sums(lse, of_queries, there) * LOG2_E
            logits = tl.dot(y, tl.trans(x), input_precision=PRECISION) * scale - sums[None, :]
            weights = tl.where(is_seen, tl.exp2(logits), 0.0)
            d_logits = _d_logits(weights, z, g, _row_sums(deltas, of_queries, there), PRECISION)
            d_key += tl.dot(d_logits.to(x.dtype), x, input_precision=PRECISION) * unit
            d_value = tl.dot(weights.to(g.dtype), g, d_value, input_precision=PRECISION)
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    row = ((first_key + key).to(tl.int64) * kv_heads + kv_head)[:, None]
    is_key = (key < num_keys)[:, None]
    tl.store(d_k + row * DIM + column[None, :], d_key.to(d_k.dtype.element_ty), mask=is_key)
    is_value = is_key & (value_column[None, :] < VALUE_DIM)
    tl.store(d_v + row * VALUE_DIM + value_column[None, :], d_value.to(d_v.dtype.element_ty), mask=is_value)
