"""The order of the sweeps: which families are worked on together.

A *round* holds all families whose parent has the same height: the first every family of leaves only, wherever it hangs,
the last the tallest roots. Upwards, members are ready before their family; downwards, in reverse, parents are. Inside a
round, families of one size form a *bucket*: a dense `[families, size, …]` tensor, a view where the forest is regular.
Long families are rounded up to one of four sizes per doubling, so that the number of buckets stays small whatever the
data; the padding is masked.

The rows of a round are its *members*, family after family. They come from its *source*: leaves, and parents of earlier
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.hierarchy import Hierarchy

EXACT_SIZES = 8
"""Families up to this size are never padded."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Families of one size. Indices are None where the bucket is its whole round, in order."""

    families: int
    size: int
    rows: Tensor | None  # [families * size] row in the round's source; padding repeats a real row
    members: Tensor | None  # [families * size] row among the round's members
    parents: Tensor | None  # [families] row among the round's parents
    present: Tensor | None  # [families, size] False at padding; None: no padding
    real: Tensor | None  # positions of the entries that are no padding
    is_leaf: Tensor | None  # [families, size]; None: all members are leaves
    void: Tensor | None  # [families, size] a leaf, or a chain down to a single one; None: all members are leaves
    log_count: Tensor | None  # [families or 1, 1, 1, size]; None: all zero
    share: Tensor  # [families or 1, 1, size] leaf_count(child) / leaf_count(parent)
    _masks: dict[tuple[bool, bool], tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def mask(self, include_self: bool, causal: bool) -> tuple[Tensor, Tensor | None]:
        """Who sees whom, `[families or 1, 1, size, size]`, and who sees nobody, `[families or 1, size, 1]` (None: no one).

        Members see their siblings; with `include_self` leaves see themselves too; causal hides siblings to the right.
        """
        key = (include_self, causal)
        if key not in self._masks:
            self._masks[key] = self._build_mask(*key)
        return self._masks[key]

    @torch.compiler.disable
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
    """Families of one height, with the places their members come from."""

    num_members: int
    leaf_members: Tensor | None  # the leaves among the members, in leaf order; None: all leaves of the forest
    has_leaves: bool
    earlier: tuple[int, ...]  # rounds whose parents are among the members
    buckets: tuple[Bucket, ...]
    parent_order: Tensor | None  # puts the buckets' parents, concatenated, in order; None: they are

    def source(self, leaves: Tensor, parents: Sequence[Tensor]) -> Tensor:
        """The rows that `buckets` index: leaf members first, then the parents of the earlier rounds."""
        parts = [parents[r] for r in self.earlier]
        if self.has_leaves:
            parts.insert(0, leaves if self.leaf_members is None else leaves.index_select(0, self.leaf_members))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.to(parts[-1].dtype) for part in parts])

    def split(self, source: Tensor) -> list[Tensor]:
        """The source as one `[families, size, …]` tensor per bucket."""
        first = self.buckets[0]
        if first.rows is None:
            return [source.unflatten(0, (first.families, first.size))]
        return list(_Split.apply(source, self.buckets))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The members' rows, in order, from one `[families, size, …]` tensor per bucket."""
        if self.buckets[0].members is None:
            return parts[0].flatten(0, 1)
        return _Join.apply(self.num_members, self.buckets, *parts)

    def pool(self, parts: Sequence[Tensor]) -> Tensor:
        """Mean over the leaves below each parent, from the members' means. Half precision pools in float32."""
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        means = []
        for bucket, part in zip(self.buckets, parts, strict=True):
            share = bucket.share.to(dtype).expand(bucket.families, 1, bucket.size)
            means.append((share @ part.to(dtype).flatten(2)).view(bucket.families, *part.shape[2:]))
        return means[0] if self.parent_order is None else torch.cat(means).index_select(0, self.parent_order)


@dataclass(frozen=True, eq=False)
class Rounds:
    """The plan of both sweeps for one forest. Slots number the nodes: leaves first, then parents round by round."""

    num_leaves: int
    rounds: tuple[Round, ...]
    slot_of_node: Tensor  # [nodes]
    node_of_slot: Tensor
    slot_bounds: tuple[int, ...]  # the parents of round r are slots slot_bounds[r] : slot_bounds[r + 1]
    roots: Tensor  # [trees] among the parents of all rounds
    void_roots: Tensor  # [trees] trees of a single leaf
    down: tuple[tuple[tuple[int, ...], Tensor | None], ...]
    """Per round: the later rounds whose members its parents are, and their rows among those members, concatenated, with
    one more row for "is a root" at the end; None: the members of one round in order."""
    leaf_rows: Tensor | None  # [leaves] among the members of all rounds with leaves; None: the first round's in order


def rounds(hierarchy: Hierarchy) -> Rounds:
    """The plan of a rooted forest (`rooted`), built once per hierarchy."""
    return hierarchy.cached("rounds", lambda: _build(hierarchy))


def rooted(hierarchy: Hierarchy, positions: Tensor | None = None) -> tuple[Hierarchy, Tensor | None]:
    """The forest with a parent above every tree that is a single leaf, and the positions in its node order.

    A single leaf has no siblings, so the new root changes no result; it spares every operator a special case.
    """

    def build() -> tuple[Hierarchy, Tensor | None]:
        s = hierarchy.structure
        bare = np.flatnonzero(s.num_children[: hierarchy.num_trees] == 0)
        if len(bare) == 0:
            return hierarchy, None
        parent = np.concatenate([s.parent, np.full(len(bare), -1)])
        parent[bare] = hierarchy.num_nodes + np.arange(len(bare))
        rank = np.concatenate([s.first_leaf, s.first_leaf[bare]])
        forest = Hierarchy._from_parent_array(parent, rank, keep_ids=True).to(hierarchy.device)
        return forest, forest.node_ids.clamp(max=hierarchy.num_nodes - 1)

    forest, rows = hierarchy.cached("rooted", build)
    return forest, positions if positions is None or rows is None else positions.index_select(0, rows)


class _Split(torch.autograd.Function):
    """Every row is taken at most once, so that the gradient is a copy back instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, buckets: tuple[Bucket, ...]) -> tuple[Tensor, ...]:
        ctx.buckets, ctx.num_rows = buckets, len(source)
        return tuple(source.index_select(0, b.rows).unflatten(0, (b.families, b.size)) for b in buckets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _put(ctx.num_rows, [b.rows for b in ctx.buckets], ctx.buckets, grads), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_members: int, buckets: tuple[Bucket, ...], *parts: Tensor) -> Tensor:
        ctx.buckets = buckets
        return _put(num_members, [b.members for b in buckets], buckets, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = []
        for b in ctx.buckets:
            part = grad.index_select(0, b.members).unflatten(0, (b.families, b.size))
            if b.present is not None:
                part = part.masked_fill(~b.present.view(b.families, b.size, *[1] * (part.ndim - 2)), 0)
            parts.append(part)
        return None, None, *parts


def _put(num_rows: int, rows: Sequence[Any], buckets: Sequence[Bucket], parts: Sequence[Tensor]) -> Tensor:
    """Copy every entry that is no padding to its row; other rows are 0."""
    covered = sum(b.families * b.size if b.real is None else len(b.real) for b in buckets)
    make = parts[0].new_empty if covered == num_rows else parts[0].new_zeros
    result = make(num_rows, *parts[0].shape[2:])
    for row, bucket, part in zip(rows, buckets, parts, strict=True):
        flat = part.flatten(0, 1)
        if bucket.real is not None:
            flat, row = flat.index_select(0, bucket.real), row.index_select(0, bucket.real)
        result.index_copy_(0, row, flat)
    return result


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
    plans, members = [], []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        above = node_of_slot[begin:end]
        sizes = s.num_children[above]
        starts = np.cumsum(sizes) - sizes
        nodes = np.repeat(s.first_child[above] - starts, sizes) + np.arange(int(sizes.sum()))
        void[above] = (sizes == 1) & void[s.first_child[above]]
        plans.append(_build_round(s.leaf_count, void, nodes, slot_of_node[nodes], above, sizes, bounds, tensor))
        members.append(nodes)

    # Downwards: every node below a root is a member of one round.
    round_of = np.zeros(len(s.parent), np.int64)
    row_of = np.zeros(len(s.parent), np.int64)
    for r, nodes in enumerate(members):
        round_of[nodes], row_of[nodes] = r, np.arange(len(nodes))

    def rows_among(nodes: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """The rounds these nodes are members of, and their rows among those members, concatenated; roots come last."""
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
    for begin, end in zip(bounds, bounds[1:], strict=False):
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
    padded = _padded_sizes(sizes)
    buckets, parent_order = [], []
    for size in np.unique(padded):
        chosen = np.flatnonzero(padded == size)
        parent_order.append(chosen)
        present = np.arange(size) < sizes[chosen][:, None]
        members = np.where(present, starts[chosen][:, None] + np.arange(size), starts[chosen][:, None])
        counts = np.where(present, leaf_count[nodes[members]], 0)
        log_count = _once(np.log(np.maximum(counts, 1)))
        share = _once(counts / leaf_count[above[chosen]][:, None])
        leaf = is_leaf[members]
        has_padding = not present.all()
        whole = len(chosen) == len(sizes)
        buckets.append(
            Bucket(
                families=len(chosen),
                size=int(size),
                rows=None if whole and not has_padding and in_order else tensor(rows[members].ravel()),
                members=None if whole and not has_padding else tensor(members.ravel()),
                parents=None if whole else tensor(chosen),
                present=tensor(present) if has_padding else None,
                real=tensor(np.flatnonzero(present)) if has_padding else None,
                is_leaf=None if leaf.all() else tensor(leaf & present),
                void=None if leaf.all() else tensor(void[nodes[members]]),
                log_count=tensor(log_count)[:, None, None] if log_count.any() else None,
                share=tensor(share)[:, None],
            )
        )
    return Round(
        num_members=len(nodes),
        leaf_members=None if len(leaf_members) == num_leaves else tensor(leaf_members),
        has_leaves=len(leaf_members) > 0,
        earlier=earlier,
        buckets=tuple(buckets),
        parent_order=tensor(np.argsort(np.concatenate(parent_order))) if len(buckets) > 1 else None,
    )


def _once(rows: np.ndarray) -> np.ndarray:
    """One row where all are equal."""
    return rows[:1] if (rows == rows[:1]).all() else rows


def _padded_sizes(sizes: np.ndarray) -> np.ndarray:
    """Sizes as they are up to `EXACT_SIZES`, above it rounded up to one of four steps per doubling."""
    step = 2 ** np.maximum(np.floor(np.log2(np.maximum(sizes - 1, 1))).astype(np.int64) - 2, 0)
    return np.where(sizes <= EXACT_SIZES, sizes, -(-sizes // step) * step)
