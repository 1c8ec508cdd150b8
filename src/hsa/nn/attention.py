"""Attention modules of an encoder layer. Each maps packed q, k, v `[leaves, heads, dim]` to `[leaves, heads, dim]`.

All are called as `attention(q, k, v, hierarchy, positions, mixing)`. `counting_operations` collects the cost of each call.
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
from hsa.nn.buckets import group_by_size, padded_rows, rows_after_padding
from hsa.nn.learned_alpha import LearnedAlpha, normalizer_for_plans, normalizer_of
from hsa.tree.hierarchy import Hierarchy

_WIDEST = 256
"""Maximum number of channels that the fused kernels support."""
_COUNTS: ContextVar[list[Flops] | None] = ContextVar("_COUNTS", default=None)


@contextmanager
def counting_operations() -> Iterator[list[Flops]]:
    """Collect the cost of every attention call in the block, one entry per call.

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
    """Return whether `counting_operations` is active."""
    return _COUNTS.get() is not None


def note_flops(cost: Flops) -> None:
    """Add the cost of a call to the list of `counting_operations`, if active."""
    counts = _COUNTS.get()
    if counts is not None:
        counts.append(cost)


def note_operations(
    q: Tensor, v: Tensor, structure: Hierarchy | Selection, mixing: HeadMixing | None = None, **more: Any
) -> None:
    """Compute the cost of a call from its tree or selection and add it, if `counting_operations` is active."""
    if is_counting():
        heads = q.shape[1]
        sizes: dict[str, Any] = {"value_width": heads * v.shape[2], "mixes": mixing is not None}
        note_flops(flops(structure, heads * q.shape[2], heads, **sizes, **more))


class Attention(nn.Module):
    """Base class of the attention modules."""

    uses_positions = True
    """Whether position logits are added to the logits."""
    parts: tuple[str, ...] = ("q", "k", "v")
    """Names of the projections that the layer passes, in this order."""
    mixes = True
    """Whether heads can be mixed (talking heads): all of them attend to the same nodes."""

    def prepare(self, hierarchy: Hierarchy) -> None:
        """Build and cache everything that depends on the forest alone."""


class Hierarchical(Attention):
    """Hierarchical attention, the paper's operator: attention weights are tied over pairs of siblings.

    Args:
        include_self: Whether leaves attend to themselves.
        alpha: α of entmax, which replaces softmax; None for softmax.
    """

    def __init__(self, *, include_self: bool = True, alpha: float | LearnedAlpha | None = None):
        super().__init__()
        self.include_self, self.alpha = include_self, alpha

    def prepare(self, hierarchy: Hierarchy) -> None:
        prepare(hierarchy, normalizer_for_plans(self.alpha), include_self=self.include_self)

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
    """Multiscale attention: each query attends exactly to some leaf families and to pooled nodes for the rest.

    A learned bias per head is added to the logits of pooled nodes.

    Args:
        heads: Number of heads.
        near: Number of neighbouring leaf families on each side to attend to exactly, besides the query's own.
        top_k: Number of further leaf families to attend to exactly: the best ones.
        alpha: α of entmax, which replaces softmax; None for softmax.
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
        """Return the leaf families that the queries attend to exactly."""
        if not self.top_k:
            return self._nearest(hierarchy)
        return select(q, k, hierarchy, near=self.near, top_k=self.top_k, positions=positions)

    def _nearest(self, hierarchy: Hierarchy) -> Selection:
        """Return the selection without `top_k`. It depends on the tree alone, so that all layers and heads share it."""

        def build() -> Selection:
            unused = torch.empty(hierarchy.num_leaves, 1, 1, device=hierarchy.device)  # only its shape matters
            return select(unused, unused, hierarchy, near=self.near)

        return hierarchy.cached(("near", self.near), build)


class Clustered(Attention):
    """Multiscale attention over the clustered keys of each head.

    A learned bias per head is added to the logits of pooled nodes.

    Args:
        heads: Number of heads.
        group: Keys per group.
        top_k: Number of groups to attend to exactly: the best ones.
        tile: Number of neighbouring queries that share a selection.
    """

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

    In half precision on a GPU, one call processes all trees without padding. Elsewhere, trees of similar length share a
    padded call. Position logits and the padding mask become further channels of q and k, because the fastest kernels take
    no mask. With positions, the hierarchy must be flat: only siblings have position logits.
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
        if torch.is_autocast_enabled(q.device.type):  # earlier norms and gathers may return float32
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
        by_length = _by_length(hierarchy)
        for bucket in by_length.buckets:
            rows = [t.index_select(0, bucket.rows).unflatten(0, bucket.shape).transpose(1, 2) for t in (q, k, v)]
            if bucket.mask is not None:
                rows[0] = F.pad(rows[0], (0, 1), value=1.0)
                rows[1] = torch.cat([rows[1], bucket.mask[:, None, :, None].expand(-1, heads, -1, 1).to(k.dtype)], -1)
            rows = _equally_wide(rows)
            attended = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], scale=1.0)[..., : v.shape[-1]]
            parts.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, by_length.back)


def _packed(q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy) -> Tensor:
    """Attend in all trees with one call and without padding.

    This avoids cuDNN, which PyTorch would choose for padded batches and which plans anew for every shape.
    """
    offsets = hierarchy.cached("offsets of trees", lambda: hierarchy.tensor("leaf_offsets").to(torch.int32))
    longest = int(max(hierarchy.lengths))
    rows = _equally_wide([q, k, v])
    attended: Any = varlen_attn(rows[0], rows[1], rows[2], offsets, offsets, longest, longest, scale=1.0)
    return attended[..., : v.shape[-1]]


def _equally_wide(parts: list[Tensor]) -> list[Tensor]:
    """Pad q, k and v to the same multiple of 8 channels, as the fused kernels require."""
    whole = -(-max(part.shape[-1] for part in parts) // 8) * 8
    return [F.pad(part, (0, whole - part.shape[-1])) for part in parts]


def flat_tree(hierarchy: Hierarchy) -> Hierarchy:
    """Return the forest with the same leaves directly under their roots."""
    return hierarchy.cached("flat", lambda: Hierarchy.flat(hierarchy.lengths).to(hierarchy.device))


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Trees of similar length, padded to the longest."""

    rows: Tensor  # [trees · longest] leaf of every slot; padding repeats a tree's last leaf
    shape: tuple[int, int]  # trees, longest
    mask: Tensor | None  # [trees, longest] a large negative number at padding, else 0; None without padding


@dataclass(frozen=True, eq=False)
class _Buckets:
    """All trees in buckets, and the way back to packed leaves."""

    buckets: tuple[_Bucket, ...]
    back: Tensor  # [leaves] row of every leaf among the rows of all buckets


def _by_length(hierarchy: Hierarchy) -> _Buckets:
    """Return the trees in buckets of similar length."""
    return hierarchy.cached("lengths", lambda: _bucketed(hierarchy))


def _bucketed(hierarchy: Hierarchy) -> _Buckets:
    offsets, device = hierarchy.structure.leaf_offsets, hierarchy.device
    first, lengths = offsets[:-1], np.diff(offsets)
    groups = group_by_size(lengths)
    buckets = []
    for trees in groups:
        rows = padded_rows(first[trees], lengths[trees])
        mask = np.where(np.arange(rows.shape[1]) < lengths[trees][:, None], 0.0, -3e4).astype(np.float32)
        buckets.append(
            _Bucket(
                torch.from_numpy(rows.reshape(-1)).to(device),
                rows.shape,
                torch.from_numpy(mask).to(device) if mask.any() else None,
            )
        )
    return _Buckets(tuple(buckets), torch.from_numpy(rows_after_padding(groups, first, lengths)).to(device))
