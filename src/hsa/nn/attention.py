"""The attentions a layer can be given. Each maps packed q, k, v `[leaves, heads, dim]` to `[leaves, heads, dim]`.

All take `(q, k, v, hierarchy, positions, mixing)`; `counting_operations` collects what each call costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from hsa.attention.flops import Flops, flops
from hsa.attention.hierarchical.operator import hierarchical_attention, prepare
from hsa.attention.kernels.available import why_not_forest
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.cluster import cluster_keys
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.select import select
from hsa.attention.multiscale.selection import Selection
from hsa.attention.rounds import rooted, rounds
from hsa.nn.buckets import alike, padded, way_back
from hsa.nn.learned_alpha import LearnedAlpha, normalizer_of, planned_for
from hsa.tree.hierarchy import Hierarchy

_WIDEST = 256
"""Channels that fused kernels take."""
_COUNTS: ContextVar[list[Flops] | None] = ContextVar("_COUNTS", default=None)


@contextmanager
def counting_operations() -> Iterator[list[Flops]]:
    """Collect the cost of every call of attention inside the block: one entry per layer.

    >>> tree = Hierarchy.flat([5])
    >>> with counting_operations() as counts:
    ...     _ = Flat()(*torch.randn(3, 5, 2, 8).unbind(0), tree, None)
    >>> counts[0].attention  # (4·width + heads)·5²
    1650
    """
    counts: list[Flops] = []
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
        outer = _COUNTS.get()
        if outer is not None:
            outer.extend(counts)


def is_counting() -> bool:
    return _COUNTS.get() is not None


def note_flops(cost: Flops) -> None:
    """Add the cost of a call to `counting_operations`."""
    counts = _COUNTS.get()
    if counts is not None:
        counts.append(cost)


def note_operations(
    q: Tensor, v: Tensor, structure: Hierarchy | Selection, mixing: HeadMixing | None = None, **more: Any
) -> None:
    """Add the cost of a call, computed from a structure only while somebody counts."""
    if is_counting():
        heads = q.shape[1]
        sizes: dict[str, Any] = {"value_width": heads * v.shape[2], "mixes": mixing is not None}
        note_flops(flops(structure, heads * q.shape[2], heads, **sizes, **more))


class Attention(nn.Module):
    """Base class of the attentions."""

    uses_positions = True
    """Whether position logits have a meaning for it."""
    parts: tuple[str, ...] = ("q", "k", "v")
    """What a layer projects for it, in this order."""
    mixes = True
    """Whether heads that talk have something to talk about: they look at the same nodes."""

    def prepare(self, hierarchy: Hierarchy) -> None:
        """Build what depends on the forest alone, ahead of the first call."""


class Hierarchical(Attention):
    """The paper's operator: rows and columns tied over pairs of siblings; `alpha`: by entmax in place of softmax."""

    def __init__(self, *, include_self: bool = True, alpha: float | LearnedAlpha | None = None):
        super().__init__()
        self.include_self, self.alpha = include_self, alpha

    def prepare(self, hierarchy: Hierarchy) -> None:
        prepare(hierarchy, planned_for(self.alpha), include_self=self.include_self)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        note_operations(q, v, hierarchy, mixing)
        return hierarchical_attention(
            q,
            k,
            v,
            hierarchy,
            positions=positions,
            include_self=self.include_self,
            normalizer=normalizer_of(self.alpha),
            mixing=mixing,
        )


class Multiscale(Attention):
    """Every query keeps its row: the own leaf family, `near` neighbours and the `top_k` best exactly, the rest pooled.

    A learned bias per head weighs pooled against exact; `alpha`: by entmax in place of softmax.
    """

    def __init__(self, heads: int, *, near: int = 0, top_k: int = 0, alpha: float | LearnedAlpha | None = None):
        super().__init__()
        self.near, self.top_k, self.alpha = near, top_k, alpha
        self.mixes = top_k == 0
        self.pooled_bias = nn.Parameter(torch.zeros(heads))

    def prepare(self, hierarchy: Hierarchy) -> None:
        forest = rooted(hierarchy)[0]
        if forest.device.type != "cuda" or self.alpha is not None or why_not_forest(forest):
            rounds(forest)
        if not self.top_k:
            self._nearest(hierarchy)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        selection = self.selection(q, k, hierarchy, positions)
        note_operations(q, v, selection, mixing, hierarchy=hierarchy)
        return multiscale_attention(
            q,
            k,
            v,
            hierarchy,
            selection=selection,
            positions=positions,
            normalizer=normalizer_of(self.alpha),
            pooled_bias=self.pooled_bias,
            mixing=mixing,
        )

    def selection(self, q: Tensor, k: Tensor, hierarchy: Hierarchy, positions: Tensor | None) -> Selection:
        """Return what its queries read leaf by leaf."""
        if not self.top_k:
            return self._nearest(hierarchy)
        return select(q, k, hierarchy, near=self.near, top_k=self.top_k, positions=positions)

    def _nearest(self, hierarchy: Hierarchy) -> Selection:
        """Return the selection that depends on the tree alone: all layers and heads share it."""

        def build() -> Selection:
            any_rows = torch.empty(hierarchy.num_leaves, 1, 1, device=hierarchy.device)
            return select(any_rows, any_rows, hierarchy, near=self.near)

        return hierarchy.cached(("near", self.near), build)


class Clustered(Attention):
    """Multiscale attention over the clustered keys of each head: groups of `group` keys, the `top_k` best of them exact."""

    uses_positions = False
    mixes = False

    def __init__(self, heads: int, *, group: int = 8, top_k: int = 8, tile: int = 16):
        super().__init__()
        self.group, self.top_k, self.tile = group, top_k, tile
        self.pooled_bias = nn.Parameter(torch.zeros(heads))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        tree = hierarchy.cached(
            ("binary", self.group),
            lambda: Hierarchy.regular(hierarchy.lengths, (self.group, 2), repeat_last=True).to(hierarchy.device),
        )
        queries = Queries.windows(tree, self.tile)
        clusters = cluster_keys(k, tree)
        selection = select(q, k, tree, queries=queries, top_k=self.top_k, clusters=clusters)
        note_operations(q, v, selection, mixing, hierarchy=tree, clusters=clusters)
        bias = self.pooled_bias
        return multiscale_attention(
            q, k, v, tree, selection=selection, clusters=clusters, pooled_bias=bias, mixing=mixing
        )


class Flat(Attention):
    """Softmax attention over all leaves of a tree, by PyTorch's fused kernels.

    Half precision on a GPU takes all trees in one call, as they lie. Elsewhere, trees of like length share a call, and the
    mask of the padding travels as a further channel of q and k, as position logits do: that keeps the fastest kernels
    available. The hierarchy must be flat for positions to be those of siblings.
    """

    def prepare(self, hierarchy: Hierarchy) -> None:
        if hierarchy.device.type == "cpu":
            _by_length(hierarchy)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        positions: Tensor | None,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        if is_counting():
            note_operations(q, v, flat_tree(hierarchy), mixing)
        if mixing is not None:  # fused kernels do not mix
            return hierarchical_attention(
                q, k, v, flat_tree(hierarchy), positions=positions, include_self=True, mixing=mixing
            )
        if not len(q):
            return v
        if torch.is_autocast_enabled(q.device.type):  # norms and gathers before this may have made float32
            half = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(half), k.to(half), v.to(half)
        heads, dim = q.shape[1:]
        q_parts, k_parts = [q * dim**-0.5], [k]
        if positions is not None:
            ε = positions.index_select(0, hierarchy.tensor("leaf_nodes")).to(q.dtype).expand(-1, heads, -1)
            q_parts, k_parts = [*q_parts, ε], [*k_parts, ε]
        q, k = torch.cat(q_parts, -1), torch.cat(k_parts, -1)
        if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= _WIDEST:
            return _packed(q, k, v, hierarchy)
        parts = []
        lengths = _by_length(hierarchy)
        for bucket in lengths.buckets:
            rows = [t.index_select(0, bucket.rows).unflatten(0, bucket.shape).transpose(1, 2) for t in (q, k, v)]
            if bucket.absent is not None:
                rows[0] = F.pad(rows[0], (0, 1), value=1.0)
                rows[1] = torch.cat([rows[1], bucket.absent[:, None, :, None].expand(-1, heads, -1, 1).to(k.dtype)], -1)
            rows = _equally_wide(rows)
            attended = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], scale=1.0)[..., : v.shape[-1]]
            parts.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, lengths.back)


def _packed(q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy) -> Tensor:
    """All trees in one call, without padding. (cuDNN, which PyTorch prefers for buckets, plans anew for every shape.)"""
    offsets = hierarchy.cached("offsets of trees", lambda: hierarchy.tensor("leaf_offsets").to(torch.int32))
    longest = int(max(hierarchy.lengths))
    rows = _equally_wide([q, k, v])
    attended: Any = varlen_attn(rows[0], rows[1], rows[2], offsets, offsets, longest, longest, scale=1.0)
    return attended[..., : v.shape[-1]]


def _equally_wide(parts: list[Tensor]) -> list[Tensor]:
    """Fused kernels want channels in eights, and as many in v as in q and k."""
    whole = -(-max(part.shape[-1] for part in parts) // 8) * 8
    return [F.pad(part, (0, whole - part.shape[-1])) for part in parts]


def flat_tree(hierarchy: Hierarchy) -> Hierarchy:
    """The same leaves, all directly under their roots."""
    return hierarchy.cached("flat", lambda: Hierarchy.flat(hierarchy.lengths).to(hierarchy.device))


@dataclass(frozen=True, eq=False)
class _Bucket:
    rows: Tensor  # [trees · longest] leaf of every slot; padding repeats a tree's last leaf
    shape: tuple[int, int]  # trees, longest
    absent: Tensor | None  # [trees, longest] a large negative number at padding, else 0; None: no padding


@dataclass(frozen=True, eq=False)
class _Lengths:
    buckets: tuple[_Bucket, ...]
    back: Tensor  # [leaves] the row of every leaf among the rows of all buckets


def _by_length(hierarchy: Hierarchy) -> _Lengths:
    """Trees of like length together."""
    return hierarchy.cached("lengths", lambda: _bucketed(hierarchy))


def _bucketed(hierarchy: Hierarchy) -> _Lengths:
    offsets, device = hierarchy.structure.leaf_offsets, hierarchy.device
    first, lengths = offsets[:-1], np.diff(offsets)
    groups = alike(lengths)
    buckets = []
    for trees in groups:
        rows = padded(first[trees], lengths[trees])
        absent = np.where(np.arange(rows.shape[1]) < lengths[trees][:, None], 0.0, -3e4).astype(np.float32)
        buckets.append(
            _Bucket(
                torch.from_numpy(rows.reshape(-1)).to(device),
                rows.shape,
                torch.from_numpy(absent).to(device) if absent.any() else None,
            )
        )
    return _Lengths(tuple(buckets), torch.from_numpy(way_back(groups, first, lengths)).to(device))
