"""Kernel that turns a selection into two lists per tile and list, in a fixed order.

- keys: open groups, with the first query for which they are open;
- pooled: the means of groups, of nodes and of chunks that are active for some query, with their interval of queries.

Both are padded to whole steps of `attend`, with entries that are never active.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.clustered.triton.tiles import load_tile


@triton.jit
def _kind(since, end, LOG_COUNT: tl.constexpr):
    """Return as one integer: the logarithm of a count, of whose float 10 bits are enough, and an interval of queries."""
    log_count = tl.full([1], LOG_COUNT, tl.float32).to(tl.int32, bitcast=True)
    return tl.sum(log_count, 0) | (since << 8) | (end - since)


@triton.jit
def chunk_rows(opened, is_chunk, CHUNKS: tl.constexpr, NODES: tl.constexpr, GROUPS: tl.constexpr):
    """Return which rows of chunks are listed, given the first query `[chunks, groups]` for which groups are open.

    Returns:
        Whether each group is open, and listed as a mean, `[chunks, groups]`; whether each node is, `[chunks, nodes]`, and
        the root, `[chunks]`; then the first query of the node of each group, of each node and of each chunk.
    """
    SIZE: tl.constexpr = GROUPS // NODES
    of_node = tl.min(tl.reshape(opened, [CHUNKS, NODES, SIZE]), 2)
    of_chunk = tl.min(of_node, 1)
    since = tl.reshape(tl.broadcast_to(of_node[:, :, None], [CHUNKS, NODES, SIZE]), [CHUNKS, GROUPS])
    is_root = (of_chunk > 0) & is_chunk
    return opened < 255, since < opened, of_chunk[:, None] < of_node, is_root, since, of_node, of_chunk


@triton.jit
def append_roots(
    pooled_rows, pooled_kinds, chunk, is_root, num_pooled, rank,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, LOG_CHUNK: tl.constexpr,
):  # fmt: skip
    """Append the means of chunks that no query of the tile opens, given their ranks, and return the length of the list."""
    root = chunk * (CHUNK + GROUPS + NODES + 1) + (CHUNK + GROUPS + NODES)
    tl.store(pooled_rows + num_pooled + rank, root, mask=is_root)
    tl.store(pooled_kinds + num_pooled + rank, _kind(0 * root, TILE, LOG_CHUNK), mask=is_root)
    return num_pooled + tl.sum(is_root.to(tl.int32), 0)


@triton.jit
def append_chunks(
    opened, key_list, pooled_rows, pooled_kinds, prefixes, chunk, is_chunk, page, num_open, num_pooled,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, LOG_GROUP: tl.constexpr,
    LOG_NODE: tl.constexpr, LOG_CHUNK: tl.constexpr, BLOCK: tl.constexpr, PREFIXES: tl.constexpr,
):  # fmt: skip
    """Append the rows of `BLOCK` chunks to both lists, and return the lengths of the lists.

    Args:
        opened: First query `[BLOCK, groups]` for which each group is open; 255 if there is none, or no such chunk.
        prefixes: Memory for the lengths of both lists before each chunk, if `PREFIXES`.
        chunk, is_chunk: Numbers `[BLOCK]` of the chunks, and whether they exist.
        page: Page of chunk 0.
    """
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    node, inside = tl.arange(0, NODES), tl.arange(0, GROUPS)
    group = chunk[:, None] * GROUPS + inside[None, :]
    is_open, is_mean, is_node, is_root, since, of_node, of_chunk = chunk_rows(opened, is_chunk, BLOCK, NODES, GROUPS)
    # Both kinds of entries are counted together, in the halves of one integer.
    flags = is_open.to(tl.int32) | (is_mean.to(tl.int32) << 16)
    rank = tl.cumsum(flags, 1) - flags
    number_of, nodes = tl.sum(flags, 1), tl.sum(is_node.to(tl.int32), 1)
    means = number_of >> 16
    number_of += (nodes + is_root.to(tl.int32)) << 16
    rank_of = tl.cumsum(number_of, 0) - number_of
    total = tl.sum(number_of, 0)
    to_keys, to_pooled = num_open + (rank_of & 65535), num_pooled + (rank_of >> 16)
    if PREFIXES:
        tl.store(prefixes + chunk * 2, to_keys, mask=is_chunk)
        tl.store(prefixes + chunk * 2 + 1, to_pooled, mask=is_chunk)
    tl.store(key_list + to_keys[:, None] + (rank & 65535), (group << 8) | opened, mask=is_open)
    mean = (page + chunk) * PAGE + CHUNK  # row of the first mean
    at = to_pooled[:, None] + (rank >> 16)
    tl.store(pooled_rows + at, mean[:, None] + inside[None, :], mask=is_mean)
    tl.store(pooled_kinds + at, _kind(since, tl.minimum(opened, TILE), LOG_GROUP), mask=is_mean)
    at = (to_pooled + means)[:, None] + tl.cumsum(is_node.to(tl.int32), 1) - is_node.to(tl.int32)
    tl.store(pooled_rows + at, mean[:, None] + GROUPS + node[None, :], mask=is_node)
    tl.store(pooled_kinds + at, _kind(of_chunk[:, None], tl.minimum(of_node, TILE), LOG_NODE), mask=is_node)
    at = to_pooled + means + nodes
    tl.store(pooled_rows + at, mean + GROUPS + NODES, mask=is_root)
    tl.store(pooled_kinds + at, _kind(0, tl.minimum(of_chunk, TILE), LOG_CHUNK), mask=is_root)
    return num_open + (total & 65535), num_pooled + (total >> 16)


@triton.jit
def pad_lists(
    key_list, pooled_rows, pooled_kinds, num_open, num_pooled, row, ENTRIES: tl.constexpr, ROWS: tl.constexpr
):
    """Fill the last steps with groups that are never open, and with rows that are never active.

    Args:
        row: Any row of the pages.

    Returns:
        Lengths of both lists with their padding.
    """
    step = tl.arange(0, ROWS)
    more_open, more_pooled = (ENTRIES - num_open % ENTRIES) % ENTRIES, (ROWS - num_pooled % ROWS) % ROWS
    tl.store(key_list + num_open + step, 255 + 0 * step, mask=step < more_open)
    tl.store(pooled_rows + num_pooled + step, row + 0 * step, mask=step < more_pooled)
    tl.store(pooled_kinds + num_pooled + step, 0 * step, mask=step < more_pooled)
    return num_open + more_open, num_pooled + more_pooled


@triton.jit
def lower(
    first, tiles, key_list, pooled_rows, pooled_kinds, counts, prefixes, rows, num_tiles, lists,
    TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, ENTRIES: tl.constexpr,
    ROWS: tl.constexpr, LOG_GROUP: tl.constexpr, LOG_NODE: tl.constexpr, LOG_CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Store the lists of a tile, and their lengths: open groups, and pooled rows with their kinds.

    For gradients, also store the number of rows of the padded lists, and for every chunk the lengths of the lists before it.
    """
    listed = tl.program_id(0) // num_tiles
    number = tl.program_id(0) % num_tiles
    _, _, page, visible, _, _, of_selection, offset, tile = load_tile(tiles, number)
    first += (of_selection.to(tl.int64) * lists + listed * visible) * GROUPS
    base = offset.to(tl.int64) * lists + listed * visible
    padding = (number * lists + listed).to(tl.int64)
    prefixes += base * 2
    key_list += base * GROUPS + padding * ENTRIES
    # There are never more pooled rows than groups: of each node and chunk, a member opens at the same query.
    pooled_rows += base * GROUPS + padding * ROWS
    pooled_kinds += base * GROUPS + padding * ROWS
    num_open = 0
    num_pooled = 0
    for begin in range(0, visible, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        group = chunk[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        opened = tl.load(first + group, mask=(chunk < visible)[:, None], other=255).to(tl.int32)
        num_open, num_pooled = append_chunks(
            opened, key_list, pooled_rows, pooled_kinds, prefixes, chunk, chunk < visible, page, num_open, num_pooled,
            TILE, CHUNK, GROUPS, NODES, LOG_GROUP, LOG_NODE, LOG_CHUNK, BLOCK, GRADIENT
        )  # fmt: skip
    all_open, all_pooled = pad_lists(
        key_list, pooled_rows, pooled_kinds, num_open, num_pooled, page * (CHUNK + GROUPS + NODES + 1), ENTRIES, ROWS
    )
    counts += (tile * lists + listed) * 2
    tl.store(counts, num_open)
    tl.store(counts + 1, num_pooled)
    if GRADIENT:
        SIZE: tl.constexpr = CHUNK // GROUPS
        tl.store(rows + number * lists + listed, all_open * SIZE + all_pooled)
