"""Kernels of the exact search for the best leaf families, as defined in `hsa.attention.multiscale.select`.

Programs read all candidates twice: once for the softmax of each query, and once for the scores of the groups. They keep the
best candidates in registers, so no groups × families matrix is ever in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Operator, last_stride_1
from hsa.attention.multiscale.triton.ranking import (
    END_FAMILY,
    END_LEAF,
    FIRST_FAMILY,
    LAST,
    NONE,
    QUERIES,
    _add_mass,
    _field,
    _load_queries,
    _log_mass,
    _logits,
    _merged,
    _number,
    _ordered_bits,
    _rank,
    empty_results,
    queries_at_once,
)

FAMILIES, RANKED_FAMILIES = 64, 32
"""Number of candidates per step without ranking, and with it (ranking takes registers)."""


def _search_exact(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    family_rows: Tensor,
    family_start: Tensor,
    tree_families: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    near_low: Tensor | None,
    near_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    top_k: int,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    num_queries, heads, dim = q.shape
    groups = len(group_tree)
    selected, scored = empty_results(q, group_tree, top_k)
    if groups == 0 or num_queries == 0:
        return selected.fill_(-1), scored.zero_()
    q, keys = last_stride_1(q), keys.contiguous()
    single, whole_groups = most_queries <= 1, most_queries <= QUERIES
    block_m = 1 if single else queries_at_once(most_queries)
    requests = _build_requests(
        group_offsets, tree_families[group_tree], tree_families[group_tree + 1], family_start, near_low, near_high, limit,
        block_m if whole_groups else 0, num_queries,
    )  # fmt: skip
    mass = torch.empty(heads, 0 if single else len(requests), dtype=torch.float32, device=q.device)
    tables = (q, keys, rows, family_rows, requests, mass)
    numbers = (q.stride(0), q.stride(1), keys.stride(0), len(requests), heads // len(keys), scale)
    options = {
        "HEAD_DIM": dim,
        "BLOCK_D": padded(dim),
        "IS_LIMITED": limit is not None,
        "HAS_NEAR": near_low is not None,
    }
    warps = 4 if q.element_size() == 2 else 8  # without tensor cores, the tiles need the registers of more threads
    if not single:
        _mass_kernel[(triton.cdiv(len(requests), QUERIES), heads)](
            *tables, *numbers, **options, BLOCK_M=QUERIES, BLOCK_N=FAMILIES, num_warps=warps
        )
    best = triton.next_power_of_2(max(top_k, 2))
    _select_kernel[(triton.cdiv(groups * block_m, QUERIES) if whole_groups else groups, heads)](
        *tables, group_offsets, selected, scored, *numbers, groups, top_k, **options,
        BLOCK_G=QUERIES // block_m, BLOCK_M=block_m, BLOCK_N=max(RANKED_FAMILIES, best), BEST=best,
        SINGLE=single, WHOLE_GROUPS=whole_groups, num_warps=warps,
    )  # fmt: skip
    return selected, scored


def _fake(
    q: Tensor, keys: Tensor, rows: Tensor, family_rows: Tensor, family_start: Tensor, tree_families: Tensor,
    group_offsets: Tensor, group_tree: Tensor, low: Tensor | None, high: Tensor | None, limit: Tensor | None,
    scale: float, top_k: int, *_: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_results(q, group_tree, top_k)


operator = Operator("search_exact", _search_exact, _fake)


def _build_requests(
    group_offsets: Tensor,
    begin: Tensor,
    end: Tensor,
    family_start: Tensor,
    near_low: Tensor | None,
    near_high: Tensor | None,
    limit: Tensor | None,
    per_group: int,
    num_queries: int,
) -> Tensor:
    """Return a table of requests `[lines, 6]`, int32: `per_group` lines per group, or one line per query if that is 0.

    The columns are the range of families to score (begin, end), which is empty for a line without a query; the near families
    to leave out (low, high); the limit; and the query. Families that start at the limit or later are not scored.
    """
    device = group_offsets.device
    groups = len(begin)
    if per_group:
        group = torch.arange(groups, device=device)[:, None].expand(-1, per_group).flatten()
        query = (group_offsets[:-1, None] + torch.arange(per_group, device=device)).flatten()
    else:
        query = torch.arange(num_queries, device=device)
        group = torch.searchsorted(group_offsets, query, right=True) - 1
    valid = query < group_offsets[group + 1]
    query = query.where(valid, 0)
    begin, end = begin[group], end[group]
    low = high = seen = torch.zeros_like(query)
    if near_low is not None and near_high is not None:
        low, high = near_low[group], near_high[group]
    if limit is not None:
        seen = limit[query]
        end = torch.minimum(end, torch.searchsorted(family_start, seen))
    begin, end = begin.where(valid, LAST.value), end.where(valid, 0)
    return torch.stack([begin, end, low, high, seen, query], -1).to(torch.int32)


@triton.jit
def _load_requests(requests, line, exists):
    """Return the columns of request lines: families to score (begin, end), near ones (low, high), limit, query."""
    requests += line.to(tl.int64) * 6
    begin, end = tl.load(requests, mask=exists, other=LAST), tl.load(requests + 1, mask=exists, other=0)
    low, high = tl.load(requests + 2, mask=exists, other=0), tl.load(requests + 3, mask=exists, other=0)
    return (
        begin,
        end,
        low,
        high,
        tl.load(requests + 4, mask=exists, other=0),
        tl.load(requests + 5, mask=exists, other=0),
    )


@triton.jit
def _is_candidate(
    rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED: tl.constexpr, HAS_NEAR: tl.constexpr
):
    """Return whether families are candidates of queries, [queries, families]."""
    allowed = (number[None, :] >= begin[:, None]) & (number[None, :] < end[:, None])
    if HAS_NEAR:
        first_family = _field(rows, row, FIRST_FAMILY, exists, 0)
        end_family = _field(rows, row, END_FAMILY, exists, 0)
        allowed = allowed & ((first_family[None, :] >= high[:, None]) | (end_family[None, :] <= low[:, None]))
    if IS_LIMITED:
        allowed = allowed & (_field(rows, row, END_LEAF, exists, 0)[None, :] <= seen[:, None])
    return allowed


@triton.jit
def _mass_kernel(
    q, keys, rows, family_rows, requests, mass, q_row_stride, q_head_stride, keys_head_stride, num_lines, heads_per_key,
    scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_LIMITED: tl.constexpr, HAS_NEAR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the log-mass of some queries over their candidates, in one head."""
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head_stride
    keys += (head // heads_per_key).to(tl.int64) * keys_head_stride
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = line < num_lines
    begin, end, low, high, seen, query = _load_requests(requests, line, valid)
    queries = _load_queries(q, query, valid, q_row_stride, HEAD_DIM, BLOCK_D)
    family, past_last = tl.min(begin), tl.max(end)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    while family < past_last:
        number = family + tl.arange(0, BLOCK_N)
        exists = number < past_last
        row = tl.load(family_rows + number, mask=exists, other=0)
        allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_NEAR)
        logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
        top, total = _add_mass(top, total, logits)
        family += BLOCK_N
    tl.store(mass + head.to(tl.int64) * num_lines + line, _log_mass(top, total), mask=valid)


@triton.jit
def _select_kernel(
    q, keys, rows, family_rows, requests, mass, group_offsets, selected, scored, q_row_stride, q_head_stride,
    keys_head_stride, num_lines, heads_per_key, scale, groups, top_k, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_LIMITED: tl.constexpr, HAS_NEAR: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BEST: tl.constexpr,
    SINGLE: tl.constexpr,  # one query per group
    WHOLE_GROUPS: tl.constexpr,  # every group has BLOCK_M lines; otherwise a program loops over the lines of one group
):  # fmt: skip
    """Store the best candidates of BLOCK_G groups in one head."""
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head_stride
    keys += (head // heads_per_key).to(tl.int64) * keys_head_stride
    mass += head.to(tl.int64) * num_lines
    first_line = tl.program_id(0) * BLOCK_G * BLOCK_M
    past_line = num_lines
    if not WHOLE_GROUPS:
        first_line = tl.load(group_offsets + tl.program_id(0)).to(tl.int32)
        past_line = tl.load(group_offsets + tl.program_id(0) + 1).to(tl.int32)
    line = first_line + tl.arange(0, BLOCK_G * BLOCK_M)
    begin, end, low, high, seen, query = _load_requests(requests, line, line < past_line)
    family, past_last = tl.min(begin), tl.max(end)
    if WHOLE_GROUPS:
        queries = _load_queries(q, query, line < past_line, q_row_stride, HEAD_DIM, BLOCK_D)
        if not SINGLE:
            log_mass = tl.load(mass + line, mask=line < past_line, other=0.0)
    else:
        while tl.min(line) < past_line:  # later queries may see more
            begin, end, low, high, seen, query = _load_requests(requests, line, line < past_line)
            past_last = tl.maximum(past_last, tl.max(end))
            line += BLOCK_M

    best = tl.full([BLOCK_G, BEST], NONE, tl.int64)
    pairs = tl.zeros([BLOCK_G], tl.int32)
    while family < past_last:
        number = family + tl.arange(0, BLOCK_N)
        exists = number < past_last
        row = tl.load(family_rows + number, mask=exists, other=0)
        if WHOLE_GROUPS:
            allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_NEAR)
            logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
            if SINGLE:
                bits, times = _ordered_bits(logits), allowed.to(tl.int32)
            else:
                score, times = _score(logits, log_mass, allowed, BLOCK_G, BLOCK_M, BLOCK_N)
                bits = score.to(tl.int32, bitcast=True)
        else:
            score = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
            times = tl.zeros([BLOCK_G, BLOCK_N], tl.int32)
            line = first_line + tl.arange(0, BLOCK_M)
            while tl.min(line) < past_line:
                valid = line < past_line
                begin, end, low, high, seen, query = _load_requests(requests, line, valid)
                queries = _load_queries(q, query, valid, q_row_stride, HEAD_DIM, BLOCK_D)
                log_mass = tl.load(mass + line, mask=valid, other=0.0)
                allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_NEAR)
                logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                more_score, more_times = _score(logits, log_mass, allowed, BLOCK_G, BLOCK_M, BLOCK_N)
                score += more_score
                times += more_times
                line += BLOCK_M
            bits = score.to(tl.int32, bitcast=True)
        pairs += tl.sum(times, 1)
        rank = tl.where(times > 0, _rank(bits, number[None, :]), NONE)  # [groups, families]
        better = tl.max(rank, 1) > tl.min(best, 1)
        if tl.max(better.to(tl.int32)) > 0:
            best = _merged(best, tl.topk(rank, BEST))
        family += BLOCK_N

    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    target = group.to(tl.int64) * tl.num_programs(1) + head
    taken = best > NONE
    row = tl.load(family_rows + tl.where(taken, _number(best), 0), mask=taken, other=-1)
    slot = tl.arange(0, BEST)[None, :]
    is_wanted = (group < groups)[:, None] & (slot < top_k)
    tl.store(selected + target[:, None] * top_k + slot, row, mask=is_wanted)
    tl.store(scored + target, pairs, mask=group < groups)


@triton.jit
def _score(logits, log_mass, allowed, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the softmax [groups, families] summed over the queries of a group, and the number of these queries."""
    weights = tl.where(allowed, tl.exp2(logits - log_mass[:, None]), 0.0)
    score = tl.sum(tl.reshape(weights, [BLOCK_G, BLOCK_M, BLOCK_N]), 1)
    return score, tl.sum(tl.reshape(allowed.to(tl.int32), [BLOCK_G, BLOCK_M, BLOCK_N]), 1)
