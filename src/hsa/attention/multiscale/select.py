"""Which leaf families a group of queries attends to leaf by leaf.

Open from the start: the own family, its `near` neighbours on each side; with a causal key order all families of the own
chunk. Then the `top_k` best of the others, by

    score(F) = Σ over the queries of the group of softmax over the candidates of the logit of F's pooled key

either over all candidates, in tiles that bound the memory, or top down by a beam: starting from the pooled nodes of the
list as it is, score, keep the best, replace each by its children, until only leaf families are left. Ties go to the lower
number. Nothing here is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention.arguments import (
    check_count,
    check_inputs,
    check_positions,
    check_type,
    repeat_heads,
    scale_or_default,
    without_autocast,
)
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.attention.kernels.reasons import choice_reasons
from hsa.attention.multiscale.cluster import KeyClusters, chunk_of_leaf
from hsa.attention.multiscale.leaf_families import LeafFamilies, leaf_families
from hsa.attention.multiscale.position_logits import position_logits
from hsa.attention.multiscale.pyramid import in_order, pyramid
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.selection import Selection, lower
from hsa.attention.multiscale.visibility import anchors, key_limit
from hsa.attention.rounds import rooted, rounds
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

EXACT_FAMILIES = 4096
"""Trees with more leaf families than this are searched by a beam unless the caller says otherwise; causal ones always, as
what a query sees must not depend on how long its tree becomes."""
TILE = 2**21
"""Scores held at once."""
FEW_CANDIDATES = 512
"""Small trees share a tile, and the masked products that brings, up to so many candidates."""


@torch.no_grad()
@torch.compiler.disable
def select(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "leaves kv_heads dim"],
    hierarchy: Hierarchy,
    *,
    queries: Queries | None = None,
    near: int = 0,
    top_k: int = 0,
    beam: int | str | None = None,
    clusters: KeyClusters | None = None,
    positions: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Selection:
    """Choose the leaf families that each group of queries attends to exactly, for `multiscale_attention(selection=…)`.

    Args:
        q, k: as for `multiscale_attention`.
        queries: the groups that share a choice. By default one group per leaf family; with `causal` and `top_k` one per
            query, because a choice shared with later queries would leak them.
        near: neighbouring leaf families to open on each side.
        top_k: how many more to open: the best by the group's own queries, per head.
        beam: width of the top-down search; "exact" scores every family. None takes a beam of max(32, 2·top_k) for causal
            queries and for trees of more than 4,096 leaf families, else "exact".
        clusters: from `cluster_keys`; then leaf families have no neighbours, so `near` must be 0.
        positions, causal, scale: as for `multiscale_attention`.
        backend: "auto", "triton" (CUDA) or "torch".

    >>> q, k = torch.randn(2, 64, 2, 8).unbind(0)
    >>> tree = Hierarchy.regular([64], (4, 4))
    >>> selection = select(q, k, tree, near=1, top_k=2)
    >>> selection.families.shape  # groups, heads, own + 2 near + 2 refined
    torch.Size([16, 2, 5])
    """
    check_type("queries", queries, Queries, "see hsa.Queries")
    check_type("clusters", clusters, KeyClusters, "use hsa.cluster_keys(k, hierarchy)")
    check_inputs({"k": k}, hierarchy)
    near, top_k, beam = _checked_counts(near, top_k, beam)
    scale = scale_or_default(scale, q)
    others = queries is not None
    queries = _checked_queries(queries, hierarchy, top_k, causal, clusters)
    check_inputs({"q": q, "k": k}, hierarchy, rows={"q": queries.num_queries} if others else None)
    positions = check_positions(positions, q, hierarchy)
    if positions is not None:
        check_one_family(queries, hierarchy)
    if clusters is not None:
        check_clusters(clusters, k, hierarchy, near=near, positions=positions)
    made_for = hierarchy.digest
    hierarchy, positions = rooted(hierarchy, positions)
    limit = key_limit(queries, hierarchy, causal)
    opening = _opening(queries, hierarchy, near, clusters, limit)
    families = leaf_families(hierarchy)
    if top_k == 0 or len(q) == 0 or len(families.nodes) == 0:
        return Selection(opening.table, queries, 0, limit, clusters, made_for)
    widest = int(np.diff(families.tree_offsets).max())
    exact = beam == "exact" or (beam is None and limit is None and widest <= EXACT_FAMILIES)
    width = None if exact else int(beam) if isinstance(beam, int) else default_width(top_k)
    asked = {
        "q": q,
        "hierarchy": hierarchy,
        "positions": positions,
        "width": width,
        "opening": opening,
        "top_k": top_k,
    }
    chosen_by = choose("select", CHOICE, backend, {**asked, "backend": backend})
    with without_autocast(q):
        chosen, counted = chosen_by.run(
            q, k, hierarchy, queries, opening, clusters, positions, limit, scale, top_k, width
        )
    both = torch.cat([opening.table.expand(-1, q.shape[1], -1), chosen], -1)
    return Selection(both, queries, counted, limit, clusters, made_for)


def default_width(top_k: int) -> int:
    """Of the beam that opens so many families."""
    return max(32, 2 * top_k)


@dataclass(frozen=True, eq=False)
class Opening:
    """The families open from the start: per group a range of family numbers, low to high − 1; (0, 0) for none."""

    low: np.ndarray
    high: np.ndarray
    table: Tensor  # [groups, 1, width] their nodes, −1 after them
    bounds: tuple[Tensor, Tensor] | None  # low and high on the device; None: no group has any

    @property
    def any(self) -> bool:
        return self.bounds is not None


def _opening(
    queries: Queries, hierarchy: Hierarchy, near: int, clusters: KeyClusters | None, limit: Tensor | None
) -> Opening:
    """The ranges follow from structure alone; made once per set of queries."""
    check_chunked(clusters, limit)
    families = leaf_families(hierarchy)

    def build() -> Opening:
        low, high = _open_from_the_start(queries, hierarchy, families, near, clusters, limit)
        device = hierarchy.device
        bounds = torch.as_tensor(low).to(device), torch.as_tensor(high).to(device)
        return Opening(low, high, _range_table(low, high, families), bounds if (high > low).any() else None)

    chunk = None if clusters is None else (clusters.chunk,)
    return queries.cached(("opening", hierarchy.digest, near, chunk, limit is None), build)


def _search_torch(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    queries: Queries,
    opening: Opening,
    clusters: KeyClusters | None,
    positions: Tensor | None,
    limit: Tensor | None,
    scale: float,
    top_k: int,
    width: int | None,
) -> tuple[Tensor, int]:
    """[groups, heads, top_k] nodes of the chosen families, and how many products that took. `width` None: exact."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = k if clusters is None else in_order(k, clusters.order)
    pooled = repeat_heads(pyramid(keys.to(dtype), rounds(hierarchy)), q.shape[1])
    search = _Search(q.to(dtype), pooled, hierarchy, leaf_families(hierarchy), queries, positions, limit, scale)
    if width is None:
        chosen = search.exact(opening.low, opening.high, top_k)
    else:
        chosen = search.beam(Selection(opening.table, queries), top_k, width)
    return chosen, search.scored


def _search_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from hsa.attention.multiscale.triton.operator import search

    with available.device_of(arguments[0]):
        return search(*arguments)


def _why_not_triton(arguments: dict[str, Any]) -> list[str]:
    reasons = available.why_not(arguments["q"], arguments["q"], arguments["backend"])
    if reasons:
        return reasons
    if arguments["positions"] is not None:
        return ["it does not take positions"]
    return choice_reasons(
        arguments["hierarchy"], arguments["q"], arguments["top_k"], arguments["width"], arguments["opening"].any
    )


CHOICE = (Backend("triton", _search_triton, _why_not_triton), Backend("torch", _search_torch))


def _checked_queries(
    queries: Queries | None, hierarchy: Hierarchy, top_k: int, causal: bool, clusters: KeyClusters | None
) -> Queries:
    if queries is None:
        return Queries.windows(hierarchy, 1) if causal and (top_k or clusters) else Queries.families(hierarchy)
    queries = queries.checked(hierarchy)
    if causal and top_k and (np.diff(queries.host_offsets) > 1).any():
        raise InvalidInput(
            "queries",
            given="groups of several queries with causal=True and top_k",
            expected="one query per group",
            fix="a shared choice would leak later queries; use Queries.windows(hierarchy, 1)",
        )
    return queries


def _checked_counts(near: int, top_k: int, beam: int | str | None) -> tuple[int, int, int | str | None]:
    families = "0 or a positive number of leaf families"
    near, top_k = check_count("near", near, families), check_count("top_k", top_k, families)
    if beam is None or (isinstance(beam, str) and beam == "exact"):
        return near, top_k, beam
    least = max(top_k, 1)
    return near, top_k, check_count("beam", beam, f"'exact', None, or a width of at least {least} (top_k)", least)


def check_clusters(
    clusters: KeyClusters,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    near: int = 0,
    positions: Tensor | None = None,
    include_self: bool = True,
) -> None:
    """The order fits keys and hierarchy, and no option asks for what keys lose with their places."""
    if clusters.order.shape != (k.shape[1], len(k)):
        raise InvalidInput(
            "clusters",
            given=f"shape {tuple(clusters.order.shape)}",
            expected=f"[{k.shape[1]} key/value heads, {len(k)} leaves]",
            fix="find it from the same keys with hsa.cluster_keys(k, hierarchy)",
        )
    if clusters.made_for not in (None, hierarchy.digest):
        raise InvalidInput(
            "clusters",
            given="an order found for another hierarchy",
            expected="one for this",
            fix="find it with hsa.cluster_keys(k, hierarchy)",
        )
    reasons = {
        "near": (near != 0, "neighbours", "near=0; open more with top_k"),
        "positions": (positions is not None, "positions", "positions=None; put positions into q and k"),
        "include_self": (not include_self, "an own leaf", "include_self=True"),
    }
    for name, (bad, what, expected) in reasons.items():
        if bad:
            raise InvalidInput(
                name,
                given="a value together with clusters",
                expected=expected,
                fix=f"found leaf families have no {what}",
            )


def check_chunked(clusters: KeyClusters | None, limit: Tensor | None) -> None:
    if clusters is not None and limit is not None and clusters.chunk is None:
        raise InvalidInput(
            "clusters",
            given="an order of whole trees, for queries that may see only some of the keys",
            expected="an order inside complete chunks",
            fix="use cluster_keys(k, hierarchy, chunk=256)",
        )


def check_one_family(queries: Queries, hierarchy: Hierarchy) -> None:
    """Positions are compared where paths part: a group must stand below one parent."""
    if queries.leaves is None:
        raise InvalidInput(
            "positions",
            given="positions with queries that are no leaves",
            expected="positions=None",
            fix="a query outside the tree has no position in it",
        )
    s = hierarchy.structure
    parent = s.parent[s.leaf_nodes[queries.leaves.cpu().numpy()]]
    starts = queries.host_offsets[:-1][np.diff(queries.host_offsets) > 0]
    if len(starts) and (np.maximum.reduceat(parent, starts) != np.minimum.reduceat(parent, starts)).any():
        raise InvalidInput(
            "queries",
            given="groups that span several leaf families, with positions",
            expected="groups inside one leaf family",
            fix="use Queries.families(hierarchy) or Queries.windows(hierarchy, 1)",
        )


def _open_from_the_start(
    queries: Queries,
    hierarchy: Hierarchy,
    families: LeafFamilies,
    near: int,
    clusters: KeyClusters | None,
    limit: Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Per group a range of family numbers, low to high − 1; (0, 0) for none."""
    where = anchors(queries, limit)
    low, high = np.zeros((2, queries.num_groups), np.int64)
    sizes = np.diff(queries.host_offsets)
    filled = np.flatnonzero(sizes > 0)
    if where is None or (clusters is not None and limit is None) or len(families.nodes) == 0 or len(filled) == 0:
        return low, high
    leaf = where.cpu().numpy()
    tree = np.repeat(queries.host_tree, sizes)
    sees = leaf >= hierarchy.structure.leaf_offsets[tree]  # a query that may see nothing stands nowhere
    leaf = np.where(sees, leaf, 0)
    if clusters is None:
        own, before = families.own[leaf], families.before[leaf]
        first = np.where(own < 0, before, own) - near
        last = np.where(own < 0, before, own + 1) + (near if limit is None else 0)  # what is later cannot be seen
    else:
        first, last = _families_of_chunks(hierarchy, families, clusters, leaf)
    first = np.where(sees, np.maximum(first, families.tree_offsets[tree]), len(families.nodes))
    last = np.where(sees, np.minimum(last, families.tree_offsets[tree + 1]), 0)
    starts = queries.host_offsets[filled]
    low[filled], high[filled] = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
    nothing = high <= low
    low[nothing], high[nothing] = 0, 0
    return low, high


def _families_of_chunks(
    hierarchy: Hierarchy, families: LeafFamilies, clusters: KeyClusters, leaf: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The range of families that the chunk of each leaf reaches into."""
    assert clusters.chunk is not None
    number, complete = chunk_of_leaf(hierarchy, clusters.chunk)
    listed = families.own >= 0
    first, last = np.full(len(complete), len(families.nodes)), np.zeros(len(complete), np.int64)
    np.minimum.at(first, number[listed], families.own[listed])
    np.maximum.at(last, number[listed], families.own[listed] + 1)
    return first[number[leaf]], last[number[leaf]]


def _range_table(low: np.ndarray, high: np.ndarray, families: LeafFamilies) -> Tensor:
    """[groups, 1, width] the nodes of families low..high−1, −1 after them."""
    device = families.nodes.device
    width = int((high - low).max(initial=0))
    number = torch.as_tensor(low).to(device)[:, None] + torch.arange(width, device=device)
    inside = number < torch.as_tensor(high).to(device)[:, None]
    nodes = torch.cat([families.nodes, families.nodes.new_full((1,), -1)])
    return nodes[number.where(inside, len(families.nodes))][:, None]


class _Search:
    def __init__(
        self,
        q: Tensor,
        pooled: Tensor,
        hierarchy: Hierarchy,
        families: LeafFamilies,
        queries: Queries,
        positions: Tensor | None,
        limit: Tensor | None,
        scale: float,
    ):
        self.q, self.pooled, self.positions, self.limit, self.scale = q, pooled, positions, limit, scale
        self.hierarchy, self.families, self.queries = hierarchy, families, queries
        self.slot = rounds(hierarchy).slot_of_node
        self.end = hierarchy.tensor("end_leaf")
        self.log_count = hierarchy.leaf_count.to(q.dtype).log()
        self.scored = 0

    def exact(self, low: np.ndarray, high: np.ndarray, top_k: int) -> Tensor:
        """[groups, heads, top_k] the best candidates of all, tile by tile."""
        heads = self.q.shape[1]
        chosen = self.families.nodes.new_full((self.queries.num_groups, heads, top_k), -1)
        low_t, high_t = (torch.as_tensor(x).to(self.q.device) for x in (low, high))
        seen, logits = slice(0, 0), None
        for groups, candidates in self._tiles():
            if candidates != seen:  # consecutive tiles of one tree share their candidates
                seen, nodes = candidates, self.families.nodes[candidates]
                number = torch.arange(candidates.start, candidates.stop, device=nodes.device)
                keys = self.pooled[self.slot[nodes]].permute(1, 2, 0)  # [heads, dim, candidates]
            rows = slice(int(self.queries.host_offsets[groups.start]), int(self.queries.host_offsets[groups.stop]))
            allowed = self.families.tree[candidates] == self.queries.tree[groups, None]
            allowed &= ~self._open(groups, number, nodes, low_t, high_t)  # [groups, candidates]
            shape = (heads, rows.stop - rows.start, len(nodes))
            if logits is None or logits.shape != shape:  # one piece of memory for all tiles: fresh pages are dear
                logits = self.q.new_empty(shape)
            torch.bmm(self.q[rows].transpose(0, 1) * self.scale, keys, out=logits)
            scores, candidate, count = self._score_groups(logits, nodes, allowed, rows, groups)
            best, valid = _top(scores.transpose(0, 1), candidate[:, None], top_k)
            chosen[groups, :, : best.shape[-1]] = nodes[best].masked_fill(~valid, -1)
            self.scored += heads * count
        return chosen

    def _score_groups(
        self, logits: Tensor, nodes: Tensor, allowed: Tensor, rows: slice, groups: slice
    ) -> tuple[Tensor, Tensor, int]:
        """[heads, groups, candidates] each group's summed softmax, which are candidates, and how many were scored."""
        sizes = np.diff(self.queries.host_offsets[groups.start : groups.stop + 1])
        if self.limit is None and self.positions is None and (sizes == sizes[0]).all():
            # The same candidates for all queries of a group, groups of one size: nothing per query but the logits.
            bias = self.log_count[nodes].where(allowed, -math.inf)
            by_group = logits.unflatten(1, (len(sizes), int(sizes[0]))).add_(bias[:, None])
            top = by_group.amax(-1, keepdim=True)
            weights = by_group.sub_(top.masked_fill_(top == -math.inf, 0)).exp_()
            mass = weights.sum(-1, keepdim=True)
            each = 1 / mass.masked_fill_(mass == 0, 1)
            return (each.transpose(-1, -2) @ weights).squeeze(2), allowed, int(allowed.sum()) * int(sizes[0])
        group = self.queries.group[rows] - groups.start
        of_query = allowed[group]  # [queries, candidates]
        if self.limit is not None:
            of_query &= self.end[nodes] <= self.limit[rows, None]
        bias = self.log_count[nodes].where(of_query, -math.inf)
        logits = logits.add_(bias if self.positions is None else bias + self._positions(rows, nodes))
        weights = logits.softmax(-1)
        if self.limit is not None:  # some queries may have no candidate
            weights = weights.masked_fill_(~of_query.any(-1, keepdim=True), 0)
        scores = weights.new_zeros(len(weights), len(sizes), len(nodes)).index_add_(1, group, weights)
        candidate = torch.zeros_like(allowed).index_put_((group,), of_query, accumulate=True)
        return scores, candidate, int(of_query.sum())

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Groups, and the candidates of their trees: consecutive small trees together, large ones in pieces."""
        offsets, tree = self.queries.host_offsets, self.queries.host_tree
        bounds = self.families.tree_offsets
        in_order = bool((np.diff(tree) >= 0).all())
        same_tree_until = np.append(np.flatnonzero(np.diff(tree)) + 1, len(tree))
        begin = 0
        while begin < len(tree):
            first = tree[begin]
            end = same_tree_until[np.searchsorted(same_tree_until, begin, side="right")]
            if in_order:  # as many trees as keep the candidates few
                last = np.searchsorted(bounds, bounds[first] + FEW_CANDIDATES, side="right") - 2
                end = max(end, np.searchsorted(tree, last, side="right"))
            candidates = bounds[tree[end - 1] + 1] - bounds[first]
            fits = offsets[begin] + TILE // (self.q.shape[1] * max(candidates, 1))
            end = int(min(end, max(begin + 1, np.searchsorted(offsets, fits, side="right") - 1)))
            last = tree[end - 1]
            if bounds[last + 1] > bounds[first] and offsets[end] > offsets[begin]:
                yield slice(begin, end), slice(int(bounds[first]), int(bounds[last + 1]))
            begin = end

    def _open(self, groups: slice, number: Tensor, nodes: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """[groups, candidates] open already, themselves or because something below them is."""
        low, high = low[groups, None], high[groups, None]
        is_open = (number >= low) & (number < high)
        if self.families.mixed:
            first = self.hierarchy.tensor("first_leaf")
            for offset in range(int((high - low).max())):
                other = self.families.nodes[(low + offset).clamp(max=len(self.families.nodes) - 1)]
                below = (first[nodes] <= first[other]) & (self.end[nodes] >= self.end[other])
                is_open |= below & (low + offset < high)
        return is_open

    def _positions(self, rows: slice, nodes: Tensor) -> Tensor:
        """[1 or heads, queries, candidates]: every query alone, so that groups need not be one family."""
        assert self.positions is not None
        assert self.queries.leaves is not None
        leaf = self.queries.leaves[rows]
        node = self.hierarchy.tensor("leaf_nodes")[leaf]
        entries = nodes[None, None].expand(len(leaf), 1, -1)
        logits = position_logits(self.positions, self.hierarchy, self.hierarchy.parent[node], node[:, None], entries)
        return logits.squeeze(2).transpose(0, 1)

    def beam(self, start: Selection, top_k: int, width: int) -> Tensor:
        """[groups, heads, top_k] by descending from the pooled nodes of the lists that `start` gives."""
        partition = lower(start, self.hierarchy)
        lengths = partition.lengths[:, 0]
        longest = int(lengths.max())
        index = partition.offsets[:-1, None] + torch.arange(longest, device=lengths.device)
        inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
        lists = partition.nodes[index.clamp(max=len(partition.nodes) - 1)]
        lists = lists.masked_fill(~inside | (self.hierarchy.num_children[lists] == 0), -1)
        lists = lists.gather(-1, _gaps_last(lists))
        chosen = self.families.nodes.new_full((self.queries.num_groups, self.q.shape[1], top_k), -1)
        sizes = np.diff(self.queries.host_offsets)
        children = int(self.hierarchy.structure.num_children.max())
        per_group = max(1, int(sizes.max(initial=1))) * self.q.shape[1] * max(lists.shape[1], width * children)
        step = max(1, TILE * 4 // (per_group * self.q.shape[2]))
        for begin in range(0, self.queries.num_groups, step):
            groups = slice(begin, min(begin + step, self.queries.num_groups))
            chosen[groups] = self._descend(groups, lists[groups], top_k, width)
        return chosen

    def _descend(self, groups: slice, lists: Tensor, top_k: int, width: int) -> Tensor:
        offsets = self.queries.offsets[groups.start : groups.stop + 1]
        longest = int((offsets[1:] - offsets[:-1]).max())
        rows = offsets[:-1, None] + torch.arange(longest, device=offsets.device)
        asked = rows < offsets[1:, None]  # [groups, queries]
        rows = rows.clamp(max=len(self.q) - 1)
        nodes = lists[:, None].expand(-1, self.q.shape[1], -1)
        settled = self._is_settled(nodes)
        while True:
            # A round scores those that have more candidates than they may keep, and those that have come to the end.
            finished = settled.all(-1, keepdim=True)
            every = bool(finished.all())
            allowed = self._candidates(rows, asked, nodes)
            kept_whole = ~finished & (allowed.any(2).sum(-1, keepdim=True) <= width)
            score = self._score(rows, nodes, allowed, counted=~kept_whole if every else ~kept_whole & ~finished)
            if every:
                break
            number = max(width, int(((nodes >= 0) & finished).sum(-1).max()))
            best, valid = _top(score, score >= 0, number)
            valid &= finished | (torch.arange(best.shape[-1], device=best.device) < width)
            nodes = nodes.gather(-1, best).masked_fill(~valid, -1)
            settled = settled.gather(-1, best) | ~valid
            nodes, settled = self._children(nodes, settled)
        best, valid = _top(score, score >= 0, top_k)
        found = nodes.gather(-1, best).masked_fill(~valid, -1)
        return torch.nn.functional.pad(found, (0, top_k - found.shape[-1]), value=-1)

    def _is_settled(self, nodes: Tensor) -> Tensor:
        """Nothing to descend to: no node, or one whose members are all leaves."""
        return (nodes < 0) | (self.hierarchy.tensor("height")[nodes] == 1)

    def _children(self, nodes: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
        """Every open end replaced by its members that are no leaves, and by itself if it has leaf members too."""
        count = self.hierarchy.num_children[nodes].masked_fill(settled, 0)
        most = int(count.max())
        step = torch.arange(most, device=nodes.device)
        child = self.hierarchy.tensor("first_child")[nodes][..., None] + step
        is_child = step < count[..., None]
        child = torch.where(is_child, child, 0)
        is_leaf = self.hierarchy.num_children[child] == 0
        has_leaves = (is_leaf & is_child).any(-1)
        child = child.masked_fill(~is_child | is_leaf, -1)
        stays = settled | has_leaves
        itself = nodes.masked_fill(~stays, -1)
        nodes = torch.cat([itself[..., None], child], -1).flatten(-2)
        done = torch.cat([torch.ones_like(stays)[..., None], self._is_settled(child)], -1).flatten(-2)
        order = _gaps_last(nodes)
        return nodes.gather(-1, order), done.gather(-1, order)

    def _candidates(self, rows: Tensor, asked: Tensor, nodes: Tensor) -> Tensor:
        """[groups, heads, queries, entries] which of its candidates each query may see."""
        allowed = (nodes >= 0)[:, :, None] & asked[:, None, :, None]
        if self.limit is not None:
            allowed = allowed & (self.end[nodes][:, :, None] <= self.limit[rows][:, None, :, None])
        return allowed

    def _score(self, rows: Tensor, nodes: Tensor, allowed: Tensor, counted: Tensor) -> Tensor:
        """[groups, heads, entries] the group's summed softmax; −1 where there is no candidate."""
        queries = self.q[rows].transpose(1, 2)  # [groups, heads, queries, dim]
        head = torch.arange(self.q.shape[1], device=nodes.device)[:, None]
        keys = self.pooled[self.slot[nodes], head]
        logits = queries @ keys.transpose(-1, -2) * self.scale + self.log_count[nodes][:, :, None]
        if self.positions is not None:
            assert self.queries.leaves is not None
            leaf = self.hierarchy.tensor("leaf_nodes")[self.queries.leaves[rows]]
            parent = self.hierarchy.parent[leaf[:, 0]]
            logits = logits + position_logits(self.positions, self.hierarchy, parent, leaf, nodes.clamp(min=0))
        self.scored += int((allowed & counted[:, :, None]).sum())
        return _softmax(logits, allowed).sum(2).masked_fill(~allowed.any(2), -1)


def _gaps_last(nodes: Tensor) -> Tensor:
    """Indices that put entries before gaps (−1), and leave out the gaps that no row needs."""
    keep = max(1, int((nodes >= 0).sum(-1).max()))
    return (nodes < 0).to(torch.int8).sort(dim=-1, stable=True).indices[..., :keep]


def _softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed entries; zeros where none is."""
    return logits.masked_fill(~allowed, -math.inf).softmax(-1).masked_fill(~allowed, 0)


def _top(scores: Tensor, candidate: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Indices of the `number` largest non-negative scores, ties to the lower index, and which of them are candidates.

    The bits of a non-negative float32 order like the number, so that score and index fit one integer without ties.
    """
    size = scores.shape[-1]
    scores = scores.to(torch.float32).where(candidate, -1.0)  # the sign bit makes the integer negative too
    key = scores.contiguous().view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    key.add_(2**32 - 1 - torch.arange(size, device=scores.device))
    best = key.topk(min(number, size), dim=-1)
    return best.indices, best.values >= 0
