"""Backend "torch" of `select`: the best leaf families of every group and head.

The exact search scores all candidates, in tiles that bound the memory. The beam search starts from the pooled nodes of
the group's list; it scores them, keeps the best and replaces each by its children, until only leaf families are left.
Of equal scores, the lower number wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hsa.attention.checks import repeat_heads
from hsa.attention.multiscale.call import SelectCall
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.position_logits import position_logits
from hsa.attention.multiscale.pyramid import in_order, pyramid
from hsa.attention.multiscale.selection import Selection, list_nodes
from hsa.attention.rounds import rounds

TILE = 2**21
"""Number of scores in memory at once."""
FEW_CANDIDATES = 512
"""Maximum number of candidates for which small trees share a tile, although some products are then masked."""


def search(call: SelectCall) -> tuple[Tensor, int]:
    """Return the nodes of the best families `[groups, heads, top_k]`, padded with −1, and the number of products."""
    run = _Search(call)
    best = run.exact() if call.width is None else run.beam(call.width)
    return best, run.scored


class _Search:
    """One search: its inputs, the pooled keys, and the number of products so far."""

    def __init__(self, call: SelectCall):
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        keys = call.k if call.clusters is None else in_order(call.k, call.clusters.order)
        plan = rounds(call.hierarchy)
        # A query or key that is not finite scores 0: it must not decide for the others of its group or tile.
        self.q = call.q.to(dtype).nan_to_num(0, 0, 0)
        self.pooled = repeat_heads(pyramid(keys.to(dtype), plan).nan_to_num(0, 0, 0), call.q.shape[1])
        self.positions, self.limit, self.scale = call.positions, call.limit, call.scale
        self.hierarchy, self.families, self.queries = call.hierarchy, leaf_families(call.hierarchy), call.queries
        self.neighbourhood, self.top_k = call.neighbourhood, call.top_k
        self.slot = plan.slot_of_node
        self.end = call.hierarchy.tensor("end_leaf")
        self.log_count = call.hierarchy.leaf_count.to(dtype).log()
        self.scored = 0

    def exact(self) -> Tensor:
        """Return `[groups, heads, top_k]` the best of all candidates."""
        heads = self.q.shape[1]
        result = self._empty_result()
        low, high = (torch.as_tensor(x).to(self.q.device) for x in (self.neighbourhood.low, self.neighbourhood.high))
        previous, logits = slice(0, 0), None
        for groups, candidates in self._tiles():
            if candidates != previous:  # consecutive tiles of one tree share their candidates
                previous, nodes = candidates, self.families.nodes[candidates]
                number = torch.arange(candidates.start, candidates.stop, device=nodes.device)
                keys = self.pooled[self.slot[nodes]].permute(1, 2, 0)  # [heads, dim, candidates]
            rows = slice(int(self.queries.host_offsets[groups.start]), int(self.queries.host_offsets[groups.stop]))
            allowed = self.families.tree[candidates] == self.queries.tree[groups, None]
            allowed &= ~self._is_selected(groups, number, nodes, low, high)  # [groups, candidates]
            shape = (heads, rows.stop - rows.start, len(nodes))
            if logits is None or logits.shape != shape:  # tiles reuse this memory: touching new pages is slow
                logits = self.q.new_empty(shape)
            torch.bmm(self.q[rows].transpose(0, 1) * self.scale, keys, out=logits)
            scores, candidate, count = self._score_groups(logits, nodes, allowed, rows, groups)
            best, valid = _top(scores.transpose(0, 1), candidate[:, None], self.top_k)
            result[groups, :, : best.shape[-1]] = nodes[best].masked_fill(~valid, -1)
            self.scored += heads * count
        return result

    def _empty_result(self) -> Tensor:
        return self.families.nodes.new_full((self.queries.num_groups, self.q.shape[1], self.top_k), -1)

    def _score_groups(
        self, logits: Tensor, nodes: Tensor, allowed: Tensor, rows: slice, groups: slice
    ) -> tuple[Tensor, Tensor, int]:
        """Return the scores of groups `[heads, groups, candidates]`, which are candidates, and the number of products.

        Overwrites the logits.
        """
        sizes = np.diff(self.queries.host_offsets[groups.start : groups.stop + 1])
        if self.limit is None and self.positions is None and (sizes == sizes[0]).all():
            # Groups have one size and their queries the same candidates: only the logits differ from query to query.
            bias = self.log_count[nodes].where(allowed, -math.inf)
            by_group = logits.unflatten(1, (len(sizes), int(sizes[0]))).add_(bias[:, None])
            top = by_group.amax(-1, keepdim=True)
            weights = by_group.sub_(top.masked_fill_(top == -math.inf, 0)).exp_()
            mass = weights.sum(-1, keepdim=True)
            factor = 1 / mass.masked_fill_(mass == 0, 1)
            return (factor.transpose(-1, -2) @ weights).squeeze(2), allowed, int(allowed.sum()) * int(sizes[0])
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
        """Yield groups and the candidates of their trees: consecutive small trees together, large ones in pieces."""
        offsets, tree = self.queries.host_offsets, self.queries.host_tree
        bounds = self.families.tree_offsets
        in_order = bool((np.diff(tree) >= 0).all())
        same_tree_until = np.append(np.flatnonzero(np.diff(tree)) + 1, len(tree))
        begin = 0
        while begin < len(tree):
            first = tree[begin]
            end = same_tree_until[np.searchsorted(same_tree_until, begin, side="right")]
            if in_order:  # add trees while there are few candidates
                last = np.searchsorted(bounds, bounds[first] + FEW_CANDIDATES, side="right") - 2
                end = max(end, np.searchsorted(tree, last, side="right"))
            candidates = bounds[tree[end - 1] + 1] - bounds[first]
            fits = offsets[begin] + TILE // (self.q.shape[1] * max(candidates, 1))
            end = int(min(end, max(begin + 1, np.searchsorted(offsets, fits, side="right") - 1)))
            last = tree[end - 1]
            if bounds[last + 1] > bounds[first] and offsets[end] > offsets[begin]:
                yield slice(begin, end), slice(int(bounds[first]), int(bounds[last + 1]))
            begin = end

    def _is_selected(self, groups: slice, number: Tensor, nodes: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return `[groups, candidates]` whether a candidate or a family below it is in the neighbourhood."""
        low, high = low[groups, None], high[groups, None]
        selected = (number >= low) & (number < high)
        if self.families.mixed:
            first = self.hierarchy.tensor("first_leaf")
            for offset in range(int((high - low).max())):
                other = self.families.nodes[(low + offset).clamp(max=len(self.families.nodes) - 1)]
                below = (first[nodes] <= first[other]) & (self.end[nodes] >= self.end[other])
                selected |= below & (low + offset < high)
        return selected

    def _positions(self, rows: slice, nodes: Tensor) -> Tensor:
        """Return the position logits `[1 or heads, queries, candidates]`, with each query as a group of its own."""
        assert self.positions is not None
        assert self.queries.leaves is not None
        leaf = self.queries.leaves[rows]
        node = self.hierarchy.tensor("leaf_nodes")[leaf]
        entries = nodes[None, None].expand(len(leaf), 1, -1)
        logits = position_logits(self.positions, self.hierarchy, self.hierarchy.parent[node], node[:, None], entries)
        return logits.squeeze(2).transpose(0, 1)

    def beam(self, width: int) -> Tensor:
        """Return `[groups, heads, top_k]`, by descent from the pooled nodes of the lists of the neighbourhoods."""
        partition = list_nodes(Selection(self.neighbourhood.nodes, self.queries), self.hierarchy)
        lengths = partition.lengths[:, 0]
        longest = int(lengths.max())
        index = partition.offsets[:-1, None] + torch.arange(longest, device=lengths.device)
        inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
        lists = partition.nodes[index.clamp(max=len(partition.nodes) - 1)]
        lists = lists.masked_fill(~inside | (self.hierarchy.num_children[lists] == 0), -1)
        lists = lists.gather(-1, _gaps_last(lists))
        result = self._empty_result()
        sizes = np.diff(self.queries.host_offsets)
        children = int(self.hierarchy.structure.num_children.max())
        per_group = max(1, int(sizes.max(initial=1))) * self.q.shape[1] * max(lists.shape[1], width * children)
        step = max(1, TILE * 4 // (per_group * self.q.shape[2]))
        for begin in range(0, self.queries.num_groups, step):
            groups = slice(begin, min(begin + step, self.queries.num_groups))
            result[groups] = self._descend(groups, lists[groups], width)
        return result

    def _descend(self, groups: slice, lists: Tensor, width: int) -> Tensor:
        """Return `[groups, heads, top_k]` for some groups, starting from the nodes `lists`."""
        offsets = self.queries.offsets[groups.start : groups.stop + 1]
        longest = int((offsets[1:] - offsets[:-1]).max())
        rows = offsets[:-1, None] + torch.arange(longest, device=offsets.device)
        real = rows < offsets[1:, None]  # [groups, queries] not padding
        rows = rows.clamp(max=len(self.q) - 1)
        nodes = lists[:, None].expand(-1, self.q.shape[1], -1)
        settled = self._is_settled(nodes)
        while True:
            # Only scores that decide something are counted: of a group and head with more candidates than it may keep,
            # and of the last round.
            finished = settled.all(-1, keepdim=True)
            all_finished = bool(finished.all())
            allowed = self._candidates(rows, real, nodes)
            keeps_all = ~finished & (allowed.any(2).sum(-1, keepdim=True) <= width)
            score = self._score(rows, nodes, allowed, counted=~keeps_all if all_finished else ~keeps_all & ~finished)
            if all_finished:
                break
            number = max(width, int(((nodes >= 0) & finished).sum(-1).max()))
            best, valid = _top(score, score >= 0, number)
            valid &= finished | (torch.arange(best.shape[-1], device=best.device) < width)
            nodes = nodes.gather(-1, best).masked_fill(~valid, -1)
            settled = settled.gather(-1, best) | ~valid
            nodes, settled = self._children(nodes, settled)
        best, valid = _top(score, score >= 0, self.top_k)
        nodes = nodes.gather(-1, best).masked_fill(~valid, -1)
        return torch.nn.functional.pad(nodes, (0, self.top_k - nodes.shape[-1]), value=-1)

    def _is_settled(self, nodes: Tensor) -> Tensor:
        """Return whether the descent ends here: at padding, or at a node whose children are all leaves."""
        return (nodes < 0) | (self.hierarchy.tensor("height")[nodes] == 1)

    def _children(self, nodes: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
        """Replace each unsettled node by its children that are not leaves; keep it too if some of them are leaves."""
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

    def _candidates(self, rows: Tensor, real: Tensor, nodes: Tensor) -> Tensor:
        """Return `[groups, heads, queries, entries]` the candidates that each query may see."""
        allowed = (nodes >= 0)[:, :, None] & real[:, None, :, None]
        if self.limit is not None:
            allowed = allowed & (self.end[nodes][:, :, None] <= self.limit[rows][:, None, :, None])
        return allowed

    def _score(self, rows: Tensor, nodes: Tensor, allowed: Tensor, counted: Tensor) -> Tensor:
        """Return the scores of groups `[groups, heads, entries]`; −1 where there is no candidate."""
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
    """Return indices that move gaps (−1) behind the entries, cut off after the longest row of entries."""
    keep = max(1, int((nodes >= 0).sum(-1).max()))
    return (nodes < 0).to(torch.int8).sort(dim=-1, stable=True).indices[..., :keep]


def _softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over the allowed entries; zeros if none is allowed."""
    return logits.masked_fill(~allowed, -math.inf).softmax(-1).masked_fill(~allowed, 0)


def _top(scores: Tensor, candidate: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the `number` largest non-negative scores, and which of them are candidates.

    Of equal scores, the lower index wins: the bits of a non-negative float32 are ordered as the numbers are, so a score
    and its index make one integer, and no two integers are equal.
    """
    size = scores.shape[-1]
    scores = scores.to(torch.float32).where(candidate, -1.0)  # the sign bit makes the integer negative too
    key = scores.contiguous().view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    key.add_(2**32 - 1 - torch.arange(size, device=scores.device))
    best = key.topk(min(number, size), dim=-1)
    return best.indices, best.values >= 0
