"""Kernels that select groups: a bound per query, and the first query of a tile that reaches it.

No matrix of scores is written: `select` keeps, per tile, list and group, one byte. A program has a *bundle* of tiles that
see the same chunks, so that it reads the scores of groups once for all of them. Scores are relative to the chunk of a group;
the product of each query with the mean of each chunk is a by-product of the bound.

Logits are in powers of two. Bounds and estimates leave out the scale and the size of a group, which all groups share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_queries, load_tile
from hsa.attention.kernels.triton import launch

INTERPRETED: tl.constexpr = tl.constexpr(launch.INTERPRETED)
LARGE: tl.constexpr = tl.constexpr(1e20)
"""Factor that makes any margin of an estimate larger than 1, so that clamping it to [0, 1] gives 0 or 1."""


@triton.jit
def _abs(x):
    """Return |x|, as a part of the instruction that uses it; `tl.abs` takes one of its own."""
    if INTERPRETED:
        return tl.abs(x)
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def add_mass(logit, top, mass):
    """Add logits to a running log-sum-exp."""
    new = tl.maximum(top, tl.max(logit, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    mass = mass * tl.exp2(top - base) + tl.sum(tl.exp2(logit - base[:, None]), 1)
    return new, mass


@triton.jit
def normalizers(
    q, k, k_pages, tiles, bounds, of_chunks,
    num_tiles, heads, kv_heads, pages, q_row, q_head, k_row, k_head, scale, log_threshold,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    CAUSAL: tl.constexpr, LOG_NODE: tl.constexpr, LOG_GROUP: tl.constexpr, PER_HEAD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: the log-sum-exp of exact keys and pooled nodes, plus the log of the threshold.

    Also store its products with the means of chunks, which are means of those with nodes, in `of_chunks`. With `PER_HEAD`,
    `log_threshold` has a number for every head.
    """
    head = tl.program_id(0) // num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, exact, end, _, before, _ = load_tile(tiles, tl.program_id(0) % num_tiles)
    if visible == 0:
        return
    query, column = tl.arange(0, TILE), tl.arange(0, DIM)
    x = load_queries(q, row, count, head, q_row, q_head, TILE, DIM, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    k += exact.to(tl.int64) * k_row + kv_head * k_head
    last = end - exact + (count - 1 if CAUSAL else 0)
    for begin in range(0, last, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        y = tl.load(k + tl.minimum(key, last - 1)[:, None] * k_row + column[None, :])
        logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        limit = tl.minimum(end - exact + query, last) if CAUSAL else last + 0 * query
        top, mass = add_mass(tl.where(key[None, :] < limit[:, None], logit, float("-inf")), top, mass)
    nodes = visible * NODES
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += (kv_head * pages + first_chunk) * (PAGE * DIM)
    of_chunks += (before.to(tl.int64) * heads + head * visible) * TILE
    for begin in range(0, nodes, BLOCK):
        node = begin + tl.arange(0, BLOCK)
        last_node = tl.minimum(node, nodes - 1)
        at = last_node // NODES * PAGE + (CHUNK + GROUPS) + last_node % NODES
        y = tl.load(k_pages + at[:, None] * DIM + column[None, :])
        product = tl.dot(x, tl.trans(y), input_precision=PRECISION)
        of_chunk = tl.sum(tl.reshape(product, [TILE, BLOCK // NODES, NODES]), 2) / NODES
        chunk = begin // NODES + tl.arange(0, BLOCK // NODES)
        tl.store(of_chunks + chunk[None, :] * TILE + query[:, None], of_chunk, mask=(chunk < visible)[None, :])
        logit = tl.where((node < nodes)[None, :], product * scale + LOG_NODE, float("-inf"))
        top, mass = add_mass(logit, top, mass)
    threshold = tl.load(log_threshold + head) if PER_HEAD else log_threshold
    bound = (top + tl.log2(mass) + threshold - LOG_GROUP) / scale
    tl.store(bounds + (row + query).to(tl.int64) * heads + head, bound, mask=query < count)


@triton.jit
def load_scored(x, row, channels, x_row, there, CHANNELS: tl.constexpr):
    """Return the scored channels of rows of queries; 0 for those that are not there."""
    channel = tl.load(channels + tl.arange(0, CHANNELS)).to(tl.int32)
    return tl.load(x + row[:, None] * x_row + channel[None, :], mask=there[:, None], other=0.0)


@triton.jit
def estimates(
    x, scores, begin, groups, weight,
    CHANNELS: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the estimates `[groups, queries]` of a block of groups, less those of their chunks, without scale and size.

    Groups are the rows of the product, so that a minimum over the queries stays inside a few threads.

    Args:
        x: Scored channels of the queries, in the type of the scores.
        scores: Scores of the first chunk.
        begin, groups: First group of the block, and number of all groups.
        weight: Weight of spreads, if it is neither 0 nor 1.
    """
    # Means and spreads of eight groups at a time, which are in the same threads after the product.
    row = tl.minimum(2 * begin + tl.arange(0, 2 * BLOCK), 2 * groups - 1)
    rows = tl.load(scores + row[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :])
    product = tl.dot(rows, tl.trans(x), input_precision=PRECISION)
    both = tl.permute(tl.reshape(product, [BLOCK // 8, 2, 8, x.shape[0]]), [0, 2, 3, 1])
    estimate, deviation = tl.split(tl.reshape(both, [BLOCK, x.shape[0], 2]))
    if SPREAD == 1:  # no product for the default weight
        estimate += _abs(deviation)
    elif SPREAD == 2:
        estimate += _abs(deviation) * weight
    return estimate


@triton.jit
def largest(
    q, scores, channels, tiles, bounds, of_chunks, num_tiles, heads, kv_heads, pages, q_row, q_head, number, weight,
    TILE: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, SPREAD: tl.constexpr,
    PRECISION: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store the bound of every query: its `number`-th largest estimate, or −∞ if there are fewer groups."""
    head = tl.program_id(0) // num_tiles
    kv_head = (head // (heads // kv_heads)).to(tl.int64)
    row, count, first_chunk, visible, _, _, _, before, _ = load_tile(tiles, tl.program_id(0) % num_tiles)
    if visible == 0:
        return
    query = tl.arange(0, TILE)
    rows = (row + query).to(tl.int64)
    page = kv_head * pages + first_chunk
    x = load_scored(q + head.to(tl.int64) * q_head, rows, channels + page * CHANNELS, q_row, query < count, CHANNELS)
    x = x.to(scores.dtype.element_ty)
    scores += page * (2 * GROUPS * CHANNELS)
    of_chunks += (before.to(tl.int64) * heads + head * visible) * TILE + query[None, :]
    groups = visible * GROUPS
    best = tl.full([TILE, KEPT], float("-inf"), tl.float32)
    for begin in range(0, groups, KEPT):
        estimate = estimates(x, scores, begin, groups, weight, CHANNELS, SPREAD, PRECISION, KEPT)
        group = (begin + tl.arange(0, KEPT))[:, None]
        of_chunk = tl.load(of_chunks + group // GROUPS * TILE, mask=group < groups, other=float("-inf"))
        estimate = estimate / UNIT + of_chunk
        estimate = tl.where(estimate == estimate, estimate, float("-inf"))  # NaN counts as −∞, as in a comparison
        best = tl.topk(tl.reshape(tl.join(best, tl.trans(estimate)), [TILE, 2 * KEPT]), KEPT)
    bound = tl.max(tl.where(tl.arange(0, KEPT)[None, :] == number - 1, best, float("-inf")), 1)
    bound = tl.where(
        bound == float("-inf"), bound, bound - 1e-5 - 1e-6 * tl.abs(bound)
    )  # `select` may round the same estimate otherwise
    tl.store(bounds + rows * heads + head, bound, mask=query < count)


@triton.jit
def select(
    q, scores, channels, tiles, bundles, bounds, of_chunks, first,
    num_bundles, heads, kv_heads, lists, pages, q_row, q_head, weight,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    UNIT: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first query of each tile of a bundle for which each group is open; 255 if there is none."""
    listed = tl.program_id(0) // num_bundles
    bundle = tl.program_id(0) % num_bundles
    number, members = tl.load(bundles + bundle * 2), tl.load(bundles + bundle * 2 + 1)
    _, _, first_chunk, visible, _, _, offset, _, _ = load_tile(tiles, number)
    groups = visible * GROUPS
    share = heads // lists
    page = (listed * share // (heads // kv_heads)).to(tl.int64) * pages + first_chunk
    scores += page * (2 * GROUPS * CHANNELS)
    channels += page * CHANNELS
    first += (offset.to(tl.int64) * lists + listed * visible) * GROUPS
    slot = tl.arange(0, TILES * TILE)
    # Queries are in an order in which each thread has 16 consecutive ones, if a tile has 64.
    SEGMENTS: tl.constexpr = TILE // 16
    within = slot // 2 % SEGMENTS * 16 + slot % TILE // (2 * SEGMENTS) * 2 + slot % 2
    at = tiles + (number + tl.minimum(slot // TILE, members - 1)) * 9
    there = (within < tl.load(at + 1)) & (slot // TILE < members)
    rows = (tl.load(at) + within).to(tl.int64)
    before = tl.load(at + 7).to(tl.int64) * heads
    tile = tl.arange(0, TILES)
    for member in range(share):
        head = listed * share + member
        x = load_scored(q + head.to(tl.int64) * q_head, rows, channels, q_row, there, CHANNELS)
        x = x.to(scores.dtype.element_ty)
        # Whether a query wants a group is computed as 0 or 1 with products and sums, for which GPUs have most units, and 16
        # queries are collected as the bits of a number.
        bound = tl.load(bounds + rows * heads + head, mask=there, other=float("inf")) * -(UNIT * LARGE)
        of_chunk = of_chunks + (before + head * visible) * TILE + within
        bit = (1 << (within % 16)).to(tl.float32)
        for begin in range(0, groups, BLOCK):
            least = tl.load(of_chunk + begin // GROUPS * TILE, mask=there, other=0.0) * (UNIT * LARGE) + bound
            estimate = estimates(x, scores, begin, groups, weight, CHANNELS, SPREAD, PRECISION, BLOCK)
            wants = tl.minimum(tl.maximum(estimate * LARGE + least[None, :], 0.0), 1.0)
            bits = tl.reshape(wants * bit[None, :], [BLOCK, TILES, 8, SEGMENTS, 2])
            bits = tl.sum(tl.reshape(tl.permute(bits, [0, 1, 3, 2, 4]), [BLOCK, TILES, SEGMENTS, 16]), 3).to(tl.int32)
            lowest = ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent
            since = tl.arange(0, SEGMENTS)[None, None, :] * 16 + lowest if CAUSAL else 0 * lowest
            opened = tl.min(tl.where(bits > 0, since, 255), 2)
            group = begin + tl.arange(0, BLOCK)
            opened = tl.where(group[:, None] == 0, 0, opened)
            to = first + tile[None, :] * (lists * groups) + group[:, None]
            listable = (group < groups)[:, None] & (tile < members)[None, :]
            if member > 0:
                opened = tl.minimum(opened, tl.load(to, mask=listable, other=255).to(tl.int32))
            tl.store(to, opened.to(tl.uint8), mask=listable)
