"""Kernel of the beam search for the best leaf families, as defined in `hsa.attention.multiscale.select`.

One program per group of queries and head descends from the first candidates to leaf families. Rows, scores and ranks stay
in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Operator, last_stride_1
from hsa.attention.multiscale.triton.ranking import (
    END_LEAF,
    FIRST_CHILD,
    FIRST_FAMILY,
    FOOT,
    LOG2_E,
    NONE,
    OWN_SLOT,
    SLOTS,
    SearchTables,
    _add_mass,
    _field,
    _is_near,
    _load_queries,
    _log_count,
    _log_mass,
    _logits,
    _merged,
    _number,
    _ordered_bits,
    _rank,
    empty_results,
    queries_at_once,
)

CANDIDATES = 512
"""Maximum number of candidates that a beam scores at once, if the next two limits allow it; more take several turns."""
KEY_BYTES = 2**16
"""Maximum bytes of candidate keys that a beam reads at once, for groups of several queries."""
LOGITS = 2**13
"""Maximum number of pairs of a query and a candidate that a beam scores at once."""


def num_parents(tables: SearchTables, width: int, near: bool) -> int:
    """Return the number of nodes to descend from at once: those kept, or the root and both paths to the near range."""
    at_start = 1 + 2 * tables.paths.shape[1] if near else 1
    return triton.next_power_of_2(max(width, at_start, 2))


def _search_beam(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    paths: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    near_low: Tensor | None,
    near_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    top_k: int,
    width: int,
    most_queries: int,
    parents: int,
    most_slots: int,
    first_root: int,
) -> tuple[Tensor, Tensor]:
    num_queries, heads, dim = q.shape
    groups = len(group_tree)
    selected, scored = empty_results(q, group_tree, top_k)
    if groups == 0 or num_queries == 0:
        return selected.fill_(-1), scored.zero_()
    q, keys, paths = last_stride_1(q), keys.contiguous(), paths.contiguous()
    single = most_queries <= 1
    block_m, block_d = queries_at_once(most_queries), padded(dim)
    key_bytes = block_d * q.element_size()
    most = CANDIDATES if single else min(CANDIDATES, KEY_BYTES // key_bytes, LOGITS // block_m)
    members = min(triton.next_power_of_2(most_slots), max(1, most // parents))
    members = max(members, 16 // parents)  # tensor cores need 16 candidates
    candidates = parents * members
    warps = candidates // 64 if single else max(candidates * key_bytes // 2**13, candidates * block_m // 2**11)
    one_turn = most_slots <= members and most_queries <= block_m
    mass = torch.empty(heads, 0 if single or one_turn else num_queries, dtype=torch.float32, device=q.device)
    _beam_kernel[(groups, heads)](
        q, keys, rows, paths, group_offsets, group_tree, near_low, near_high, limit, mass, selected, scored,
        q.stride(0), q.stride(1), keys.stride(0), paths.shape[1], num_queries, first_root, heads // len(keys),
        scale, width, top_k, HEAD_DIM=dim, BLOCK_D=block_d, BLOCK_M=block_m, PARENTS=parents, MEMBERS=members,
        SINGLE=single, ONE_TURN=one_turn, num_warps=max(1, min(8, warps)),
    )  # fmt: skip
    return selected, scored


def _fake(
    q: Tensor, keys: Tensor, rows: Tensor, paths: Tensor, group_offsets: Tensor, group_tree: Tensor, low: Tensor | None,
    high: Tensor | None, limit: Tensor | None, scale: float, top_k: int, *_: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_results(q, group_tree, top_k)


operator = Operator("search_beam", _search_beam, _fake)


@triton.jit
def _logits_of_one(q, keys, rows, row, exists, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the logits [candidates] of one query, without tensor cores."""
    STEP: tl.constexpr = min(BLOCK_D, 64)  # dimensions of the keys in registers at once
    product = tl.zeros(row.shape, tl.float32)
    for begin in tl.static_range(0, BLOCK_D, STEP):
        d = begin + tl.arange(0, STEP)
        query = tl.load(q + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        mask = exists[:, None] & (d < HEAD_DIM)
        key = tl.load(keys + row.to(tl.int64)[:, None] * HEAD_DIM + d, mask=mask, other=0.0)
        product += tl.sum(key.to(tl.float32) * query, 1)
    return product * (scale * LOG2_E) + _log_count(rows, row, exists)


@triton.jit
def _allowed(rows, row, exists, limit, query, valid):
    """Return whether queries may see candidates, [queries, candidates]."""
    allowed = valid[:, None] & exists[None, :]
    if limit is not None:
        seen = tl.load(limit + query, mask=valid, other=0)
        allowed = allowed & (_field(rows, row, END_LEAF, exists, 0)[None, :] <= seen[:, None])
    return allowed


@triton.jit
def _members(rows, parent, first, slots, own, past, low, high, at_start, PARENTS: tl.constexpr, MEMBERS: tl.constexpr):
    """Return the rows in the next slots of every parent, whether they are candidates, and whether the descent ends there."""
    slot = past + tl.arange(0, MEMBERS)[None, :]
    itself = slot == own[:, None]
    exists = tl.reshape(slot < slots[:, None], [PARENTS * MEMBERS])
    row = tl.reshape(tl.where(itself, parent[:, None], first[:, None] + slot), [PARENTS * MEMBERS])
    below = _field(rows, row, SLOTS, exists, 0)
    own_below = _field(rows, row, OWN_SLOT, exists, -1)
    settled = tl.reshape(itself, [PARENTS * MEMBERS]) | ((below == 1) & (own_below == 0))
    may_be_near = exists & at_start  # only members of the first parents can be near
    return row, exists & (below > 0) & ~(may_be_near & _is_near(rows, row, low, high, may_be_near)), settled


@triton.jit(do_not_specialize=["path_length", "num_queries", "first_root"])  # they differ from batch to batch
def _beam_kernel(
    q, keys, rows, paths, group_offsets, group_tree, near_low, near_high, limit, mass, selected, scored, q_row_stride,
    q_head_stride, keys_head_stride, path_length, num_queries, first_root, heads_per_key, scale, width, top_k,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PARENTS: tl.constexpr, MEMBERS: tl.constexpr,
    SINGLE: tl.constexpr,  # one query per group
    ONE_TURN: tl.constexpr,  # all candidates of a round fit at once, and all queries of a group
):  # fmt: skip
    """Search for one group in one head. A round that keeps all its candidates needs no scores."""
    group, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(group_offsets + group), tl.load(group_offsets + group + 1)
    q += head.to(tl.int64) * q_head_stride
    keys += (head // heads_per_key).to(tl.int64) * keys_head_stride
    mass += head.to(tl.int64) * num_queries

    # Start with the root and the nodes on the paths to both ends of the near range, without duplicates.
    slot = tl.arange(0, PARENTS)
    parent = tl.where(slot == 0, first_root + tl.load(group_tree + group).to(tl.int32), -1)
    low, high = 0, 0
    if near_low is not None:
        low, high = tl.load(near_low + group).to(tl.int32), tl.load(near_high + group).to(tl.int32)
        to_the_right = slot > path_length
        step = slot - 1 - tl.where(to_the_right, path_length, 0)
        on_path = (slot > 0) & (step < path_length) & (low < high)
        family = tl.where(to_the_right, high - 1, low).to(tl.int64)
        node = tl.load(paths + family * path_length + step, mask=on_path, other=-1)
        shared = _field(rows, node, FIRST_FAMILY, (node >= 0) & to_the_right, 0) <= low
        parent = tl.where(on_path & ~(to_the_right & shared), node, parent)
    kept = parent >= 0
    first = _field(rows, parent, FIRST_CHILD, kept, 0)
    slots = _field(rows, parent, SLOTS, kept, 0)
    own = tl.full([PARENTS], -1, tl.int32)  # none of them is a candidate itself

    query = begin + tl.arange(0, BLOCK_M)
    valid = query < end
    if SINGLE:
        q += begin * q_row_stride
        seen = 0
        if limit is not None:
            seen = tl.load(limit + begin, mask=begin < end, other=0)
    elif ONE_TURN:
        queries = _load_queries(q, query, valid, q_row_stride, HEAD_DIM, BLOCK_D)

    best = tl.full([PARENTS], NONE, tl.int64)
    pairs = 0
    at_start = True
    going = 1
    while going > 0:
        most = tl.max(slots)
        if not (SINGLE or ONE_TURN):  # the mass of every query over the candidates of all turns
            query = begin + tl.arange(0, BLOCK_M)
            while tl.min(query) < end:
                valid = query < end
                queries = _load_queries(q, query, valid, q_row_stride, HEAD_DIM, BLOCK_D)
                top = tl.full([BLOCK_M], -float("inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                past = 0
                while past < most:
                    row, exists, settled = _members(
                        rows, parent, first, slots, own, past, low, high, at_start, PARENTS, MEMBERS
                    )
                    allowed = _allowed(rows, row, exists, limit, query, valid)
                    logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                    top, total = _add_mass(top, total, logits)
                    past += MEMBERS
                tl.store(mass + query, _log_mass(top, total), mask=valid)
                query += BLOCK_M
            tl.debug_barrier()

        best = tl.full([PARENTS], NONE, tl.int64)
        going = 0
        past = 0
        while past < most:
            row, exists, settled = _members(
                rows, parent, first, slots, own, past, low, high, at_start, PARENTS, MEMBERS
            )
            going = tl.maximum(going, tl.max((exists & ~settled).to(tl.int32)))
            if SINGLE:
                exists = exists & (begin < end)
                if limit is not None:
                    exists = exists & (_field(rows, row, END_LEAF, exists, 0) <= seen)
                times = exists.to(tl.int32)
                bits = tl.zeros([PARENTS * MEMBERS], tl.int32)
                counts = (not ONE_TURN) | (tl.sum(times) > width) | (going == 0)
                if counts:
                    bits = _ordered_bits(_logits_of_one(q, keys, rows, row, exists, scale, HEAD_DIM, BLOCK_D))
            elif ONE_TURN:
                allowed = _allowed(rows, row, exists, limit, query, valid)
                times = tl.sum(allowed.to(tl.int32), 0)
                bits = tl.zeros([PARENTS * MEMBERS], tl.int32)
                counts = (tl.sum((times > 0).to(tl.int32)) > width) | (going == 0)
                if counts:
                    logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                    top = tl.max(logits, 1)
                    weights = tl.exp2(logits - tl.where(top > -float("inf"), top, 0.0)[:, None])
                    total = tl.sum(weights, 1)
                    each = 1 / tl.where(total > 0, total, 1.0)
                    bits = tl.sum(weights * each[:, None], 0).to(tl.int32, bitcast=True)
            else:
                counts = True
                score = tl.zeros([PARENTS * MEMBERS], tl.float32)
                times = tl.zeros([PARENTS * MEMBERS], tl.int32)
                query = begin + tl.arange(0, BLOCK_M)
                while tl.min(query) < end:
                    valid = query < end
                    queries = _load_queries(q, query, valid, q_row_stride, HEAD_DIM, BLOCK_D)
                    allowed = _allowed(rows, row, exists, limit, query, valid)
                    logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                    score += tl.sum(tl.exp2(logits - tl.load(mass + query, mask=valid, other=0.0)[:, None]), 0)
                    times += tl.sum(allowed.to(tl.int32), 0)
                    query += BLOCK_M
                bits = score.to(tl.int32, bitcast=True)
            pairs += tl.where(counts, tl.sum(times), 0)
            number = row * 2 + settled.to(tl.int32)
            rank = tl.where(times > 0, _rank(bits, number), NONE)
            # The order does not matter: allow a layout without the copies that sums over queries leave in each thread.
            rank = tl.reshape(rank, [PARENTS * MEMBERS], can_reorder=True)
            more = tl.topk(rank, PARENTS)
            best = more if ONE_TURN else _merged(best, more)
            past += MEMBERS
        if not (SINGLE or ONE_TURN):
            tl.debug_barrier()  # masses are read before the next round writes them

        # Descend: replace the best by their members.
        kept = (best > NONE) & (slot < width)
        parent = tl.where(kept, _number(best) >> 1, 0)
        settled_parent = (_number(best) & 1) == 1
        descends = kept & ~settled_parent
        first = _field(rows, parent, FIRST_CHILD, descends, 0)
        slots = tl.where(settled_parent & kept, 1, _field(rows, parent, SLOTS, descends, 0))
        own = tl.where(settled_parent, 0, _field(rows, parent, OWN_SLOT, descends, -1))
        at_start = False

    taken = best > NONE
    foot = _field(rows, tl.where(taken, _number(best) >> 1, 0), FOOT, taken, -1)
    target = group.to(tl.int64) * tl.num_programs(1) + head
    tl.store(selected + target * top_k + slot, foot, mask=slot < top_k)
    tl.store(scored + target, pairs)
