"""The search for the leaf families worth opening, as kernels: what `_Search` in multiscale/choice.py does.

Beam: one program per group of queries and head descends from the pooled nodes of the group's list to leaf families; rows,
scores and ranks stay in registers. Exact: programs stream over all candidates, once for each query's softmax, once more for
the scores of the groups, and keep the best in registers, so that groups × families are never in memory.

Ranks are integers: the score's bits above, the candidate's number below, turned round, so that ties go to the lower number.
A query alone ranks by its logit, which needs no softmax.

In the numbering of leaf families by first leaf, those below one node are neighbours. So "contains a family of the open
range" is a comparison, and the list at the start hangs on the paths from the root to the two ends of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.triton.levels import Levels, levels
from hsa.hierarchy import Hierarchy

CANDIDATES = 512
"""Candidates that a beam scores at once, unless the next two allow less; with more it takes several turns."""
KEY_BYTES = 2**16
"""Of the keys of candidates that a beam scores at once, for several queries."""
LOGITS = 2**13
"""Pairs of query and candidate that a beam scores at once."""
QUERIES = 64
"""Queries that are scored at once."""
FAMILIES, RANKED_FAMILIES = 64, 32
"""Candidates of a step of the exact search: without ranking, and with it, which takes registers."""

NONE: tl.constexpr = tl.constexpr(-(2**63))
"""The rank of no candidate."""
LAST: tl.constexpr = tl.constexpr(2**31 - 1)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

FIELDS: tl.constexpr = tl.constexpr(8)
FIRST_CHILD: tl.constexpr = tl.constexpr(0)
SLOTS: tl.constexpr = tl.constexpr(1)
OWN_SLOT: tl.constexpr = tl.constexpr(2)
LOG_COUNT: tl.constexpr = tl.constexpr(3)
END_LEAF: tl.constexpr = tl.constexpr(4)
FIRST_FAMILY: tl.constexpr = tl.constexpr(5)
END_FAMILY: tl.constexpr = tl.constexpr(6)
FOOT: tl.constexpr = tl.constexpr(7)


@dataclass(frozen=True, eq=False)
class SearchTables:
    """What the searches need to know of a forest.

    rows: one line of fields per row of the plan. A row speaks for its node, wherever in the node's chain it stands:
        first_child: the first member; rows of members are consecutive.
        slots, own_slot: a node that is descended from gives its place to this many rows: its members, with itself in the
            slot of its first leaf member, if it has any (−1: none). A family of leaves only stays: one slot, its own.
            A leaf has no slot: it is no candidate.
        log_count: of the leaves below it, to base 2; the bits of a float32.
        end_leaf: where they end.
        first_family, end_family: the numbers of the leaf families at and below it.
        foot: the lowest row of its node.
    paths: [families, depth] the rows between each family (itself included) and its root (left out), −1 after them.
    """

    rows: Tensor  # [rows, 8] int32
    family_rows: Tensor  # [families] int32
    family_start: Tensor  # [families] int64: its first leaf; rising
    tree_families: Tensor  # [trees + 1] int64: the families of every tree
    paths: Tensor  # [families, depth] int32
    first_root: int  # roots are the last rows, tree by tree
    most_slots: int


def search_tables(hierarchy: Hierarchy) -> SearchTables | None:
    """The tables of a rooted forest, built once; None where there are no `levels`."""
    plan = levels(hierarchy)
    return None if plan is None else hierarchy.cached("search tables", lambda: _build(hierarchy, plan))


def _build(hierarchy: Hierarchy, plan: Levels) -> SearchTables:
    s = hierarchy.structure
    families = leaf_families(hierarchy)
    nodes = families.nodes.cpu().numpy()
    listed = np.flatnonzero(families.own >= 0)
    start = np.full(len(nodes), hierarchy.num_leaves)
    np.minimum.at(start, families.own[listed], listed)

    leaf_parent = s.parent[s.leaf_nodes]
    own_slot = np.full(len(s.parent), hierarchy.num_nodes)
    np.minimum.at(own_slot, leaf_parent, s.leaf_nodes - s.first_child[leaf_parent])
    own_slot = np.where(own_slot < hierarchy.num_nodes, own_slot, -1)
    slots = np.where(s.height == 1, 1, s.num_children)
    fields = [
        plan.first_child[plan.row_of_node],
        slots,
        own_slot,
        np.log2(s.leaf_count).astype(np.float32).view(np.int32),
        s.end_leaf,
        np.searchsorted(start, s.first_leaf),
        np.searchsorted(start, s.end_leaf),
        plan.row_of_node,
    ]

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(hierarchy.device)

    return SearchTables(
        rows=tensor(np.stack(fields, -1)[plan.node], np.int32),
        family_rows=tensor(plan.row_of_node[nodes], np.int32),
        family_start=tensor(start, np.int64),
        tree_families=tensor(families.tree_offsets, np.int64),
        paths=tensor(_paths(s.parent, plan.row_of_node, nodes), np.int32),
        first_root=plan.bounds[-2],
        most_slots=int(slots.max(initial=1)),
    )


def _paths(parent: np.ndarray, row_of_node: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    columns = []
    while (below_root := parent[nodes] >= 0).any():
        columns.append(np.where(below_root, row_of_node[nodes], -1))
        nodes = np.where(below_root, parent[nodes], nodes)
    return np.stack(columns, -1) if columns else np.empty((len(nodes), 0), np.int64)


def _parents(tables: SearchTables, width: int, near: bool) -> int:
    """Nodes that are descended from at once: those kept, or the root and the paths to both ends of the open range."""
    at_start = 1 + 2 * tables.paths.shape[1] if near else 1
    return triton.next_power_of_2(max(width, at_start, 2))


def search_beam(
    q: Tensor,
    keys: Tensor,
    tables: SearchTables,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    *,
    limit: Tensor | None,
    scale: float,
    refine: int,
    width: int,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    """Top down: rows of the best leaf families, best first, −1 after them; and how many products each search took.

    Args:
        q: [queries, heads, dim].
        keys: [kv_heads, rows, dim], the pyramid of the keys.
        group_offsets, group_tree: [groups + 1], [groups], as in `Queries`.
        open_low, open_high: [groups] the range of family numbers open from the start, (0, 0) for none; None: nowhere any.
        limit: [queries] candidates end before this leaf number; None: anywhere.
        refine, width: families to choose; candidates to keep on the way, at least as many.
        most_queries: of a group.

    Returns:
        [groups, heads, refine] int32; [groups, heads] int32.
    """
    near = open_low is not None
    return _search_beam(
        q,
        keys,
        tables.rows,
        tables.paths if near else tables.paths[:, :0],
        group_offsets,
        group_tree,
        open_low,
        open_high,
        limit,
        scale,
        refine,
        width,
        most_queries,
        _parents(tables, width, near),
        tables.most_slots,
        tables.first_root,
    )


@torch.library.custom_op("hsa::search_beam", mutates_args=())
def _search_beam(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    paths: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    refine: int,
    width: int,
    most_queries: int,
    parents: int,
    most_slots: int,
    first_root: int,
) -> tuple[Tensor, Tensor]:
    num_queries, heads, dim = q.shape
    groups = len(group_tree)
    chosen, scored = _empty_choice(q, group_tree, refine)
    if groups == 0 or num_queries == 0:
        return chosen.fill_(-1), scored.zero_()
    q, keys, paths = _last_stride_1(q), keys.contiguous(), paths.contiguous()
    single = most_queries <= 1
    block_m, block_d = _queries_at_once(most_queries), _padded(dim)
    key_bytes = block_d * q.element_size()
    most = CANDIDATES if single else min(CANDIDATES, KEY_BYTES // key_bytes, LOGITS // block_m)
    members = min(triton.next_power_of_2(most_slots), max(1, most // parents))
    members = max(members, 16 // parents)  # tensor cores want 16 candidates
    candidates = parents * members
    warps = candidates // 64 if single else max(candidates * key_bytes // 2**13, candidates * block_m // 2**11)
    one_turn = most_slots <= members and most_queries <= block_m
    mass = torch.empty(heads, 0 if single or one_turn else num_queries, dtype=torch.float32, device=q.device)
    _beam_kernel[(groups, heads)](
        q,
        keys,
        rows,
        paths,
        group_offsets,
        group_tree,
        open_low,
        open_high,
        limit,
        mass,
        chosen,
        scored,
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        paths.shape[1],
        num_queries,
        first_root,
        heads // len(keys),
        scale,
        width,
        refine,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        PARENTS=parents,
        MEMBERS=members,
        SINGLE=single,
        ONE_TURN=one_turn,
        num_warps=max(1, min(8, warps)),
    )
    return chosen, scored


@_search_beam.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    paths: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    refine: int,
    width: int,
    most_queries: int,
    parents: int,
    most_slots: int,
    first_root: int,
) -> tuple[Tensor, Tensor]:
    return _empty_choice(q, group_tree, refine)


def search_exact(
    q: Tensor,
    keys: Tensor,
    tables: SearchTables,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    *,
    limit: Tensor | None,
    scale: float,
    refine: int,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    """All candidates: the rest as for `search_beam`."""
    return _search_exact(
        q,
        keys,
        tables.rows,
        tables.family_rows,
        tables.family_start,
        tables.tree_families,
        group_offsets,
        group_tree,
        open_low,
        open_high,
        limit,
        scale,
        refine,
        most_queries,
    )


@torch.library.custom_op("hsa::search_exact", mutates_args=())
def _search_exact(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    family_rows: Tensor,
    family_start: Tensor,
    tree_families: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    refine: int,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    num_queries, heads, dim = q.shape
    groups = len(group_tree)
    chosen, scored = _empty_choice(q, group_tree, refine)
    if groups == 0 or num_queries == 0:
        return chosen.fill_(-1), scored.zero_()
    q, keys = _last_stride_1(q), keys.contiguous()
    single, whole_groups = most_queries <= 1, most_queries <= QUERIES
    block_m = 1 if single else _queries_at_once(most_queries)
    asks = _lines(
        group_offsets,
        tree_families[group_tree],
        tree_families[group_tree + 1],
        family_start,
        open_low,
        open_high,
        limit,
        block_m if whole_groups else 0,
        num_queries,
    )
    mass = torch.empty(heads, 0 if single else len(asks), dtype=torch.float32, device=q.device)
    tables = (q, keys, rows, family_rows, asks, mass)
    numbers = (q.stride(0), q.stride(1), keys.stride(0), len(asks), heads // len(keys), scale)
    options = {
        "HEAD_DIM": dim,
        "BLOCK_D": _padded(dim),
        "IS_LIMITED": limit is not None,
        "HAS_OPEN": open_low is not None,
    }
    warps = 4 if q.element_size() == 2 else 8  # without tensor cores more threads must hold the tiles
    if not single:
        _mass_kernel[(triton.cdiv(len(asks), QUERIES), heads)](
            *tables, *numbers, **options, BLOCK_M=QUERIES, BLOCK_N=FAMILIES, num_warps=warps
        )
    best = triton.next_power_of_2(max(refine, 2))
    _choose_kernel[(triton.cdiv(groups * block_m, QUERIES) if whole_groups else groups, heads)](
        *tables,
        group_offsets,
        chosen,
        scored,
        *numbers,
        groups,
        refine,
        **options,
        BLOCK_G=QUERIES // block_m,
        BLOCK_M=block_m,
        BLOCK_N=max(RANKED_FAMILIES, best),
        BEST=best,
        SINGLE=single,
        WHOLE_GROUPS=whole_groups,
        num_warps=warps,
    )
    return chosen, scored


def _lines(
    group_offsets: Tensor,
    begin: Tensor,
    end: Tensor,
    family_start: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    limit: Tensor | None,
    per_group: int,
    num_queries: int,
) -> Tensor:
    """[lines, 6] int32: who asks, for what. Every group has `per_group` lines; 0: every query has one.

    The families to look at (begin, end), none where a line has no query; those open (low, high); the limit; the query.
    Families that start at the limit or later fall away.
    """
    device = group_offsets.device
    groups = len(begin)
    if per_group:
        group = torch.arange(groups, device=device)[:, None].expand(-1, per_group).flatten()
        query = (group_offsets[:-1, None] + torch.arange(per_group, device=device)).flatten()
    else:
        query = torch.arange(num_queries, device=device)
        group = torch.searchsorted(group_offsets, query, right=True) - 1
    asked = query < group_offsets[group + 1]
    query = query.where(asked, 0)
    begin, end = begin[group], end[group]
    low = high = seen = torch.zeros_like(query)
    if open_low is not None and open_high is not None:
        low, high = open_low[group], open_high[group]
    if limit is not None:
        seen = limit[query]
        end = torch.minimum(end, torch.searchsorted(family_start, seen))
    begin, end = begin.where(asked, LAST.value), end.where(asked, 0)
    return torch.stack([begin, end, low, high, seen, query], -1).to(torch.int32)


@_search_exact.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    rows: Tensor,
    family_rows: Tensor,
    family_start: Tensor,
    tree_families: Tensor,
    group_offsets: Tensor,
    group_tree: Tensor,
    open_low: Tensor | None,
    open_high: Tensor | None,
    limit: Tensor | None,
    scale: float,
    refine: int,
    most_queries: int,
) -> tuple[Tensor, Tensor]:
    return _empty_choice(q, group_tree, refine)


def _empty_choice(q: Tensor, group_tree: Tensor, refine: int) -> tuple[Tensor, Tensor]:
    shape = (len(group_tree), q.shape[1])
    return q.new_empty(*shape, refine, dtype=torch.int32), q.new_empty(shape, dtype=torch.int32)


def _last_stride_1(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _queries_at_once(most_queries: int) -> int:
    return min(QUERIES, max(16, triton.next_power_of_2(most_queries)))


@triton.jit
def _field(rows, row, FIELD: tl.constexpr, mask, other):
    return tl.load(rows + row.to(tl.int64) * FIELDS + FIELD, mask=mask, other=other)


@triton.jit
def _log_count(rows, row, exists):
    return _field(rows, row, LOG_COUNT, exists, 0).to(tl.float32, bitcast=True)


@triton.jit
def _is_open(rows, row, low, high, mask):
    """Whether the families at and below a node meet the open range."""
    return (_field(rows, row, FIRST_FAMILY, mask, 0) < high) & (_field(rows, row, END_FAMILY, mask, 0) > low)


@triton.jit
def _rank(bits, number):
    """Ordered like `bits` (int32), then towards lower numbers."""
    return (bits.to(tl.int64) << 32) | (number ^ LAST).to(tl.int64)


@triton.jit
def _number(rank):
    return (rank & LAST).to(tl.int32) ^ LAST


@triton.jit
def _ordered_bits(x):
    """Integers that are ordered like the float32 they are made of."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LAST)


@triton.jit
def _merged(best, more):
    """The best of two lists that are sorted downwards along the last dimension, as many as each has."""
    both = tl.maximum(best, tl.flip(more, len(more.shape) - 1))
    return tl.sort(both, descending=True)


@triton.jit
def _load_queries(q, query, asked, q_row_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = asked[:, None] & (d < HEAD_DIM)
    return tl.load(q + query.to(tl.int64)[:, None] * q_row_stride + d, mask=mask, other=0.0)


@triton.jit
def _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[queries, candidates] in base 2; −inf where not allowed."""
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_DIM)
    key = tl.load(keys + row.to(tl.int64)[:, None] * HEAD_DIM + d, mask=mask, other=0.0)  # [candidates, dim]
    product = tl.dot(queries, tl.trans(key), input_precision="ieee")
    return tl.where(allowed, product * (scale * LOG2_E) + _log_count(rows, row, exists)[None, :], -float("inf"))


@triton.jit
def _logits_of_one(q, keys, rows, row, exists, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[candidates] the same for one query, where tensor cores would be idle."""
    STEP: tl.constexpr = min(BLOCK_D, 64)  # as much of the keys as registers hold
    product = tl.zeros(row.shape, tl.float32)
    for begin in tl.static_range(0, BLOCK_D, STEP):
        d = begin + tl.arange(0, STEP)
        query = tl.load(q + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        mask = exists[:, None] & (d < HEAD_DIM)
        key = tl.load(keys + row.to(tl.int64)[:, None] * HEAD_DIM + d, mask=mask, other=0.0)
        product += tl.sum(key.to(tl.float32) * query, 1)
    return product * (scale * LOG2_E) + _log_count(rows, row, exists)


@triton.jit
def _allowed(rows, row, exists, limit, query, asked):
    """[queries, candidates]"""
    allowed = asked[:, None] & exists[None, :]
    if limit is not None:
        seen = tl.load(limit + query, mask=asked, other=0)
        allowed = allowed & (_field(rows, row, END_LEAF, exists, 0)[None, :] <= seen[:, None])
    return allowed


@triton.jit
def _add_mass(top, total, logits):
    """Online: the largest logit and Σ exp2(logit − largest) of every query."""
    higher = tl.maximum(top, tl.max(logits, 1))
    finite = tl.where(higher > -float("inf"), higher, 0.0)
    return higher, total * tl.exp2(top - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)


@triton.jit
def _log_mass(top, total):
    """Of a query without candidates +inf, so that all its weights are 0."""
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))


@triton.jit
def _members(rows, parent, first, slots, own, past, low, high, at_start, PARENTS: tl.constexpr, MEMBERS: tl.constexpr):
    """The rows in the next slots of every parent; which are candidates; which of them are descended no further."""
    slot = past + tl.arange(0, MEMBERS)[None, :]
    itself = slot == own[:, None]
    exists = tl.reshape(slot < slots[:, None], [PARENTS * MEMBERS])
    row = tl.reshape(tl.where(itself, parent[:, None], first[:, None] + slot), [PARENTS * MEMBERS])
    below = _field(rows, row, SLOTS, exists, 0)
    own_below = _field(rows, row, OWN_SLOT, exists, -1)
    settled = tl.reshape(itself, [PARENTS * MEMBERS]) | ((below == 1) & (own_below == 0))
    look = exists & at_start  # only members of the start's parents can be open
    return row, exists & (below > 0) & ~(look & _is_open(rows, row, low, high, look)), settled


@triton.jit(do_not_specialize=["path_length", "num_queries", "first_root"])  # they differ from batch to batch
def _beam_kernel(
    q,
    keys,
    rows,
    paths,
    group_offsets,
    group_tree,
    open_low,
    open_high,
    limit,
    mass,
    chosen,
    scored,
    q_row_stride,
    q_head_stride,
    keys_head_stride,
    path_length,
    num_queries,
    first_root,
    heads_per_key,
    scale,
    width,
    refine,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARENTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SINGLE: tl.constexpr,  # one query per group
    ONE_TURN: tl.constexpr,  # all candidates of a round at once, and all queries of a group
):
    """One program: the search of one group and head. A round that keeps all its candidates needs no scores."""
    group, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(group_offsets + group), tl.load(group_offsets + group + 1)
    q += head.to(tl.int64) * q_head_stride
    keys += (head // heads_per_key).to(tl.int64) * keys_head_stride
    mass += head.to(tl.int64) * num_queries

    # The start: the root and what is expanded on the way to both ends of the open range, shared parts once.
    place = tl.arange(0, PARENTS)
    parent = tl.where(place == 0, first_root + tl.load(group_tree + group).to(tl.int32), -1)
    low, high = 0, 0
    if open_low is not None:
        low, high = tl.load(open_low + group).to(tl.int32), tl.load(open_high + group).to(tl.int32)
        to_the_right = place > path_length
        step = place - 1 - tl.where(to_the_right, path_length, 0)
        on_path = (place > 0) & (step < path_length) & (low < high)
        family = tl.where(to_the_right, high - 1, low).to(tl.int64)
        way = tl.load(paths + family * path_length + step, mask=on_path, other=-1)
        shared = _field(rows, way, FIRST_FAMILY, (way >= 0) & to_the_right, 0) <= low
        parent = tl.where(on_path & ~(to_the_right & shared), way, parent)
    kept = parent >= 0
    first = _field(rows, parent, FIRST_CHILD, kept, 0)
    slots = _field(rows, parent, SLOTS, kept, 0)
    own = tl.full([PARENTS], -1, tl.int32)  # none of them is a candidate itself

    query = begin + tl.arange(0, BLOCK_M)
    asked = query < end
    if SINGLE:
        q += begin * q_row_stride
        seen = 0
        if limit is not None:
            seen = tl.load(limit + begin, mask=begin < end, other=0)
    elif ONE_TURN:
        queries = _load_queries(q, query, asked, q_row_stride, HEAD_DIM, BLOCK_D)

    best = tl.full([PARENTS], NONE, tl.int64)
    pairs = 0
    at_start = True
    going = 1
    while going > 0:
        most = tl.max(slots)
        if not (SINGLE or ONE_TURN):  # the mass of every query over the candidates of all turns
            query = begin + tl.arange(0, BLOCK_M)
            while tl.min(query) < end:
                asked = query < end
                queries = _load_queries(q, query, asked, q_row_stride, HEAD_DIM, BLOCK_D)
                top = tl.full([BLOCK_M], -float("inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                past = 0
                while past < most:
                    row, exists, settled = _members(
                        rows, parent, first, slots, own, past, low, high, at_start, PARENTS, MEMBERS
                    )
                    allowed = _allowed(rows, row, exists, limit, query, asked)
                    logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                    top, total = _add_mass(top, total, logits)
                    past += MEMBERS
                tl.store(mass + query, _log_mass(top, total), mask=asked)
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
                allowed = _allowed(rows, row, exists, limit, query, asked)
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
                    asked = query < end
                    queries = _load_queries(q, query, asked, q_row_stride, HEAD_DIM, BLOCK_D)
                    allowed = _allowed(rows, row, exists, limit, query, asked)
                    logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
                    score += tl.sum(tl.exp2(logits - tl.load(mass + query, mask=asked, other=0.0)[:, None]), 0)
                    times += tl.sum(allowed.to(tl.int32), 0)
                    query += BLOCK_M
                bits = score.to(tl.int32, bitcast=True)
            pairs += tl.where(counts, tl.sum(times), 0)
            number = row * 2 + settled.to(tl.int32)
            rank = tl.where(times > 0, _rank(bits, number), NONE)
            # Their order is free: a layout without the copies that sums over queries leave in every thread.
            rank = tl.reshape(rank, [PARENTS * MEMBERS], can_reorder=True)
            found = tl.topk(rank, PARENTS)
            best = found if ONE_TURN else _merged(best, found)
            past += MEMBERS
        if not (SINGLE or ONE_TURN):
            tl.debug_barrier()  # masses are read before the next round writes them

        # Down: the best give their places to their members.
        kept = (best > NONE) & (place < width)
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
    tl.store(chosen + target * refine + place, foot, mask=place < refine)
    tl.store(scored + target, pairs)


@triton.jit
def _asks(asks, line, exists):
    """Of every line: the families to look at (begin, end), those open (low, high), the limit, the query."""
    asks += line.to(tl.int64) * 6
    begin, end = tl.load(asks, mask=exists, other=LAST), tl.load(asks + 1, mask=exists, other=0)
    low, high = tl.load(asks + 2, mask=exists, other=0), tl.load(asks + 3, mask=exists, other=0)
    return begin, end, low, high, tl.load(asks + 4, mask=exists, other=0), tl.load(asks + 5, mask=exists, other=0)


@triton.jit
def _is_candidate(
    rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED: tl.constexpr, HAS_OPEN: tl.constexpr
):
    """[queries, families]"""
    allowed = (number[None, :] >= begin[:, None]) & (number[None, :] < end[:, None])
    if HAS_OPEN:
        first_family = _field(rows, row, FIRST_FAMILY, exists, 0)
        end_family = _field(rows, row, END_FAMILY, exists, 0)
        allowed = allowed & ((first_family[None, :] >= high[:, None]) | (end_family[None, :] <= low[:, None]))
    if IS_LIMITED:
        allowed = allowed & (_field(rows, row, END_LEAF, exists, 0)[None, :] <= seen[:, None])
    return allowed


@triton.jit
def _mass_kernel(
    q,
    keys,
    rows,
    family_rows,
    asks,
    mass,
    q_row_stride,
    q_head_stride,
    keys_head_stride,
    num_lines,
    heads_per_key,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    HAS_OPEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the log-mass of some queries of a head over their candidates."""
    head = tl.program_id(1)
    q += head.to(tl.int64) * q_head_stride
    keys += (head // heads_per_key).to(tl.int64) * keys_head_stride
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    asked = line < num_lines
    begin, end, low, high, seen, query = _asks(asks, line, asked)
    queries = _load_queries(q, query, asked, q_row_stride, HEAD_DIM, BLOCK_D)
    family, past_last = tl.min(begin), tl.max(end)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    while family < past_last:
        number = family + tl.arange(0, BLOCK_N)
        exists = number < past_last
        row = tl.load(family_rows + number, mask=exists, other=0)
        allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_OPEN)
        logits = _logits(queries, keys, rows, row, exists, allowed, scale, HEAD_DIM, BLOCK_D)
        top, total = _add_mass(top, total, logits)
        family += BLOCK_N
    tl.store(mass + head.to(tl.int64) * num_lines + line, _log_mass(top, total), mask=asked)


@triton.jit
def _choose_kernel(
    q,
    keys,
    rows,
    family_rows,
    asks,
    mass,
    group_offsets,
    chosen,
    scored,
    q_row_stride,
    q_head_stride,
    keys_head_stride,
    num_lines,
    heads_per_key,
    scale,
    groups,
    refine,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    HAS_OPEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BEST: tl.constexpr,
    SINGLE: tl.constexpr,  # one query per group
    WHOLE_GROUPS: tl.constexpr,  # every group has BLOCK_M lines; otherwise a program goes through those of one group
):
    """One program: the best candidates of BLOCK_G groups and a head."""
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
    begin, end, low, high, seen, query = _asks(asks, line, line < past_line)
    family, past_last = tl.min(begin), tl.max(end)
    if WHOLE_GROUPS:
        queries = _load_queries(q, query, line < past_line, q_row_stride, HEAD_DIM, BLOCK_D)
        if not SINGLE:
            log_mass = tl.load(mass + line, mask=line < past_line, other=0.0)
    else:
        while tl.min(line) < past_line:  # later queries may see more
            begin, end, low, high, seen, query = _asks(asks, line, line < past_line)
            past_last = tl.maximum(past_last, tl.max(end))
            line += BLOCK_M

    best = tl.full([BLOCK_G, BEST], NONE, tl.int64)
    pairs = tl.zeros([BLOCK_G], tl.int32)
    while family < past_last:
        number = family + tl.arange(0, BLOCK_N)
        exists = number < past_last
        row = tl.load(family_rows + number, mask=exists, other=0)
        if WHOLE_GROUPS:
            allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_OPEN)
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
                asked = line < past_line
                begin, end, low, high, seen, query = _asks(asks, line, asked)
                queries = _load_queries(q, query, asked, q_row_stride, HEAD_DIM, BLOCK_D)
                log_mass = tl.load(mass + line, mask=asked, other=0.0)
                allowed = _is_candidate(rows, row, number, exists, begin, end, low, high, seen, IS_LIMITED, HAS_OPEN)
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
    found = tl.load(family_rows + tl.where(taken, _number(best), 0), mask=taken, other=-1)
    place = tl.arange(0, BEST)[None, :]
    is_wanted = (group < groups)[:, None] & (place < refine)
    tl.store(chosen + target[:, None] * refine + place, found, mask=is_wanted)
    tl.store(scored + target, pairs, mask=group < groups)


@triton.jit
def _score(logits, log_mass, allowed, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[groups, families] the sum of softmax over the queries of a group, and how many of them there are."""
    weights = tl.where(allowed, tl.exp2(logits - log_mass[:, None]), 0.0)
    score = tl.sum(tl.reshape(weights, [BLOCK_G, BLOCK_M, BLOCK_N]), 1)
    return score, tl.sum(tl.reshape(allowed.to(tl.int32), [BLOCK_G, BLOCK_M, BLOCK_N]), 1)
