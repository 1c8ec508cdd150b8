"""The plan of the sweeps: which families are processed together.

A *round* holds all families whose parents have the same height: the first round holds the families that consist of leaves,
at any depth, the last the families of the tallest roots. In the up sweep, every member is computed before its family is
used; the down sweep takes the rounds in reverse, so that every parent comes before its members. Within a round, families of
similar size form a *bucket*: a dense `[families, size, …]` tensor, which is a view if the forest is regular. Slightly
smaller families are padded (and masked) if that saves a bucket.

The rows of a round are its *members*, family by family. They are taken from its *source*: leaves, and parents of earlier
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.softmax import masked_bias
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.lasting import lasting

BUCKET_COST = {"cpu": 128, "cuda": 2**15}
"""Rows of padding that cost about as much as one more bucket: many on a GPU, where a bucket is several small launches."""
ROW = 128
"""Entries of padding that cost as much as a row of padding."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Families of similar size. Indices are None if the bucket is its whole round, in order."""

    families: int
    size: int
    rows: Tensor | None  # [families * size] row in the round's source; padding repeats a real row
    parents: Tensor | None  # [families] row among the round's parents
    present: Tensor | None  # [families, size] False at padding; None: no padding
    real: Tensor | None  # [entries] indices of the entries that are not padding; None: no padding
    is_leaf: Tensor | None  # [families, size]; None: all members are leaves
    void: Tensor | None  # [families, size] members with a single leaf below, or leaves; None: all members are leaves
    log_count: Tensor | None  # [families or 1, 1, 1, size]; None: all zero
    share: Tensor  # [families or 1, 1, size] leaf_count(child) / leaf_count(parent)
    _cache: dict[Any, Any] = field(default_factory=dict)

    def mask(self, include_self: bool, causal: bool) -> tuple[Tensor, Tensor | None]:
        """Return the visible entries, `[families or 1, 1, size, size]`, and the members that see nothing.

        The latter are `[families or 1, size, 1]`, or None if every member sees something. Members see their siblings; with
        `include_self` leaves also see themselves; `causal`, the paper's mask, hides siblings to the right.
        """
        return self._cached(("mask", include_self, causal), lambda: self._build_mask(include_self, causal))

    def bias(self, include_self: bool, causal: bool, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return mask and log leaf counts as one tensor of logits, and the members that see nothing."""

        def build() -> tuple[Tensor | None, Tensor | None]:
            mask, alone = self.mask(include_self, causal)
            return masked_bias(dtype, self.log_count, mask), alone

        return self._cached(("bias", include_self, causal, dtype), build)

    def cast_share(self, dtype: torch.dtype) -> Tensor:
        return self._cached(("share", dtype), lambda: self.share.to(dtype))

    def _cached(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        return self._cache[key] if key in self._cache else self._build(key, build)

    @torch.compiler.disable
    def _build(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        with lasting():
            self._cache[key] = value = build()
        return value

    def of_parents(self, x: Tensor) -> Tensor:
        """Select the bucket's parents: `[parents, …]` of the round → `[families, …]`."""
        return x if self.parents is None else x.index_select(0, self.parents)

    def leaf_share(self, dtype: torch.dtype) -> Tensor:
        """Return the share of one member if all members are leaves, `[families or 1, 1]`."""
        return self.cast_share(dtype).amax(-1)

    def mean(self, members: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the mean over the leaves below each parent of some families: `[families, size, …]` → `[families, …]`."""
        share = self.cast_share(torch.promote_types(members.dtype, torch.float32))
        share = (share if len(share) == 1 else share[part]).expand(len(members), 1, self.size)
        return (share @ members.to(share.dtype).flatten(2)).view(len(members), *members.shape[2:])

    def _build_mask(self, include_self: bool, causal: bool) -> tuple[Tensor, Tensor | None]:
        eye = torch.eye(self.size, dtype=torch.bool, device=self.share.device)
        mask = (torch.ones_like(eye).tril(-1) if causal else ~eye)[None]
        if include_self:
            mask = mask | (eye if self.is_leaf is None else eye & self.is_leaf[:, :, None])
        if self.present is not None:
            mask = mask & self.present[:, None, :]
        alone = ~mask.any(-1, keepdim=True)
        return mask[:, None], alone if bool(alone.any()) else None


@dataclass(frozen=True, eq=False)
class Round:
    """Families of one height, and the rows that their members are taken from."""

    num_members: int
    num_parents: int
    leaf_members: Tensor | slice  # leaves among the members, in leaf order
    has_leaves: bool
    earlier: tuple[int, ...]  # rounds whose parents are among the members
    buckets: tuple[Bucket, ...]
    rows: Tensor | None  # [entries] rows of all buckets, concatenated; None: rows of the only bucket
    member_order: Tensor | None  # [members] index among the buckets' entries; None: one bucket, in order
    parent_order: Tensor | None  # [parents] index among the buckets' parents, concatenated; None: in order

    @property
    def only_leaves(self) -> bool:
        return not self.earlier

    def source(self, leaves: Tensor, parents: Sequence[Tensor]) -> Tensor:
        """Return the rows that the buckets index: leaf members first, then the parents of the earlier rounds."""
        parts = [parents[r] for r in self.earlier]
        if self.has_leaves:
            parts.insert(0, self._leaf_rows(leaves))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.to(parts[-1].dtype) for part in parts])

    def _leaf_rows(self, leaves: Tensor) -> Tensor:
        members = self.leaf_members
        if not isinstance(members, slice):
            return leaves.index_select(0, members)
        return leaves if members == slice(0, len(leaves)) else leaves[members]

    def split(self, source: Tensor) -> list[Tensor]:
        """Split the source into one `[families, size, …]` tensor per bucket."""
        rows = self.buckets[0].rows if self.rows is None else self.rows
        # One gather for all buckets: the gradient of a gather is as large as the source.
        entries = source if rows is None else source.index_select(0, rows)
        parts = entries.split([b.families * b.size for b in self.buckets])
        return [x.unflatten(0, (b.families, b.size)) for b, x in zip(self.buckets, parts, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join one `[families, size, …]` tensor per bucket into the rows of the members, in order."""
        if self.member_order is None:
            return parts[0].flatten(0, 1)
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self.member_order)

    def pool(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the mean over the leaves below each parent, given the members' means. Half precision pools in float32."""
        means = [bucket.mean(part) for bucket, part in zip(self.buckets, parts, strict=True)]
        return means[0] if self.parent_order is None else torch.cat(means).index_select(0, self.parent_order)


@dataclass(frozen=True, eq=False)
class Rounds:
    """Plan of both sweeps for one forest. Slots number the nodes: leaves first, then parents round by round."""

    num_leaves: int
    rounds: tuple[Round, ...]
    slot_of_node: Tensor  # [nodes]
    node_of_slot: Tensor  # [nodes]
    slot_bounds: tuple[int, ...]  # the parents of round r are slots slot_bounds[r] : slot_bounds[r + 1]
    roots: Tensor  # [trees] index among the parents of all rounds
    void_roots: Tensor  # [trees] whether the tree has a single leaf
    down: tuple[tuple[tuple[int, ...], Tensor | None], ...]
    """Positions of each round's parents in the down sweep: the later rounds in which they are members, and their rows
    among the concatenated members of these rounds, with one more row at the end for roots; None: all members of one round,
    in order."""
    leaf_rows: Tensor | None  # [leaves] row among the members of all rounds with leaves; None: first round, in order


def rounds(hierarchy: Hierarchy) -> Rounds:
    """Return the plan of a rooted forest (`rooted`), built once per hierarchy."""
    return hierarchy.cached("rounds", lambda: _build(hierarchy))


def rooted(hierarchy: Hierarchy, positions: Tensor | None = None) -> tuple[Hierarchy, Tensor | None]:
    """Return the forest with a root above every tree that is a single leaf, and the positions in its node order.

    A single leaf has no siblings, so the new root changes no result, and operators need no special case.
    """

    def build() -> tuple[Hierarchy, Tensor] | None:
        s = hierarchy.structure
        bare = np.flatnonzero(s.num_children[: hierarchy.num_trees] == 0)
        if len(bare) == 0:
            return None  # caching the hierarchy in itself would be a reference cycle, which delays freeing its tensors
        parent = np.concatenate([s.parent, np.full(len(bare), -1)])
        parent[bare] = hierarchy.num_nodes + np.arange(len(bare))
        rank = np.concatenate([s.first_leaf, s.first_leaf[bare]])
        forest = Hierarchy._from_parent_array(parent, rank, keep_ids=True).to(hierarchy.device)
        return forest, forest.node_ids.clamp(max=hierarchy.num_nodes - 1)

    changed = hierarchy.cached("rooted", build)
    if changed is None:
        return hierarchy, positions
    forest, rows = changed
    return forest, None if positions is None else positions.index_select(0, rows)


def _build(hierarchy: Hierarchy) -> Rounds:
    s, device = hierarchy.structure, hierarchy.device
    num_leaves = hierarchy.num_leaves

    def tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array)).to(device)

    parents = np.flatnonzero(s.num_children > 0)
    parents = parents[np.lexsort((s.first_leaf[parents], s.height[parents]))]
    heights = s.height[parents]
    bounds = num_leaves + np.searchsorted(heights, np.arange(1, heights.max(initial=0) + 2))
    node_of_slot = np.concatenate([s.leaf_nodes, parents])
    slot_of_node = np.empty_like(node_of_slot)
    slot_of_node[node_of_slot] = np.arange(len(node_of_slot))

    void = s.is_leaf.copy()
    bucket_cost = BUCKET_COST.get(device.type, BUCKET_COST["cuda"])
    plans, members = [], []
    for begin, end in pairwise(bounds):
        above = node_of_slot[begin:end]
        sizes = s.num_children[above]
        starts = np.cumsum(sizes) - sizes
        nodes = np.repeat(s.first_child[above] - starts, sizes) + np.arange(int(sizes.sum()))
        void[above] = (sizes == 1) & void[s.first_child[above]]
        plans.append(
            _build_round(s.leaf_count, void, nodes, slot_of_node[nodes], above, sizes, bounds, tensor, bucket_cost)
        )
        members.append(nodes)

    # For the down sweep: every node below a root is a member of one round.
    round_of = np.zeros(len(s.parent), np.int64)
    row_of = np.zeros(len(s.parent), np.int64)
    for r, nodes in enumerate(members):
        round_of[nodes], row_of[nodes] = r, np.arange(len(nodes))

    def rows_among(nodes: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """Return the rounds in which the nodes are members, and their rows among these members; roots come last."""
        is_root = s.parent[nodes] < 0
        homes = tuple(sorted(set(round_of[nodes[~is_root]].tolist())))
        sizes = [len(members[r]) for r in homes]
        shift = np.zeros(len(members), np.int64)
        shift[list(homes)] = np.cumsum(sizes) - sizes
        return homes, np.where(is_root, sum(sizes), shift[round_of[nodes]] + row_of[nodes])

    def unless_in_order(homes: tuple[int, ...], rows: np.ndarray) -> Tensor | None:
        whole = len(homes) == 1 and len(rows) == len(members[homes[0]])
        return None if whole and (rows == np.arange(len(rows))).all() else tensor(rows)

    down = []
    for begin, end in pairwise(bounds):
        homes, rows = rows_among(node_of_slot[begin:end])
        down.append((homes, unless_in_order(homes, rows)))
    leaf_rows = unless_in_order(*rows_among(s.leaf_nodes)) if num_leaves else None
    return Rounds(
        num_leaves=num_leaves,
        rounds=tuple(plans),
        slot_of_node=tensor(slot_of_node),
        node_of_slot=tensor(node_of_slot),
        slot_bounds=tuple(bounds.tolist()),
        roots=tensor(slot_of_node[: hierarchy.num_trees] - num_leaves),
        void_roots=tensor(void[: hierarchy.num_trees]),
        down=tuple(down),
        leaf_rows=leaf_rows,
    )


def _build_round(
    leaf_count: np.ndarray,
    void: np.ndarray,
    nodes: np.ndarray,
    slots: np.ndarray,
    above: np.ndarray,
    sizes: np.ndarray,
    bounds: np.ndarray,
    tensor: Any,
    bucket_cost: int,
) -> Round:
    num_leaves = int(bounds[0])
    is_leaf = slots < num_leaves
    leaf_members = np.sort(slots[is_leaf])
    round_of = np.searchsorted(bounds, slots, side="right") - 1
    earlier = tuple(sorted(set(round_of[~is_leaf].tolist())))
    shift = np.zeros(len(bounds), np.int64)
    total = len(leaf_members)
    for r in earlier:
        shift[r] = total - bounds[r]
        total += int(bounds[r + 1] - bounds[r])
    rows = np.where(is_leaf, np.searchsorted(leaf_members, slots), shift[round_of] + slots)
    in_order = total == len(nodes) and (rows == np.arange(total)).all()

    starts = np.cumsum(sizes) - sizes
    padded = padded_sizes(sizes, bucket_cost)
    buckets, parent_order, member_order = [], [], []
    for size in np.unique(padded):
        some = np.flatnonzero(padded == size)
        parent_order.append(some)
        present = np.arange(size) < sizes[some][:, None]
        members = np.where(present, starts[some][:, None] + np.arange(size), starts[some][:, None])
        counts = np.where(present, leaf_count[nodes[members]], 0)
        log_count = _once(np.log(np.maximum(counts, 1)))
        share = _once(counts / leaf_count[above[some]][:, None])
        leaf = is_leaf[members]
        has_padding = not present.all()
        whole = len(some) == len(sizes)
        member_order.append(np.where(present, members, -1).ravel())
        buckets.append(
            Bucket(
                families=len(some),
                size=int(size),
                rows=None if whole and not has_padding and in_order else tensor(rows[members].ravel()),
                parents=None if whole else tensor(some),
                present=tensor(present) if has_padding else None,
                real=tensor(np.flatnonzero(present)) if has_padding else None,
                is_leaf=None if leaf.all() else tensor(leaf & present),
                void=None if leaf.all() else tensor(void[nodes[members]]),
                log_count=tensor(log_count)[:, None, None] if log_count.any() else None,
                share=tensor(share)[:, None],
            )
        )
    entries = np.concatenate(member_order)
    entry_of_member = np.empty(len(nodes), np.int64)
    entry_of_member[entries[entries >= 0]] = np.flatnonzero(entries >= 0)
    return Round(
        num_members=len(nodes),
        num_parents=len(above),
        leaf_members=_slice(leaf_members) or tensor(leaf_members),
        has_leaves=len(leaf_members) > 0,
        earlier=earlier,
        buckets=tuple(buckets),
        rows=torch.cat([b.rows for b in buckets if b.rows is not None]) if len(buckets) > 1 else None,
        member_order=None if len(buckets) == 1 and not (entries < 0).any() else tensor(entry_of_member),
        parent_order=tensor(np.argsort(np.concatenate(parent_order))) if len(buckets) > 1 else None,
    )


def _slice(numbers: np.ndarray) -> slice | None:
    """Return consecutive numbers as a slice; None for other numbers."""
    whole = len(numbers) > 0 and numbers[-1] - numbers[0] + 1 == len(numbers)
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if whole else None


def _once(rows: np.ndarray) -> np.ndarray:
    """Return a single row if all rows are equal, else all of them."""
    return rows[:1] if (rows == rows[:1]).all() else rows


def padded_sizes(sizes: np.ndarray, bucket_cost: int) -> np.ndarray:
    """Return the size of every family's bucket: the family's own size, or a slightly larger one if that saves a bucket.

    Starting with the largest families, a bucket takes in smaller ones as long as the padding is at most one row in sixteen,
    or at most `bucket_cost` rows. The entries, size² per family, are limited too, because they take the most memory.
    """
    kinds, counts = np.unique(sizes, return_counts=True)
    bucket_of_kind = kinds.copy()
    rows = padding = entries = padding_entries = top = 0
    for i in reversed(range(len(kinds))):
        size, count = int(kinds[i]), int(counts[i])
        rows, entries = rows + size * count, entries + size**2 * count
        padding, padding_entries = padding + (top - size) * count, padding_entries + (top**2 - size**2) * count
        if top == 0 or padding > bucket_cost + rows // 16 or padding_entries > ROW * bucket_cost + entries // 4:
            top, rows, entries, padding, padding_entries = size, size * count, size**2 * count, 0, 0
        bucket_of_kind[i] = top
    return bucket_of_kind[np.searchsorted(kinds, sizes)]
