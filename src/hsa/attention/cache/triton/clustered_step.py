"""Kernels for a step of `ClusteredCache`: the attention of a few new tokens per sequence, without the host.

    score     store the new keys and values, attend to the chunk in progress, estimate all groups, and add up the masses of
              all nodes
    attend    add the groups that the tokens want to the open groups of the tile, attend to the open groups and to the pooled
              rows of the other keys, and merge all partial results
    close     cluster and pool the chunk that the tokens complete

Each sequence knows its own length on the device, so a step can be captured as a CUDA graph. The chunks of a sequence are
divided among programs: consecutive chunks among `SCORERS` in `score`, and one of each round of `SPLITS` chunks to each of
`SPLITS` in `attend`, as open groups are often in neighbouring chunks. New tokens may belong to two tiles: each launch is
for one of them, and a step of several tokens runs twice. Rows of a program of `score` are the heads of a key/value head
times the tokens, padded.

Both kernels store log-sums in `sums`, `[rows, SCORERS + 1 + SPLITS]`: those of the nodes of the `SCORERS` programs, that of
the chunk in progress, and those of the `SPLITS` programs. All but the last `SPLITS` make the normaliser of the bounds of
estimates. Partial outputs are in `outs`, `[rows, 1 + SPLITS]`: of the chunk in progress, and of the `SPLITS` programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.cache.clustered_rows import Layer, Rule
from hsa.attention.cache.interface import AttendOptions
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.triton.attend import add_values
from hsa.attention.clustered.triton.cluster import cluster_chunk, constants_of, start_of, unit_of
from hsa.attention.clustered.triton.lists import append_chunks, append_roots, pad_lists
from hsa.attention.clustered.triton.select import add_mass, estimates, load_groups
from hsa.attention.clustered.triton.tiles import interval_of, is_active, load_rows, of_members, rows_of_groups
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Launcher, Prepared, compiled_for, last_stride_1

PROGRAMS = 4096
"""Number of programs of a launch that a GPU needs to be busy."""
MOST_SPLITS = 64
"""Maximum number of programs of `attend` that share the chunks of a sequence and head."""
MOST_SCORERS = 64
"""Maximum number of programs of `score` that share the chunks of a sequence and key/value head."""
ROWS = 64
"""Maximum number of rows of keys and values that are read at once."""
OPENED_GROUPS, LISTED_GROUPS = 1024, 256
"""Maximum number of groups that are compared with their bounds at once, and whose rows are listed at once."""
ROTATION: tl.constexpr = tl.constexpr(37)
"""Number of splits by which each round of chunks is shifted against the one before."""
ESTIMATED_BYTES = 2**14
"""Maximum bytes of the means of groups that are estimated at once, if they had the type of the keys."""
SCORE = {"num_warps": 4, "num_stages": 3}
"""Launch options of `score`."""
WIDEST = 1024
"""Maximum bytes of a key and its value for which the loads of several steps fit the shared memory of small GPUs."""
ATTEND = {"num_warps": 2, "num_stages": 2, "maxnreg": 128}
"""Launch options of `attend`: small programs, so that many fit a multiprocessor."""
LOG2_E = math.log2(math.e)


@triton.jit
def _tile_of(lengths, sequence, tokens, LATER: tl.constexpr, TILE: tl.constexpr):
    """Return the tokens [first, end) of a step that belong to one tile, and the position of the first of them."""
    begin = tl.load(lengths + sequence) - tokens
    border = tl.minimum(TILE - begin % TILE, tokens)
    if LATER:
        return border, tokens, begin + border
    return 0 * border, border, begin


@triton.jit
def _rows(kv_head, share, tokens, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the token and the head of each row of a key/value head, and whether they exist."""
    row = tl.arange(0, HEADS * TOKENS)
    token, member = row % TOKENS, row // TOKENS
    return token, kv_head * share + member, (token < tokens) & (member < share)


@triton.jit
def _log_sum(top, mass):
    """Return the log-sum-exp of logits whose weights relative to `top` add up to `mass`; −∞ if there are none."""
    return tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))


@triton.jit
def _log_sum_of_parts(sums, entry, there, SCORERS: tl.constexpr, PADDED: tl.constexpr):
    """Return the log-sum-exp of the first `SCORERS` + 1 partial sums of every row."""
    part = tl.arange(0, PADDED)
    is_part = there[:, None] & (part <= SCORERS)[None, :]
    parts = tl.load(sums + entry[:, None] + part[None, :], mask=is_part, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(parts, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    return _log_sum(top, tl.sum(tl.exp2(parts - top[:, None]), 1))


@triton.jit
def score(
    q, k, v, k_pages, v_pages, scores, lengths, estimated, outs, sums, batch, capacity, heads, kv_heads, tokens,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, scale, weight,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr, LOG_NODE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr, SCORERS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the estimates of the groups of some chunks and the sum of the masses of their nodes.

    The last program of a sequence stores the new keys and values, attends to the chunk in progress, and stores the output
    and its sum of masses.
    """
    split = tl.program_id(0) % (SCORERS + 1)
    sequence = tl.program_id(0) // (SCORERS + 1) % batch
    kv_head = tl.program_id(0) // ((SCORERS + 1) * batch)
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, LATER, TILE)
    visible = position // CHUNK
    if (from_token == to_token) | (visible >= capacity):
        return
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    page = (kv_head * batch + sequence).to(tl.int64) * capacity
    token, head, there = _rows(kv_head, heads // kv_heads, to_token, HEADS, TOKENS)
    there = there & (token >= from_token)
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    at = q + sequence * q_batch + token * q_token + head * q_head
    x = tl.load(at[:, None] + column[None, :], mask=there[:, None], other=0.0)
    entry = (sequence * tokens + token) * heads + head
    top = tl.full([HEADS * TOKENS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS * TOKENS], tl.float32)
    if split < SCORERS:
        each = (visible + SCORERS - 1) // SCORERS
        first = tl.minimum(split * each, visible)
        groups = (tl.minimum(first + each, visible) - first) * GROUPS
        k_pages += (page + first) * (PAGE * DIM)
        scores += (page + first) * (GROUPS * PARTS * DIM)
        of_row = (((head * batch + sequence).to(tl.int64) * tokens + token) * capacity + first) * GROUPS
        z = x.to(scores.dtype.element_ty)
        SIZE: tl.constexpr = GROUPS // NODES
        LOGITS: tl.constexpr = HEADS * TOKENS * BLOCK_NODES
        tops = tl.full([LOGITS], float("-inf"), tl.float32)  # of each column: nothing is exchanged in the loop
        masses = tl.zeros([LOGITS], tl.float32)
        for begin in range(0, groups, BLOCK):
            mean, spread = load_groups(k_pages, scores, begin, groups, CHUNK, GROUPS, NODES, DIM, PARTS, SPREAD, BLOCK)
            node = begin // SIZE + tl.arange(0, BLOCK_NODES)
            end = tl.minimum(begin + BLOCK, groups) // SIZE
            row = tl.minimum(node, end - 1)
            y = load_rows(k_pages, row // NODES * PAGE + (CHUNK + GROUPS) + row % NODES, DIM, DIM, DIM)
            logit = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + LOG_NODE
            logit = tl.where((node < end)[None, :], logit, float("-inf"))
            tops, masses = add_mass(tl.reshape(logit, [LOGITS, 1]), tops, masses)
            group = begin + tl.arange(0, BLOCK)
            estimate = estimates(z, mean, spread, weight, PARTS, SPREAD, PRECISION, BLOCK)
            to_group = estimated + of_row[None, :] + group[:, None]
            tl.store(to_group, estimate, mask=(group < groups)[:, None] & there[None, :])
        top, mass = add_mass(tl.reshape(_log_sum(tops, masses), [HEADS * TOKENS, BLOCK_NODES]), top, mass)
    else:
        k_pages += (page + visible) * (PAGE * DIM)
        v_pages += (page + visible) * (PAGE * VALUE_DIM)
        last = position % CHUNK - from_token  # row of token 0
        new = tl.arange(0, TOKENS)
        is_new = (new >= from_token) & (new < to_token)
        from_k = k + sequence * k_batch + kv_head * k_head + new[:, None] * k_token + column[None, :]
        from_v = v + sequence * v_batch + kv_head * v_head + new[:, None] * v_token + value_column[None, :]
        is_value = is_new[:, None] & (value_column[None, :] < VALUE_DIM)
        to = (last + new)[:, None]
        tl.store(k_pages + to * DIM + column[None, :], tl.load(from_k, mask=is_new[:, None]), mask=is_new[:, None])
        tl.store(v_pages + to * VALUE_DIM + value_column[None, :], tl.load(from_v, mask=is_value), mask=is_value)
        tl.debug_barrier()
        total = tl.zeros([HEADS * TOKENS, DV], tl.float32)
        for begin in range(0, last + to_token, ROWS):
            key = begin + tl.arange(0, ROWS)
            row = tl.minimum(key, last + to_token - 1)
            logit = tl.dot(x, tl.trans(load_rows(k_pages, row, DIM, DIM, DIM)), input_precision=PRECISION)
            logit = tl.where(key[None, :] <= (last + token)[:, None], logit, float("-inf"))
            values = load_rows(v_pages, row, VALUE_DIM, VALUE_DIM, DV)
            top, mass, total = add_values(logit, values, top, mass, total, scale, PRECISION)
        to = outs + entry[:, None].to(tl.int64) * ((SPLITS + 1) * VALUE_DIM) + value_column[None, :]
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(to, total, mask=there[:, None] & (value_column[None, :] < VALUE_DIM))
    tl.store(sums + entry * (SCORERS + 1 + SPLITS) + split, _log_sum(top, mass), mask=there)


@triton.jit
def _wanted(
    estimated, sums, group, is_chunk, sequence, head, share, from_token, to_token, since, batch, capacity, heads, tokens,
    scale, log_threshold,
    MEMBERS: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, LOG_GROUP: tl.constexpr, SCORERS: tl.constexpr,
    SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return the first of the tokens that wants each group, for any of `share` heads; 255 if there is none.

    Args:
        group, is_chunk: Numbers `[chunks, groups]` of the groups, and whether the chunks exist.
        head: First of the heads.
        since: Row of `from_token` in its tile.
    """
    member = tl.arange(0, MEMBERS)
    there = member < share
    row = (head + member).to(tl.int64) * batch + sequence
    wanted = tl.full(group.shape, 255, tl.int32)
    for token in range(from_token, to_token):
        at = estimated + (row * tokens + token) * (capacity * GROUPS)
        is_there = there[:, None, None] & is_chunk[None, :, None]
        estimate = tl.load(at[:, None, None] + group[None, :, :], mask=is_there, other=float("-inf"))
        entry = ((sequence * tokens + token) * heads + head + member) * (SCORERS + 1 + SPLITS)
        total = _log_sum_of_parts(sums, entry, there, SCORERS, PADDED)
        bound = tl.where(there, (total + log_threshold - LOG_GROUP) / scale * UNIT, float("inf"))
        wants = tl.max((estimate >= bound[:, None, None]).to(tl.int32), 0)
        wanted = tl.minimum(wanted, tl.where(wants > 0, since + token - from_token, 255))
    return tl.where(group == 0, 0, wanted)  # the group of the first key


@triton.jit
def _opened(
    estimated, sums, first, chunk, is_chunk, sequence, head, share, from_token, to_token, position, batch, capacity, heads,
    tokens, scale, log_threshold,
    MEMBERS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, LOG_GROUP: tl.constexpr,
    SCORERS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return the numbers `[chunks, groups]` of the groups of chunks, their bytes, and these with what the tokens want.

    The bytes of a list may be stored before or after this: both give the same, as they are ignored where a tile starts.
    """
    group = chunk[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    old = tl.load(first + group, mask=is_chunk[:, None], other=255).to(tl.int32)
    wanted = _wanted(
        estimated, sums, group, is_chunk, sequence, head, share, from_token, to_token, position % TILE, batch, capacity,
        heads, tokens, scale, log_threshold, MEMBERS, GROUPS, UNIT, LOG_GROUP, SCORERS, SPLITS, PADDED
    )  # fmt: skip
    opened = tl.where(position % TILE == 0, wanted, tl.minimum(old, wanted))
    return group, old, tl.where(is_chunk[:, None], opened, 255)


@triton.jit
def attend(
    q, k_pages, v_pages, lengths, estimated, first, before, key_list, pooled_rows, pooled_kinds, bias, outs, sums, tickets,
    out, batch, capacity, heads, kv_heads, lists, tokens, q_batch, q_token, q_head, scale, log_threshold,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, SEVERAL: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, UNIT: tl.constexpr, BIASED: tl.constexpr, LOG_GROUP: tl.constexpr, LOG_NODE: tl.constexpr,
    LOG_CHUNK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    BUSY: tl.constexpr, SCORERS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Open the groups of some chunks that the tokens want, and attend to the rows of these chunks.

    The last program of a sequence and head merges the results of all.
    """
    head = tl.program_id(0) % heads  # heads with long lists are spread over the GPU
    sequence = tl.program_id(0) // heads % batch
    split = tl.program_id(0) // (heads * batch)
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, LATER, TILE)
    visible = position // CHUNK
    row = tl.arange(0, TOKENS)
    there = (row >= from_token) & (row < to_token)
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    x = tl.load(
        q + sequence * q_batch + head * q_head + row[:, None] * q_token + column[None, :],
        mask=there[:, None],
        other=0.0,
    )
    if from_token == to_token:
        return
    is_value = there[:, None] & (value_column[None, :] < VALUE_DIM)
    entry = (sequence * tokens + row) * heads + head
    to_out = out + entry.to(tl.int64)[:, None] * VALUE_DIM + value_column[None, :]
    if visible >= capacity:  # a replayed graph has gone beyond the memory of the cache
        tl.store(to_out, tl.full([TOKENS, DV], float("nan"), tl.float32).to(out.dtype.element_ty), mask=is_value)
        return
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    SIZE: tl.constexpr = CHUNK // GROUPS
    kv_head = head // (heads // kv_heads)
    page = (kv_head * batch + sequence).to(tl.int64) * capacity
    k_pages += page * (PAGE * DIM)
    v_pages += page * (PAGE * VALUE_DIM)

    # All heads of a shared list compute what it opens, and the first of them stores it. Chunks are distributed one by one,
    # because open groups are close to each other, and every round begins with another split, because texts have periods.
    share = heads // lists
    list_head = head // share * share
    of_list = (head // share * batch + sequence).to(tl.int64) * (capacity * GROUPS)
    first += of_list
    before += of_list
    most = (capacity + SPLITS - 1) // SPLITS
    own = ((head * batch + sequence) * SPLITS + split).to(tl.int64) * (most * (GROUPS + 1) + ROWS)
    key_list += own
    pooled_rows += own
    pooled_kinds += own
    busy = key_list + most * GROUPS + ROWS  # chunks with open groups
    num_busy = 0
    num_open = 0
    num_pooled = 0
    for begin in range(0, (visible + SPLITS - 1) // SPLITS, BLOCK):
        turn = begin + tl.arange(0, BLOCK)
        chunk = turn * SPLITS + (split + turn * ROTATION) % SPLITS
        is_chunk = chunk < visible
        group, old, opened = _opened(
            estimated, sums, first, chunk, is_chunk, sequence, list_head, share, from_token, to_token, position, batch,
            capacity, heads, tokens, scale, log_threshold, MEMBERS, TILE, GROUPS, UNIT, LOG_GROUP, SCORERS, SPLITS, PADDED
        )  # fmt: skip
        is_stored = is_chunk[:, None] & (head == list_head)
        if position % TILE == 0:
            tl.store(before + group, old.to(tl.uint8), mask=is_stored)
        tl.store(first + group, opened.to(tl.uint8), mask=is_stored)
        # Most chunks have no open group, and are one row.
        is_busy = tl.min(opened, 1) < 255
        is_root = is_chunk & (is_busy == 0)
        flags = is_busy.to(tl.int32) | (is_root.to(tl.int32) << 16)
        rank = tl.cumsum(flags, 0) - flags
        tl.store(busy + num_busy + (rank & 65535), chunk, mask=is_busy)
        num_pooled = append_roots(
            pooled_rows, pooled_kinds, chunk, is_root, num_pooled, rank >> 16, TILE, CHUNK, GROUPS, NODES, LOG_CHUNK
        )
        num_busy += tl.sum(is_busy.to(tl.int32), 0)
    tl.debug_barrier()
    for begin in range(0, num_busy, BUSY):
        slot = begin + tl.arange(0, BUSY)
        chunk = tl.load(busy + slot, mask=slot < num_busy, other=0)
        is_chunk = slot < num_busy
        _, _, opened = _opened(
            estimated, sums, first, chunk, is_chunk, sequence, list_head, share, from_token, to_token, position, batch,
            capacity, heads, tokens, scale, log_threshold, MEMBERS, TILE, GROUPS, UNIT, LOG_GROUP, SCORERS, SPLITS, PADDED
        )  # fmt: skip
        # Lists count queries from the first token on, so that they have no rows for earlier queries alone.
        opened = tl.where(opened < 255, tl.maximum(opened - position % TILE, 0), 255)
        num_open, num_pooled = append_chunks(
            opened, key_list, pooled_rows, pooled_kinds, first, chunk, is_chunk, 0, num_open, num_pooled,
            TILE, CHUNK, GROUPS, NODES, LOG_GROUP, LOG_NODE, LOG_CHUNK, BUSY, False
        )  # fmt: skip
    num_open, num_pooled = pad_lists(key_list, pooled_rows, pooled_kinds, num_open, num_pooled, 0, ENTRIES, ROWS)
    tl.debug_barrier()

    query = row - from_token
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    mass = tl.zeros([TOKENS], tl.float32)
    total = tl.zeros([TOKENS, DV], tl.float32)
    pooled_bias = tl.load(bias + head) if BIASED else 0.0
    # Entries are loaded one step ahead, because the addresses of keys and values depend on them.
    listed = tl.arange(0, ROWS)
    following, kind = tl.load(pooled_rows + listed), tl.load(pooled_kinds + listed)
    for begin in range(0, num_pooled, ROWS):
        rows = following
        log_count, since, active = interval_of(kind)
        if BIASED:
            log_count += pooled_bias
        ahead = tl.minimum(begin + ROWS, num_pooled - ROWS) + listed
        following, kind = tl.load(pooled_rows + ahead), tl.load(pooled_kinds + ahead)
        logit = tl.dot(x, tl.trans(load_rows(k_pages, rows, DIM, DIM, DIM)), input_precision=PRECISION)
        logit = logit * scale + tl.where(active > 0, log_count, float("-inf"))[None, :]  # −∞ for padding
        if SEVERAL:
            logit = tl.where(is_active(query[:, None], since[None, :], active[None, :]), logit, float("-inf"))
        values = load_rows(v_pages, rows, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = add_values(logit, values, top, mass, total, 1.0, PRECISION)
    which = tl.arange(0, ENTRIES)
    next_opened = tl.load(key_list + which)
    for begin in range(0, num_open, ENTRIES):
        opened = next_opened
        next_opened = tl.load(key_list + tl.minimum(begin + ENTRIES, num_open - ENTRIES) + which)
        keys, since = rows_of_groups(opened >> 8, SIZE, GROUPS, PAGE), of_members(opened & 255, SIZE)
        logit = tl.dot(x, tl.trans(load_rows(k_pages, keys, DIM, DIM, DIM)), input_precision=PRECISION)
        logit = tl.where(query[:, None] >= since[None, :], logit, float("-inf"))
        values = load_rows(v_pages, keys, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = add_values(logit, values, top, mass, total, scale, PRECISION)
    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    to = outs + (entry * (SPLITS + 1) + split + 1)[:, None].to(tl.int64) * VALUE_DIM + value_column[None, :]
    tl.store(to, total, mask=is_value)
    tl.store(sums + entry * (SCORERS + 1 + SPLITS) + SCORERS + 1 + split, _log_sum(top, mass), mask=there)

    # The last program of a sequence and head merges all results, in a fixed order.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + head * batch + sequence, 1)
    if ticket == SPLITS - 1:
        tl.store(tickets + head * batch + sequence, 0)
        part, is_column = tl.arange(0, SPLITS), value_column < VALUE_DIM
        for token in range(from_token, to_token):
            query_row = (sequence * tokens + token) * heads + head
            from_sums = sums + query_row * (SCORERS + 1 + SPLITS) + SCORERS
            from_outs = outs + query_row.to(tl.int64) * ((SPLITS + 1) * VALUE_DIM) + value_column
            # The result of `score`, and those of `attend`.
            near, shares = tl.load(from_sums), tl.load(from_sums + 1 + part, cache_modifier=".cg")
            near_value = tl.load(from_outs, mask=is_column, other=0.0)
            from_parts = from_outs[None, :] + (1 + part)[:, None] * VALUE_DIM
            values = tl.load(from_parts, mask=is_column[None, :], other=0.0, cache_modifier=".cg")
            largest = tl.maximum(tl.max(shares, 0), near)
            near, shares = tl.exp2(near - largest), tl.exp2(shares - largest)
            mean = (near * near_value + tl.sum(shares[:, None] * values, 0)) / (near + tl.sum(shares, 0))
            to_row = out + query_row.to(tl.int64) * VALUE_DIM + value_column
            tl.store(to_row, mean.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def close(
    k_pages, v_pages, scores, order, start, lengths, batch, capacity, tokens,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr,
    PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Cluster and pool the chunk that the tokens complete, if there is one, in place."""
    sequence = tl.program_id(0) % batch
    head = tl.program_id(0) // batch
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, LATER, TILE)
    end = position + to_token - from_token
    chunk = position // CHUNK
    if (from_token == to_token) | (end % CHUNK != 0) | (chunk >= capacity):
        return
    page = (head * batch + sequence).to(tl.int64) * capacity + chunk
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += page * (PAGE * DIM)
    v_pages += page * (PAGE * VALUE_DIM)
    cluster_chunk(
        k_pages, v_pages, DIM, VALUE_DIM, k_pages, v_pages, scores + page * (GROUPS * PARTS * DIM), order + page * CHUNK,
        start, CHUNK, GROUPS, NODES, DIM, VALUE_DIM, DV, WINDOWS, ITERATIONS, PARTS, UNIT
    )  # fmt: skip


_score, _attend, _close = Launcher(score), Launcher(attend), Launcher(close)


@dataclass(frozen=True)
class Step:
    """Whatever determines the compiled kernels of a step."""

    shape: Shape
    rule: Rule
    windows: bool
    batch: int
    capacity: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    scores: torch.dtype
    parts: int
    biased: bool
    strides: tuple[int, ...]  # of q, k and v, without those of the last dimension
    is_aligned: tuple[bool, ...]  # whether q, k, v and the bias start at multiples of 16 bytes

    @property
    def lists(self) -> int:
        """Number of lists of open groups."""
        return self.kv_heads if self.rule.share_lists else self.heads

    @property
    def scorers(self) -> int:
        """Number of programs of `score` that share the chunks of a sequence and key/value head."""
        return self._programs(MOST_SCORERS, self.kv_heads)

    @property
    def splits(self) -> int:
        """Number of programs of `attend` that share the chunks of a sequence and head."""
        return self._programs(MOST_SPLITS, self.heads)

    def _programs(self, most: int, heads: int) -> int:
        wanted = min(most, self.capacity, PROGRAMS // (self.batch * heads))
        return 1 << max(0, wanted.bit_length() - 1)

    def chunks_of(self, programs: int) -> int:
        """Return the maximum number of chunks of each of these programs."""
        return -(-self.capacity // programs)

    @property
    def width(self) -> int:
        """Number of bytes of a key and its value."""
        return (self.dim + padded(self.value_dim)) * self.dtype.itemsize

    @property
    def block(self) -> int:
        """Number of rows of keys and values that are read at once."""
        return ROWS if self.width <= WIDEST // 2 else ROWS // 2


class Launches(NamedTuple):
    """Prepared launches of a step, for the tokens of one tile."""

    score: Prepared
    attend: Prepared
    close: Prepared


@lru_cache(maxsize=256)
def launches(step: Step) -> tuple[Launches, ...]:
    """Return the launches for the first tile of a step and, if there are several tokens, for the next."""
    shape, tokens = step.shape, _power_of_2(step.tokens)
    tree = {"TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2]}
    rows = {"HEADS": max(padded(step.heads // step.kv_heads) // tokens, _power_of_2(step.heads // step.kv_heads))}
    values = {"DIM": step.dim, "VALUE_DIM": step.value_dim, "DV": padded(step.value_dim)}
    precision = {"PRECISION": "ieee" if step.dtype == torch.float32 else "tf32"}
    programs = {"SCORERS": step.scorers, "SPLITS": step.splits}
    log_node = {"LOG_NODE": math.log2(shape.node)}
    spread = step.rule.spread
    scores = {"PARTS": step.parts, "SPREAD": int(spread) if spread in (0.0, 1.0) else 2, **log_node}
    groups = _power_of_2(step.chunks_of(step.scorers)) * shape.groups
    groups = min(groups, ESTIMATED_BYTES // (step.dim * step.dtype.itemsize))
    scores |= {"ROWS": step.block, "BLOCK": groups, "BLOCK_NODES": max(8, groups * shape.group // shape.node)}
    members = _power_of_2(step.heads // step.lists)
    listing = {
        "LOG_GROUP": math.log2(shape.group),
        **log_node,
        "LOG_CHUNK": math.log2(shape.chunk),
        "ROWS": step.block,
        "ENTRIES": step.block // shape.group,
        "BLOCK": max(1, min(_power_of_2(step.chunks_of(step.splits)), OPENED_GROUPS // (shape.groups * members))),
        "BUSY": max(1, min(_power_of_2(step.chunks_of(step.splits)), LISTED_GROUPS // (shape.groups * members))),
        "PADDED": _power_of_2(step.scorers + 1),
    }
    selecting = {"MEMBERS": members, "UNIT": unit_of(step.scores)}
    sizes = (step.batch, step.capacity, step.heads, step.kv_heads, step.lists, step.tokens, *step.strides)
    key = step.dtype, step.scores, compiled_for(*sizes), step.is_aligned
    pipeline = {} if step.width <= WIDEST else {"num_stages": 1}
    result = []
    for later in (False, True) if step.tokens > 1 else (False,):
        common = {"LATER": later, **tree}
        score = {**common, **rows, "TOKENS": tokens, **values, **scores, **precision, **programs, **SCORE, **pipeline}
        attend = {
            **common,
            **selecting,
            "TOKENS": padded(tokens),
            "SEVERAL": tokens > 1,
            **values,
            "BIASED": step.biased,
            **listing,
        }
        close = constants_of(shape, step.dim, step.value_dim, step.windows, step.scores, step.parts)
        result.append(
            Launches(
                Prepared(_score, key, score),
                Prepared(_attend, key, {**attend, **precision, **programs, **ATTEND, **pipeline}),
                Prepared(_close, key, {"LATER": later, "TILE": shape.tile, **close}),
            )
        )
    return tuple(result)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Decode:
    """Steps of a `ClusteredCache`, for batches and capacities of one size.

    Args:
        shape: Sizes of the trees.
        rule: Rule by which queries select groups; it has a threshold.
        windows: Whether keys stay in their order.
    """

    def __init__(self, shape: Shape, rule: Rule, windows: bool):
        self.shape, self.rule, self.windows = shape, rule, windows
        self._memory: dict[tuple[int, ...], tuple[Tensor, ...]] = {}  # by the sizes of a step

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, options: AttendOptions) -> Tensor:
        """Store new tokens and return their attention `[batch, tokens, heads, value_dim]`.

        Args:
            layer: Tensors of a layer.
            q: `[batch, tokens, heads, dim]`.
            k, v: `[batch, tokens, kv_heads, dim]`.
            lengths: `[batch]` int32 number of tokens of every sequence, with the new ones.
        """
        q, k, v = (last_stride_1(x) for x in (q, k, v))
        scores, first, threshold = layer["scores"], layer["first"], self.rule.threshold
        assert threshold is not None
        bias = lengths if options.bias is None else (options.bias.float() * LOG2_E).expand(q.shape[2]).contiguous()
        step = Step(
            self.shape, self.rule, self.windows, len(q), first.shape[2], q.shape[1], q.shape[2], k.shape[2], q.shape[3],
            v.shape[3], q.dtype, scores.dtype, scores.shape[4], options.bias is not None,
            (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), tuple(x.data_ptr() % 16 == 0 for x in (q, k, v, bias)),
        )  # fmt: skip
        estimated, outs, sums, tickets, *listed = self._allocated(step, q.device)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        batch, kv_heads = step.batch, step.kv_heads
        sizes, of_q = (batch, step.capacity, step.heads, kv_heads), step.strides[:3]
        scale = options.scale * LOG2_E
        pages = layer["k"], layer["v"]
        order, start = layer.get("time", scores), start_of(step.dim, q.device)
        for run in launches(step):
            run.score(
                batch * kv_heads * (step.scorers + 1),
                (q, k, v, *pages, scores, lengths, estimated, outs, sums, *sizes, step.tokens, *step.strides, scale,
                 self.rule.spread),
            )  # fmt: skip
            run.attend(
                batch * step.heads * step.splits,
                (q, *pages, lengths, estimated, first, layer["before"], *listed, bias, outs, sums, tickets, out, *sizes,
                 step.lists, step.tokens, *of_q, scale, math.log2(threshold)),
            )  # fmt: skip
            run.close(batch * kv_heads, (*pages, scores, order, start, lengths, batch, step.capacity, step.tokens))
        return out

    @property
    def nbytes(self) -> int:
        """Number of bytes of its memory."""
        return sum(x.nbytes for tensors in self._memory.values() for x in tensors)

    def _allocated(self, step: Step, device: torch.device) -> tuple[Tensor, ...]:
        """Return memory for estimates, partial results, tickets and lists, which all layers share."""
        tokens = _power_of_2(step.tokens)
        key = step.batch, step.capacity, step.heads, step.value_dim, tokens
        if key not in self._memory:
            # Caches of other sizes are not used again, except for steps of one and of several tokens in turn.
            self._memory = {other: x for other, x in self._memory.items() if other[:-1] == key[:-1]}
            rows, splits = step.batch * step.heads * tokens, step.splits
            entries = step.chunks_of(splits) * (step.shape.groups + 1) + ROWS  # of a program
            with torch.inference_mode(False):
                self._memory[key] = (
                    torch.empty(rows, step.capacity * step.shape.groups, device=device),
                    torch.empty(rows, splits + 1, step.value_dim, device=device),
                    torch.empty(rows, step.scorers + 1 + splits, device=device),
                    torch.zeros(step.batch * step.heads, dtype=torch.int32, device=device),
                    *torch.empty(3, step.batch * step.heads * splits * entries, dtype=torch.int32, device=device),
                )
        return self._memory[key]
