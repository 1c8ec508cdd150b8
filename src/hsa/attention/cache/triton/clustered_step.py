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
from hsa.attention.cache.step_memory import StepMemory
from hsa.attention.clustered.keys import scored_dim
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.threshold import log_of
from hsa.attention.clustered.triton.attend import add_values
from hsa.attention.clustered.triton.cluster import choose_channels, cluster_chunk, constants_of, start_of, unit_of
from hsa.attention.clustered.triton.select import add_mass, estimates, load_scored
from hsa.attention.clustered.triton.tiles import load_rows
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Launcher, Prepared, compiled_for, last_stride_1

SCORE_PROGRAMS, ATTEND_PROGRAMS = 4096, 2048
"""Number of programs of a launch that a GPU needs to be busy."""
MOST_SPLITS = 64
"""Maximum number of programs of `attend` that share the chunks of a sequence and block of heads."""
MOST_SCORERS = 64
"""Maximum number of programs of `score` that share the chunks of a sequence and key/value head."""
MOST_QUERIES = 32
"""Maximum number of heads × tokens of a program of `attend`; each is a bit of a number."""
ROWS = 64
"""Maximum number of rows of keys and values that are read at once."""
OPENED = 2048
"""Maximum number of estimates that are compared with their bounds at once."""
MERGED = 4096
"""Maximum number of elements of partial results that are merged at once."""
ROTATION: tl.constexpr = tl.constexpr(37)
"""Number of splits by which each round of chunks is shifted against the one before."""
ESTIMATED_BYTES = 2**14
"""Maximum bytes of the means and spreads of groups that are estimated at once, if they had the type of the keys."""
SCORE = {"num_warps": 4, "num_stages": 3}
"""Launch options of `score`."""
WIDEST = 1024
"""Maximum bytes of a key and its value for which the loads of several steps fit the shared memory of small GPUs."""
ATTEND = {"num_warps": 4, "num_stages": 2}
"""Launch options of `attend`."""
LOG2_E = math.log2(math.e)


@triton.jit
def _tile_of(lengths, sequence, tokens, after, LATER: tl.constexpr, TILE: tl.constexpr):
    """Return the tokens [first, end) of a launch that belong to one tile, and the position of the first of them.

    Args:
        after: Number of tokens of the step after those of this launch.
    """
    begin = tl.load(lengths + sequence) - tokens - after
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
    q, k, v, k_pages, v_pages, scores, channels, lengths, estimated, outs, sums, batch, capacity, heads, kv_heads, tokens,
    after, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, scale, weight,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    CHANNELS: tl.constexpr, UNIT: tl.constexpr, SPREAD: tl.constexpr, LOG_NODE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, SCORERS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the estimates of the groups of some chunks and the sum of the masses of their nodes.

    The last program of a sequence stores the new keys and values, attends to the chunk in progress, and stores the output
    and its sum of masses.
    """
    split = tl.program_id(0) % (SCORERS + 1)
    sequence = tl.program_id(0) // (SCORERS + 1) % batch
    kv_head = tl.program_id(0) // ((SCORERS + 1) * batch)
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, after, LATER, TILE)
    visible = position // CHUNK
    if (from_token == to_token) | (visible >= capacity):
        return
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    page = (kv_head * batch + sequence).to(tl.int64) * capacity
    token, head, there = _rows(kv_head, heads // kv_heads, to_token, HEADS, TOKENS)
    there = there & (token >= from_token)
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    at = sequence * q_batch + token * q_token + head * q_head
    x = tl.load(q + at[:, None] + column[None, :], mask=there[:, None], other=0.0)
    entry = (sequence * tokens + token) * heads + head
    top = tl.full([HEADS * TOKENS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS * TOKENS], tl.float32)
    if split < SCORERS:
        each = (visible + SCORERS - 1) // SCORERS
        first = tl.minimum(split * each, visible)
        groups = (tl.minimum(first + each, visible) - first) * GROUPS
        k_pages += (page + first) * (PAGE * DIM)
        scores += (page + first) * (2 * GROUPS * CHANNELS)
        of_row = (((head * batch + sequence).to(tl.int64) * tokens + token) * capacity + first) * GROUPS
        z = load_scored(q, at, channels + page * CHANNELS, 1, there, CHANNELS).to(scores.dtype.element_ty)
        BLOCK: tl.constexpr = CHUNKS * GROUPS
        BLOCK_NODES: tl.constexpr = CHUNKS * NODES
        LOGITS: tl.constexpr = HEADS * TOKENS * BLOCK_NODES
        tops = tl.full([LOGITS], float("-inf"), tl.float32)  # of each column: nothing is exchanged in the loop
        masses = tl.zeros([LOGITS], tl.float32)
        for begin in range(0, groups, BLOCK):
            node, end = begin // GROUPS * NODES + tl.arange(0, BLOCK_NODES), groups // GROUPS * NODES
            row = tl.minimum(node, end - 1)
            y = load_rows(k_pages, row // NODES * PAGE + (CHUNK + GROUPS) + row % NODES, DIM, DIM, DIM)
            product = tl.dot(x, tl.trans(y), input_precision=PRECISION)
            logit = tl.where((node < end)[None, :], product * scale + LOG_NODE, float("-inf"))
            tops, masses = add_mass(tl.reshape(logit, [LOGITS, 1]), tops, masses)
            group = begin + tl.arange(0, BLOCK)
            of_chunk = tl.sum(tl.reshape(tl.trans(product), [CHUNKS, NODES, HEADS * TOKENS]), 1) * (UNIT / NODES)
            of_chunk = tl.broadcast_to(of_chunk[:, None, :], [CHUNKS, GROUPS, HEADS * TOKENS])
            estimate = estimates(z, scores, begin, groups, weight, CHANNELS, SPREAD, PRECISION, BLOCK)
            estimate += tl.reshape(of_chunk, [BLOCK, HEADS * TOKENS])
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
def _bits(opened, since, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Return `[n]` the rows for which something is open, as bits, from the queries `[lists, n]` that opened it."""
    bit = tl.reshape(1 << tl.arange(0, HEADS * TOKENS), [HEADS, TOKENS])
    bits = tl.where(opened[:, None, :] <= since[None, :, None], bit[:, :, None], 0)
    return tl.sum(tl.reshape(bits, [HEADS * TOKENS, opened.shape[1]]), 0)


@triton.jit
def _append(units, unit, is_listed, number):
    """Append units to a list, and return its length."""
    flags = is_listed.to(tl.int32)
    tl.store(units + number + tl.cumsum(flags, 0) - flags, unit, mask=is_listed)
    return number + tl.sum(flags, 0)


@triton.jit
def _chunk_of(turn, split, SPLITS: tl.constexpr):
    """Return the chunk that a program reads in its turn.

    Chunks are distributed one by one, because open groups are close to each other, and every round begins with another
    program, because texts have periods.
    """
    return turn * SPLITS + (split + turn * ROTATION) % SPLITS


@triton.jit
def attend(
    q, k_pages, v_pages, lengths, estimated, first, before, units, active, bias, outs, sums, tickets, out,
    batch, capacity, heads, kv_heads, tokens, after, q_batch, q_token, q_head, scale, log_threshold,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, WANTING: tl.constexpr,
    LISTS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr,
    BIASED: tl.constexpr, LOG_GROUP: tl.constexpr, LOG_NODE: tl.constexpr, LOG_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, SCORERS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, MERGED: tl.constexpr, PER_HEAD: tl.constexpr, EXACT_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Open the groups of some chunks that the tokens want, and attend to the rows of these chunks.

    A program has a block of up to `HEADS` heads of a key/value head. It reads pages in *units* of 8 rows: the keys of a
    group, the means of the groups of a node, or the means of nodes and of the chunk. A unit is listed if a row of it is
    active for any head and token; the bits of `active` tell for which. The last program of a sequence and block merges all
    results. With `PER_HEAD`, `log_threshold` has a number for every head.
    """
    block = tl.program_id(0) % (kv_heads * BLOCKS)  # heads with long lists are spread over the GPU
    sequence = tl.program_id(0) // (kv_heads * BLOCKS) % batch
    split = tl.program_id(0) // (kv_heads * BLOCKS * batch)
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, after, LATER, TILE)
    if from_token == to_token:
        return
    visible = position // CHUNK
    share, kv_head, first_member = heads // kv_heads, block // BLOCKS, block % BLOCKS * HEADS
    row = tl.arange(0, QUERIES)
    token, member = row % TOKENS, first_member + row // TOKENS
    there = (row < HEADS * TOKENS) & (member < share) & (token >= from_token) & (token < to_token)
    head = kv_head * share + member
    column, value_column = tl.arange(0, DIM), tl.arange(0, DV)
    is_value = there[:, None] & (value_column[None, :] < VALUE_DIM)
    entry = ((sequence * tokens + token) * heads + head).to(tl.int64)
    to_out = out + entry[:, None] * VALUE_DIM + value_column[None, :]
    if visible >= capacity:  # a replayed graph has gone beyond the memory of the cache
        tl.store(to_out, tl.full([QUERIES, DV], float("nan"), tl.float32).to(out.dtype.element_ty), mask=is_value)
        return
    at = q + sequence * q_batch + token * q_token + head * q_head
    x = tl.load(at[:, None] + column[None, :], mask=there[:, None], other=0.0)

    # The heads that open groups of the lists: those of this block or, if they share a list, all of the key/value head.
    IS_SHARED: tl.constexpr = LISTS < WANTING
    first_wanting = kv_head * share + (0 if IS_SHARED else first_member)
    num_wanting = share if IS_SHARED else tl.minimum(share - first_member, HEADS)
    wanting = tl.arange(0, WANTING * TOKENS)
    of_token, of_head = wanting % TOKENS, first_wanting + wanting // TOKENS
    wants = (wanting // TOKENS < num_wanting) & (of_token >= from_token) & (of_token < to_token)
    parts = ((sequence * tokens + of_token) * heads + of_head) * (SCORERS + 1 + SPLITS)
    bound = _log_sum_of_parts(sums, parts, wants, SCORERS, PADDED)
    threshold = tl.load(log_threshold + of_head, mask=wants, other=0.0) if PER_HEAD else log_threshold
    bound = (bound + threshold - LOG_GROUP) / scale
    bound = tl.where(visible < EXACT_CHUNKS, float("-inf"), bound * UNIT)  # at first, all groups are open
    bound = tl.where(wants, bound, float("inf"))
    estimated += ((of_head.to(tl.int64) * batch + sequence) * tokens + of_token)[:, None] * (capacity * GROUPS)
    since = position % TILE + tl.arange(0, TOKENS) - from_token  # rows of the tokens in their tile
    listed = tl.arange(0, LISTS)
    is_list = listed < (1 if IS_SHARED else num_wanting)
    of_list = ((kv_head if IS_SHARED else first_wanting) + listed).to(tl.int64) * batch + sequence
    of_list = of_list[:, None] * (capacity * GROUPS)

    SIZE: tl.constexpr = CHUNK // GROUPS
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    UNITS: tl.constexpr = (PAGE + SIZE - 1) // SIZE
    FLAGS: tl.constexpr = 2 * GROUPS + NODES + 1  # of the keys of groups, and of all means
    page = (kv_head * batch + sequence).to(tl.int64) * capacity
    k_pages += page * (PAGE * DIM)
    v_pages += page * (PAGE * VALUE_DIM)
    own = ((block * batch + sequence) * SPLITS + split).to(tl.int64) * ((capacity + SPLITS - 1) // SPLITS)
    units += own * UNITS
    active += own * FLAGS
    num_units = 0
    for begin in range(0, (visible + SPLITS - 1) // SPLITS, CHUNKS):
        number = tl.arange(0, CHUNKS * GROUPS)
        turn_of_group, inside = begin + number // GROUPS, number % GROUPS
        group = _chunk_of(turn_of_group, split, SPLITS) * GROUPS + inside
        is_group = group < visible * GROUPS
        estimate = tl.load(estimated + group[None, :], mask=wants[:, None] & is_group[None, :], other=float("-inf"))
        is_wanted = tl.reshape(estimate >= bound[:, None], [WANTING, TOKENS, CHUNKS * GROUPS])
        wanted = tl.min(tl.where(is_wanted, since[None, :, None], 255), 1)
        if IS_SHARED:
            wanted = tl.min(wanted, 0)[None, :]
        wanted = tl.where(group[None, :] == 0, 0, wanted)  # the group of the first key
        is_byte = is_list[:, None] & is_group[None, :]
        is_stored = is_byte
        if IS_SHARED:  # by the first block; the others may read the bytes before or after that, with the same result
            is_stored = is_byte & (first_member == 0)
        old = tl.load(first + of_list + group[None, :], mask=is_byte, other=255).to(tl.int32)
        if position % TILE == 0:
            tl.store(before + of_list + group[None, :], old.to(tl.uint8), mask=is_stored)
            old = tl.full([LISTS, CHUNKS * GROUPS], 255, tl.int32)
        opened = tl.where(is_byte, tl.minimum(old, wanted), 255)
        tl.store(first + of_list + group[None, :], opened.to(tl.uint8), mask=is_stored)

        # Rows of the pages that are active, and the units that have any.
        of_node = tl.min(tl.reshape(opened, [LISTS, CHUNKS * NODES, GROUPS // NODES]), 2)
        keys, nodes = _bits(opened, since, HEADS, TOKENS), _bits(of_node, since, HEADS, TOKENS)
        chunks = _bits(tl.min(tl.reshape(of_node, [LISTS, CHUNKS, NODES]), 2), since, HEADS, TOKENS)
        above = tl.reshape(tl.broadcast_to(nodes[:, None], [CHUNKS * NODES, GROUPS // NODES]), [CHUNKS * GROUPS])
        above_nodes = tl.reshape(tl.broadcast_to(chunks[:, None], [CHUNKS, NODES]), [CHUNKS * NODES])
        node, turn = tl.arange(0, CHUNKS * NODES), begin + tl.arange(0, CHUNKS)
        turn_of_node = begin + node // NODES
        is_node = _chunk_of(turn_of_node, split, SPLITS) < visible
        is_chunk = _chunk_of(turn, split, SPLITS) < visible
        tl.store(active + turn_of_group * FLAGS + inside, keys, mask=is_group)
        tl.store(active + turn_of_group * FLAGS + GROUPS + inside, above & ~keys, mask=is_group)
        tl.store(active + turn_of_node * FLAGS + 2 * GROUPS + node % NODES, above_nodes & ~nodes, mask=is_node)
        tl.store(active + turn * FLAGS + 2 * GROUPS + NODES, ~chunks, mask=is_chunk)
        num_units = _append(units, turn_of_group * UNITS + inside, is_group & (keys != 0), num_units)
        num_units = _append(units, turn_of_node * UNITS + GROUPS + node % NODES, is_node & (nodes != 0), num_units)
        for last in tl.static_range(GROUPS + NODES, UNITS):
            num_units = _append(units, turn * UNITS + last, is_chunk, num_units)
    tl.debug_barrier()

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, DV], tl.float32)
    pooled_bias = tl.load(bias + head, mask=there, other=0.0) if BIASED else 0.0 * mass
    slot, of_unit = tl.arange(0, ROWS) // SIZE, tl.arange(0, ROWS) % SIZE
    # Units are loaded one step ahead, because the addresses of keys and values depend on them.
    following = tl.load(units + slot, mask=slot < num_units, other=0)
    for begin in range(0, num_units, ROWS // SIZE):
        turn, inside = following // UNITS, following % UNITS
        ahead = begin + ROWS // SIZE + slot
        following = tl.load(units + ahead, mask=ahead < num_units, other=0)
        of_page = inside * SIZE + of_unit
        exists = (begin + slot < num_units) & (of_page < PAGE)
        mean = of_page - CHUNK  # number of a mean; negative for keys
        is_key = mean < 0
        flags = tl.load(active + turn * FLAGS + tl.where(is_key, inside, GROUPS + mean), mask=exists, other=0)
        rows = _chunk_of(turn, split, SPLITS) * PAGE + tl.minimum(of_page, PAGE - 1)
        log_count = tl.where(mean < GROUPS, LOG_GROUP, tl.where(mean < GROUPS + NODES, LOG_NODE, LOG_CHUNK))
        logit = tl.dot(x, tl.trans(load_rows(k_pages, rows, DIM, DIM, DIM)), input_precision=PRECISION)
        logit = logit * scale + tl.where(is_key, 0.0, log_count)[None, :]
        if BIASED:
            logit += tl.where(is_key[None, :], 0.0, pooled_bias[:, None])
        logit = tl.where((flags[None, :] >> row[:, None]) & 1 != 0, logit, float("-inf"))
        values = load_rows(v_pages, rows, VALUE_DIM, VALUE_DIM, DV)
        top, mass, total = add_values(logit, values, top, mass, total, 1.0, PRECISION)
    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    from_outs = outs + entry * ((SPLITS + 1) * VALUE_DIM)
    from_sums = sums + entry * (SCORERS + 1 + SPLITS) + SCORERS
    tl.store(from_outs[:, None] + (split + 1) * VALUE_DIM + value_column[None, :], total, mask=is_value)
    tl.store(from_sums + split + 1, _log_sum(top, mass), mask=there)

    # The last program merges the result of `score` and those of `attend`, in a fixed order.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + block * batch + sequence, 1)
    if ticket == SPLITS - 1:
        tl.store(tickets + block * batch + sequence, 0)
        of_near = tl.load(from_sums, mask=there, other=0.0)
        every = tl.arange(0, SPLITS)
        logs = tl.load(
            from_sums[:, None] + 1 + every[None, :], mask=there[:, None], other=float("-inf"), cache_modifier=".cg"
        )
        largest = tl.maximum(tl.max(logs, 1), of_near)
        near = tl.exp2(of_near - largest)
        whole = near + tl.sum(tl.exp2(logs - largest[:, None]), 1)
        result = near[:, None] * tl.load(from_outs[:, None] + value_column[None, :], mask=is_value, other=0.0)
        for begin_part in range(1, SPLITS + 1, MERGED):
            part = begin_part + tl.arange(0, MERGED)
            log = tl.load(
                from_sums[:, None] + part[None, :], mask=there[:, None], other=float("-inf"), cache_modifier=".cg"
            )
            from_part = from_outs[:, None, None] + part[None, :, None] * VALUE_DIM + value_column[None, None, :]
            of_part = tl.load(from_part, mask=is_value[:, None, :], other=0.0, cache_modifier=".cg")
            result += tl.sum(tl.exp2(log - largest[:, None])[:, :, None] * of_part, 1)
        tl.store(to_out, (result / whole[:, None]).to(out.dtype.element_ty), mask=is_value)


@triton.jit
def close(
    k_pages, v_pages, scores, channels, order, start, lengths, batch, capacity, tokens, after,
    LATER: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr,
    CHANNELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Cluster and pool the chunk that the tokens complete, if there is one, in place."""
    sequence = tl.program_id(0) % batch
    head = tl.program_id(0) // batch
    from_token, to_token, position = _tile_of(lengths, sequence, tokens, after, LATER, TILE)
    end = position + to_token - from_token
    chunk = position // CHUNK
    if (from_token == to_token) | (end % CHUNK != 0) | (chunk >= capacity):
        return
    page = (head * batch + sequence).to(tl.int64) * capacity + chunk
    PAGE: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += page * (PAGE * DIM)
    v_pages += page * (PAGE * VALUE_DIM)
    of_first = channels + (page - chunk) * CHANNELS
    if chunk == 0:
        choose_channels(k_pages, DIM, of_first, CHUNK, DIM, CHANNELS)
        tl.debug_barrier()
    cluster_chunk(
        k_pages, v_pages, DIM, VALUE_DIM, k_pages, v_pages, scores + page * (2 * GROUPS * CHANNELS),
        channels + page * CHANNELS, order + page * CHUNK, start, of_first, CHUNK, GROUPS, NODES, DIM, VALUE_DIM, DV, WINDOWS,
        ITERATIONS, CHANNELS, UNIT
    )  # fmt: skip


_score, _attend, _close = Launcher(score), Launcher(attend), Launcher(close)


@dataclass(frozen=True)
class Step:
    """Whatever determines the compiled kernels of a step."""

    shape: Shape
    spread: float
    share_lists: bool
    windows: bool
    per_head: bool  # whether every head has a threshold of its own
    batch: int
    capacity: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    scores: torch.dtype
    biased: bool
    strides: tuple[int, ...]  # of q, k and v, without those of the last dimension
    is_aligned: tuple[bool, ...]  # whether q, k, v and the bias start at multiples of 16 bytes

    @property
    def share(self) -> int:
        """Number of heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def block_heads(self) -> int:
        """Number of heads of a program of `attend`, rounded up to a power of two."""
        return min(_power_of_2(self.share), MOST_QUERIES // _power_of_2(self.tokens))

    @property
    def blocks(self) -> int:
        """Number of programs of `attend` that share the heads of a key/value head."""
        return -(-self.share // self.block_heads)

    @property
    def scorers(self) -> int:
        """Number of programs of `score` that share the chunks of a sequence and key/value head."""
        return self._programs(MOST_SCORERS, SCORE_PROGRAMS, self.kv_heads)

    @property
    def splits(self) -> int:
        """Number of programs of `attend` that share the chunks of a sequence and block of heads."""
        return self._programs(MOST_SPLITS, ATTEND_PROGRAMS, self.kv_heads * self.blocks)

    def _programs(self, most: int, programs: int, heads: int) -> int:
        wanted = min(most, self.capacity, programs // (self.batch * heads))
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
    shape, tokens, share = step.shape, _power_of_2(step.tokens), step.share
    tree = {"TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2]}
    values = {"DIM": step.dim, "VALUE_DIM": step.value_dim, "DV": padded(step.value_dim)}
    precision = "ieee" if step.dtype == torch.float32 else "tf32"
    common: dict[str, float | str] = {"PRECISION": precision, "ROWS": step.block, "TOKENS": tokens}
    common |= {**tree, **values, "SCORERS": step.scorers, "SPLITS": step.splits, "LOG_NODE": math.log2(shape.node)}
    channels = scored_dim(step.dim)
    of_chunk = 2 * shape.groups * channels * step.dtype.itemsize
    scored = max(
        min(_power_of_2(step.chunks_of(step.scorers)), ESTIMATED_BYTES // of_chunk), 8 // shape.branching[2], 1
    )
    scoring = {
        "HEADS": max(padded(share) // tokens, _power_of_2(share)),
        "CHANNELS": channels,
        "UNIT": unit_of(step.scores),
        "SPREAD": int(step.spread) if step.spread in (0.0, 1.0) else 2,
        "CHUNKS": scored,
    }
    wanting = _power_of_2(share) if step.share_lists else step.block_heads
    queries = padded(step.block_heads * tokens)
    chunks = max(1, min(_power_of_2(step.chunks_of(step.splits)), OPENED // (wanting * tokens * shape.groups)))
    attending = {
        "BLOCKS": step.blocks,
        "HEADS": step.block_heads,
        "QUERIES": queries,
        "WANTING": wanting,
        "LISTS": 1 if step.share_lists else wanting,
        "UNIT": unit_of(step.scores),
        "BIASED": step.biased,
        "LOG_GROUP": math.log2(shape.group),
        "LOG_CHUNK": math.log2(shape.chunk),
        "CHUNKS": chunks,
        "PADDED": _power_of_2(step.scorers + 1),
        "MERGED": max(1, min(step.splits, MERGED // (queries * padded(step.value_dim)))),
        "PER_HEAD": step.per_head,
        "EXACT_CHUNKS": shape.exact_chunks,
    }
    sizes = (step.batch, step.capacity, step.heads, step.kv_heads, step.tokens, *step.strides)
    key = step.dtype, step.scores, compiled_for(*sizes), step.is_aligned
    pipeline = {} if step.width <= WIDEST else {"num_stages": 1}
    closing = constants_of(shape, step.dim, step.value_dim, step.windows, step.scores)
    return tuple(
        Launches(
            Prepared(_score, key, {"LATER": later, **common, **scoring, **SCORE, **pipeline}),
            Prepared(_attend, key, {"LATER": later, **common, **attending, **ATTEND, **pipeline}),
            Prepared(_close, key, {"LATER": later, "TILE": shape.tile, **closing}),
        )
        for later in ((False, True) if step.tokens > 1 else (False,))
    )


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Decode:
    """Steps of a `ClusteredCache`, for batches and capacities of one size.

    Args:
        shape: Sizes of the trees.
        rule: Rule by which queries select groups; it has a threshold.
        windows: Whether keys stay in their order.
        memory: Memory for estimates, partial results, tickets and lists.
        device: Device of the cache.
    """

    def __init__(self, shape: Shape, rule: Rule, windows: bool, memory: StepMemory, device: torch.device):
        self.shape, self.rule, self.windows, self.memory = shape, rule, windows, memory
        assert rule.threshold is not None
        self._log_threshold = log_of(rule.threshold, torch.empty(0, dtype=torch.float32, device=device), math.log2)

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, options: AttendOptions) -> Tensor:
        """Store new tokens and return their attention `[batch, tokens, heads, value_dim]`.

        Args:
            layer: Tensors of a layer.
            q: `[batch, tokens, heads, dim]`.
            k, v: `[batch, tokens, kv_heads, dim]`.
            lengths: `[batch]` int32 number of tokens of every sequence, with the new ones.
        """
        q, k, v = (last_stride_1(x) for x in (q, k, v))
        tokens, most = q.shape[1], max(1, MOST_QUERIES // _power_of_2(q.shape[2] // k.shape[2]))
        pieces = [slice(begin, min(begin + most, tokens)) for begin in range(0, tokens, most)]
        out = [
            self._attend(layer, q[:, piece], k[:, piece], v[:, piece], lengths, tokens - piece.stop, options)
            for piece in pieces
        ]
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _attend(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, after: int, options: AttendOptions
    ) -> Tensor:
        """Attend with some of the new tokens; `after` is the number of those that follow."""
        scores, channels, first, rule = layer["scores"], layer["channels"], layer["first"], self.rule
        bias = lengths if options.bias is None else (options.bias.float() * LOG2_E).expand(q.shape[2]).contiguous()
        step = Step(
            self.shape, rule.spread, rule.share_lists, self.windows, isinstance(rule.threshold, tuple), len(q),
            first.shape[2], q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, scores.dtype,
            options.bias is not None, (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            tuple(x.data_ptr() % 16 == 0 for x in (q, k, v, bias)),
        )  # fmt: skip
        estimated, outs, sums, tickets, units, active = self._allocated(step, q.device)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        batch, kv_heads = step.batch, step.kv_heads
        sizes = batch, step.capacity, step.heads, kv_heads, step.tokens, after
        scale = options.scale * LOG2_E
        pages = layer["k"], layer["v"]
        order, start = layer.get("time", channels), start_of(step.dim, q.device)
        for run in launches(step):
            run.score(
                batch * kv_heads * (step.scorers + 1),
                (
                    q,
                    k,
                    v,
                    *pages,
                    scores,
                    channels,
                    lengths,
                    estimated,
                    outs,
                    sums,
                    *sizes,
                    *step.strides,
                    scale,
                    rule.spread,
                ),
            )
            run.attend(
                batch * kv_heads * step.blocks * step.splits,
                (q, *pages, lengths, estimated, first, layer["before"], units, active, bias, outs, sums, tickets, out,
                 *sizes, *step.strides[:3], scale, self._log_threshold),
            )  # fmt: skip
            run.close(
                batch * kv_heads,
                (*pages, scores, channels, order, start, lengths, batch, step.capacity, step.tokens, after),
            )
        return out

    def _allocated(self, step: Step, device: torch.device) -> tuple[Tensor, ...]:
        """Return memory for estimates, partial results, tickets and lists."""
        tokens = _power_of_2(step.tokens)

        def allocate() -> tuple[Tensor, ...]:
            rows, blocks, shape = step.batch * step.heads * tokens, step.batch * step.kv_heads * step.blocks, step.shape
            chunks = blocks * step.splits * step.chunks_of(step.splits)
            with torch.inference_mode(False):
                return (
                    torch.empty(rows, step.capacity * shape.groups, device=device),
                    torch.empty(rows, step.splits + 1, step.value_dim, device=device),
                    torch.empty(rows, step.scorers + 1 + step.splits, device=device),
                    torch.zeros(blocks, dtype=torch.int32, device=device),
                    torch.empty(chunks * -(-shape.page // shape.group), dtype=torch.int32, device=device),
                    torch.empty(chunks * (shape.page - shape.chunk + shape.groups), dtype=torch.int32, device=device),
                )

        sizes = step.batch, step.capacity, step.heads, step.kv_heads, step.value_dim, *step.shape.branching, tokens
        return self.memory.get(sizes, allocate)
