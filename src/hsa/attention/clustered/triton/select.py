"""Kernels that select groups: a bound per query, the first query of a tile that reaches it, and lists of open rows.

No matrix of scores is written: `select` keeps, per tile, list and group, one byte. A program has a *bundle* of tiles that
see the same chunks, so that it reads the means and spreads of groups once for all of them. `lower` turns the bytes into two
lists per tile and list, in a fixed order:

- keys: open groups. Those that are open for all queries come first, as many as fill whole steps of `attend`; the others are
  listed from the end on, with the first query for which they are open, and padded;
- pooled: the means of groups, of nodes and of chunks that are active for some query, with their interval of queries.

Logits are in powers of two. Bounds and estimates leave out the scale and the size of a group, which all groups share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_queries, load_tile

LARGE: tl.constexpr = tl.constexpr(1e20)
"""Factor that makes any margin of an estimate larger than 1, so that clamping it to [0, 1] gives 0 or 1."""


@triton.jit
def _add(logit, top, mass):
    """Add logits to a running log-sum-exp."""
    new = tl.maximum(top, tl.max(logit, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    mass = mass * tl.exp2(top - base) + tl.sum(tl.exp2(logit - base[:, None]), 1)
    return new, mass


@triton.jit
def normalizers(
    q, k, k_table, tiles, bounds, num_tiles, heads, kv_heads, chunks, q_row, q_head, k_row, k_head, scale, log_threshold,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    CAUSAL: tl.constexpr, LOG_NODE: tl.constexpr, LOG_GROUP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: the log-sum-exp of exact keys and pooled nodes, plus the log of the threshold."""
    head = tl.program_id(0) // num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, exact, end, _, _ = load_tile(tiles, tl.program_id(0) % num_tiles)
    if visible == 0:
        return
    query, column = tl.arange(0, TILE), tl.arange(0, DIM)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    k += exact.to(tl.int64) * k_row + kv_head * k_head
    last = end - exact + (count - 1 if CAUSAL else 0)
    for begin in range(0, last, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        y = tl.load(k + tl.minimum(key, last - 1)[:, None] * k_row + column[None, :])
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        limit = tl.minimum(end - exact + query, last) if CAUSAL else last + 0 * query
        top, mass = _add(tl.where(key[None, :] < limit[:, None], logit, float("-inf")), top, mass)
    nodes = visible * NODES
    k_table += kv_head * (chunks * (CHUNK + GROUPS + NODES + 1)) * DIM
    k_table += (chunks * (CHUNK + GROUPS) + first_chunk * NODES).to(tl.int64) * DIM
    for begin in range(0, nodes, BLOCK):
        node = begin + tl.arange(0, BLOCK)
        y = tl.load(k_table + tl.minimum(node, nodes - 1)[:, None] * DIM + column[None, :])
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + LOG_NODE
        top, mass = _add(tl.where((node < nodes)[None, :], logit, float("-inf")), top, mass)
    bound = (top + tl.log2(mass) + log_threshold - LOG_GROUP) / scale
    tl.store(bounds + (row + query).to(tl.int64) * heads + head, bound, mask=query < count)


@triton.jit
def _estimates(
    x, means, spreads, begin, groups, weight,
    DIM: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return the estimates `[groups, queries]` of a block of groups, without scale and size.

    Groups are the rows of the product, so that a minimum over the queries stays inside a few threads.

    Args:
        TOGETHER: Whether `means` is a table of scores: means and spreads of eight groups at a time.
    """
    column = tl.arange(0, DIM)
    if TOGETHER:
        row = tl.minimum(2 * begin + tl.arange(0, 2 * BLOCK), 2 * groups - 1)
        y = tl.load(means + row[:, None] * DIM + column[None, :])
        both = tl.dot(y, tl.trans(x), input_precision=PRECISION)
        both = tl.permute(tl.reshape(both, [BLOCK // 8, 2, 8, x.shape[0]]), [0, 2, 3, 1])
        estimate, deviation = tl.split(tl.reshape(both, [BLOCK, x.shape[0], 2]))
    else:
        offsets = tl.minimum(begin + tl.arange(0, BLOCK), groups - 1)[:, None] * DIM + column[None, :]
        estimate = tl.dot(tl.load(means + offsets), tl.trans(x), input_precision=PRECISION)
        deviation = estimate
        if SPREAD != 0:
            deviation = tl.dot(tl.load(spreads + offsets), tl.trans(x), input_precision=PRECISION)
    if SPREAD == 1:  # no product for the default weight
        estimate += tl.abs(deviation)
    elif SPREAD == 2:
        estimate += tl.abs(deviation) * weight
    return estimate


@triton.jit
def largest(
    q, k_table, spread, tiles, bounds, num_tiles, heads, kv_heads, chunks, q_row, q_head, number, weight,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    SPREAD: tl.constexpr, PRECISION: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: its `number`-th largest estimate, or −∞ if there are fewer groups."""
    head = tl.program_id(0) // num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, _, _, _, _ = load_tile(tiles, tl.program_id(0) % num_tiles)
    if visible == 0:
        return
    query = tl.arange(0, TILE)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM)
    means = k_table + kv_head * (chunks * (CHUNK + GROUPS + NODES + 1)) * DIM
    means += (chunks * CHUNK + first_chunk * GROUPS).to(tl.int64) * DIM
    spreads = spread + (kv_head * chunks * GROUPS + first_chunk * GROUPS) * DIM
    best = tl.full([TILE, KEPT], float("-inf"), tl.float32)
    for begin in range(0, visible * GROUPS, KEPT):
        estimate = _estimates(x, means, spreads, begin, visible * GROUPS, weight, DIM, SPREAD, PRECISION, KEPT, False)
        there = begin + tl.arange(0, KEPT) < visible * GROUPS
        # NaN counts as −∞, as in a comparison.
        estimate = tl.where(there[:, None] & (estimate == estimate), estimate, float("-inf"))
        best = tl.topk(tl.reshape(tl.join(best, tl.trans(estimate)), [TILE, 2 * KEPT]), KEPT)
    bound = tl.max(tl.where(tl.arange(0, KEPT)[None, :] == number - 1, best, float("-inf")), 1)
    bound = tl.where(
        bound == float("-inf"), bound, bound - 1e-5 - 1e-6 * tl.abs(bound)
    )  # `select` may round the same estimate otherwise
    tl.store(bounds + (row + query).to(tl.int64) * heads + head, bound, mask=query < count)


@triton.jit
def select(
    q, means, spreads, tiles, bundles, bounds, first,
    num_bundles, heads, kv_heads, lists, mean_head, spread_head, q_row, q_head, weight, unit,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    CAUSAL: tl.constexpr, TOGETHER: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first query of each tile of a bundle for which each group is open; 255 if there is none."""
    listed = tl.program_id(0) // num_bundles
    bundle = tl.program_id(0) % num_bundles
    number, members = tl.load(bundles + bundle * 2), tl.load(bundles + bundle * 2 + 1)
    _, _, first_chunk, visible, _, _, offset, _ = load_tile(tiles, number)
    groups = visible * GROUPS
    share = heads // lists
    kv_head = (listed * share // (heads // kv_heads)).to(tl.int64)
    means += kv_head * mean_head + first_chunk.to(tl.int64) * (GROUPS * DIM * (2 if TOGETHER else 1))
    spreads += kv_head * spread_head + first_chunk.to(tl.int64) * GROUPS * DIM
    first += (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    slot = tl.arange(0, TILES * TILE)
    within = slot % TILE
    at = tiles + (number + tl.minimum(slot // TILE, members - 1)) * 8
    there = (within < tl.load(at + 1)) & (slot // TILE < members)
    rows = (tl.load(at) + within).to(tl.int64)
    column, tile = tl.arange(0, DIM), tl.arange(0, TILES)
    for member in range(share):
        head = listed * share + member
        of_head = q + head.to(tl.int64) * q_head
        x = tl.load(of_head + rows[:, None] * q_row + column[None, :], mask=there[:, None], other=0.0)
        x = x.to(means.dtype.element_ty)
        bound = tl.load(bounds + rows * heads + head, mask=there, other=float("inf")) * unit
        # Whether a query wants a group is computed as 0 or 1 with products and sums, for which GPUs have most units.
        least = bound * -LARGE
        since = (within if CAUSAL else 0 * within).to(tl.float32) - 255.0
        for begin in range(0, groups, BLOCK):
            estimate = _estimates(x, means, spreads, begin, groups, weight, DIM, SPREAD, PRECISION, BLOCK, TOGETHER)
            wants = tl.minimum(tl.maximum(estimate * LARGE + least[None, :], 0.0), 1.0)
            opened = tl.min(tl.reshape(wants * since[None, :] + 255.0, [BLOCK, TILES, TILE]), 2).to(tl.int32)
            group = begin + tl.arange(0, BLOCK)
            opened = tl.where(group[:, None] == 0, 0, opened)
            to = first + tile[None, :] * (lists * groups) + group[:, None]
            listable = (group < groups)[:, None] & (tile < members)[None, :]
            if member > 0:
                opened = tl.minimum(opened, tl.load(to, mask=listable, other=255).to(tl.int32))
            tl.store(to, opened.to(tl.uint8), mask=listable)


@triton.jit
def lower(
    first, tiles, key_list, pooled_list, counts, num_tiles, lists,
    TILE: tl.constexpr, LOG_TILE: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the lists of a tile, and the numbers of groups without and with a mask, and of pooled rows.

    An entry of a pooled row has its index among all groups, then all nodes, then all chunks that the tile sees, the first
    query for which it is active, and the number of these queries.
    """
    listed = tl.program_id(0) // num_tiles
    number = tl.program_id(0) % num_tiles
    _, _, _, visible, _, _, offset, before = load_tile(tiles, number)
    groups = visible * GROUPS
    base = (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    first += base
    key_list += base + (before * lists + listed).to(tl.int64) * ENTRIES
    pooled_list += base  # never more rows than groups: of each node and chunk, a member opens at the same query
    SIZE: tl.constexpr = GROUPS // NODES
    end = groups + ENTRIES - 1
    chunk, node, inside = tl.arange(0, BLOCK), tl.arange(0, NODES), tl.arange(0, GROUPS)
    num_whole = 0
    num_later = 0
    num_pooled = 0
    for begin in range(0, visible, BLOCK):
        group = (begin + chunk)[:, None] * GROUPS + inside[None, :]
        opened = tl.load(first + group, mask=group < groups, other=255).to(tl.int32)
        of_node = tl.min(tl.reshape(opened, [BLOCK, NODES, SIZE]), 2)  # [chunks, nodes]
        of_chunk = tl.min(of_node, 1)
        since = tl.reshape(tl.broadcast_to(of_node[:, :, None], [BLOCK, NODES, SIZE]), [BLOCK, GROUPS])
        is_whole, is_later, is_mean = opened == 0, (opened > 0) & (opened < 255), since < opened
        is_node, is_root = of_chunk[:, None] < of_node, (of_chunk > 0) & (begin + chunk < visible)

        # The three kinds of entries are counted together, in the bytes, then in ten bits each, of one integer.
        flags = is_whole.to(tl.int32) | (is_later.to(tl.int32) << 8) | (is_mean.to(tl.int32) << 16)
        rank = tl.cumsum(flags, 1) - flags
        number_of, nodes = tl.sum(flags, 1), tl.sum(is_node.to(tl.int32), 1)
        means = number_of >> 16
        number_of = (number_of & 255) | ((number_of >> 8 & 255) << 10)
        number_of |= (means + nodes + is_root.to(tl.int32)) << 20
        rank_of = tl.cumsum(number_of, 0) - number_of
        total = tl.sum(number_of, 0)
        at = num_whole + (rank_of & 1023)[:, None] + (rank & 255)
        tl.store(key_list + at, group << 8, mask=is_whole)
        at = num_later + (rank_of >> 10 & 1023)[:, None] + (rank >> 8 & 255)
        tl.store(key_list + end - at, (group << 8) | opened, mask=is_later)
        pooled = pooled_list + num_pooled + (rank_of >> 20)
        entry = (((group << LOG_TILE) | since) << (LOG_TILE + 1)) | (tl.minimum(opened, TILE) - since)
        tl.store(pooled[:, None] + (rank >> 16), entry, mask=is_mean)
        index = groups + (begin + chunk)[:, None] * NODES + node[None, :]
        entry = (((index << LOG_TILE) | of_chunk[:, None]) << (LOG_TILE + 1)) | (
            tl.minimum(of_node, TILE) - of_chunk[:, None]
        )
        rank = tl.cumsum(is_node.to(tl.int32), 1) - is_node.to(tl.int32)
        tl.store((pooled + means)[:, None] + rank, entry, mask=is_node)
        index = groups + visible * NODES + begin + chunk
        tl.store(pooled + means + nodes, (index << (2 * LOG_TILE + 1)) | tl.minimum(of_chunk, TILE), mask=is_root)
        num_whole += total & 1023
        num_later += total >> 10 & 1023
        num_pooled += total >> 20

    # Move the last groups that fill no whole step, and pad with groups that are never open.
    tl.debug_barrier()
    left = num_whole % ENTRIES
    step = tl.arange(0, ENTRIES)
    moved = tl.load(key_list + num_whole - left + step, mask=step < left, other=255)
    tl.debug_barrier()
    tl.store(key_list + end - num_later - step, moved, mask=step < left)
    num_later += left
    tl.store(key_list + end - num_later - step, 255 + 0 * step, mask=step < (ENTRIES - num_later % ENTRIES) % ENTRIES)
    counts += tl.program_id(0) * 4
    tl.store(counts, num_whole - left)
    tl.store(counts + 1, num_later)
    tl.store(counts + 2, num_pooled)
