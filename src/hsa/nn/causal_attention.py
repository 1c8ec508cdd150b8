"""Causal attention modules of a decoder layer.

All take packed q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]` and a forest with one tree per sequence, whose
leaves are the tokens in order. No result depends on a later token, so that decoding token by token from a cache returns the
same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Cache
from hsa.attention.clustered.flops import operations
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import BRANCHING, TILE, Shape
from hsa.attention.clustered.operator import check_rule, cluster, clustered_attention, select_groups
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.flops import Flops, entry_operations
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.select import select
from hsa.attention.multiscale.selection import Selection
from hsa.errors import Unsupported
from hsa.nn.attention import flat_tree, is_counting, note_flops, note_operations
from hsa.tree.hierarchy import Hierarchy


class CausalAttention(nn.Module):
    """Base class of the causal attention modules.

    Args:
        pooling_heads: Number of heads that attend to pooled nodes, each with a learned bias; 0 if nothing is pooled.
    """

    mixes = True
    """Whether heads can be mixed (talking heads): all of them attend to the same nodes."""

    def __init__(self, pooling_heads: int = 0):
        super().__init__()
        self.pooled_bias = nn.Parameter(torch.zeros(pooling_heads)) if pooling_heads else None

    @property
    def bias(self) -> Tensor | float:
        """Number that is added to the logits of pooled nodes, per head."""
        return 0.0 if self.pooled_bias is None else self.pooled_bias

    def prepare(self, hierarchy: Hierarchy) -> None:
        """Build and cache everything that depends on the forest alone."""

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        cache: Cache,
        index: int,
        *,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        """Attend as `forward` does, and store the keys and values in a layer of a cache, after its `begin`."""
        cache.fill(index, k, v)
        return self(q, k, v, hierarchy, mixing=mixing)


class CausalFlat(CausalAttention):
    """Causal softmax attention over all tokens, by PyTorch's fused kernels. Sequences of equal length share a call."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, *, mixing: HeadMixing | None = None
    ) -> Tensor:
        lengths = np.diff(hierarchy.structure.leaf_offsets)
        if is_counting():
            entries = int((lengths * (lengths + 1) // 2).sum())
            heads, mixes = q.shape[1], mixing is not None
            entry = entry_operations(heads * q.shape[2], heads, value_width=heads * v.shape[2], mixes=mixes)
            note_flops(Flops(entry * entries, 0))
        if mixing is not None:  # fused kernels do not mix
            return multiscale_attention(q, k, v, flat_tree(hierarchy), causal=True, mixing=mixing)
        if len(set(lengths.tolist())) == 1:
            return _batched(q, k, v, len(lengths))
        out = q.new_empty(len(q), q.shape[1], v.shape[-1])
        for rows, sequences in hierarchy.cached("rows by length", lambda: _by_length(hierarchy)):
            out = out.index_copy(0, rows, _batched(q[rows], k[rows], v[rows], sequences))
        return out


def _batched(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    q, k, v = (t.unflatten(0, (sequences, -1)).transpose(1, 2) for t in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared).transpose(1, 2).flatten(0, 1)


def _by_length(hierarchy: Hierarchy) -> list[tuple[Tensor, int]]:
    """Return, for every length that occurs, the tokens and the number of the sequences of that length."""
    offsets = hierarchy.structure.leaf_offsets
    lengths = np.diff(offsets)
    groups = []
    for length in np.unique(lengths):
        starts = offsets[:-1][lengths == length]
        rows = (starts[:, None] + np.arange(length)).reshape(-1)
        groups.append((torch.from_numpy(rows).to(hierarchy.device), len(starts)))
    return groups


class CausalMultiscale(CausalAttention):
    """Causal multiscale attention: exact in a token's leaf family and the `near` families before it, pooled further back.

    The selection depends on the tree alone, so that all layers share it. A learned bias per head is added to the logits of
    pooled nodes.

    Args:
        heads: Number of query heads.
        near: Number of preceding leaf families to attend to exactly.
    """

    def __init__(self, heads: int, *, near: int = 1):
        super().__init__(heads)
        self.near = near

    def prepare(self, hierarchy: Hierarchy) -> None:
        self._selection(hierarchy)

    def _selection(self, hierarchy: Hierarchy) -> Selection:
        def build() -> Selection:
            unused = torch.empty(hierarchy.num_leaves, 1, 1, device=hierarchy.device)  # only its shape matters
            return select(unused, unused, hierarchy, near=self.near, causal=True)

        return hierarchy.cached(("near, causal", self.near), build)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, *, mixing: HeadMixing | None = None
    ) -> Tensor:
        selection = self._selection(hierarchy)
        note_operations(q, v, selection, mixing, hierarchy=hierarchy)
        bias = self.bias
        return multiscale_attention(
            q, k, v, hierarchy, selection=selection, causal=True, pooled_bias=bias, mixing=mixing
        )


class CausalClustered(CausalAttention):
    """Causal clustered attention: exact within a token's chunk and for the groups of keys that matter, pooled elsewhere.

    Keys of a chunk are clustered as soon as the chunk is complete. A learned bias per head is added to the logits of pooled
    nodes.

    Args:
        heads: Number of query heads.
        threshold, top_k, spread, tile, branching: See `hsa.clustered_attention`.
    """

    mixes = False

    def __init__(
        self,
        heads: int,
        *,
        threshold: float | Sequence[float] | Tensor | None = None,
        top_k: int | None = None,
        spread: float = 1.0,
        tile: int = TILE,
        branching: Sequence[int] = BRANCHING,
    ):
        super().__init__(heads)
        self.shape = Shape.of(branching, tile, causal=True)
        self.threshold, self.top_k, self.spread = check_rule(threshold, top_k, spread, heads)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, *, mixing: HeadMixing | None = None
    ) -> Tensor:
        return self._attend(q, k, v, hierarchy, mixing)[0]

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        cache: Cache,
        index: int,
        *,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        out, keys, selection = self._attend(q, k, v, hierarchy, mixing)
        assert isinstance(cache, ClusteredCache)
        cache.fill(index, k, v, keys, selection)
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, hierarchy: Hierarchy, mixing: HeadMixing | None
    ) -> tuple[Tensor, ClusteredKeys, TileSelection]:
        if mixing is not None:
            raise Unsupported("clustered attention cannot mix heads: each head attends to its own nodes")
        lengths = np.diff(hierarchy.structure.leaf_offsets)
        tiles: dict[str, Any] = {"causal": True, "tile": self.shape.tile}
        rule: dict[str, Any] = {"top_k": self.top_k, "spread": self.spread}
        keys = cluster(k, v, lengths, branching=self.shape.branching)
        selection = select_groups(q, k, keys, lengths, threshold=self.threshold, **rule, **tiles)
        if is_counting():
            heads, widths = q.shape[1], (q.shape[1] * q.shape[2], q.shape[1] * v.shape[2])
            note_flops(operations(selection, widths[0], heads, value_width=widths[1], kv_heads=k.shape[1], **rule))
        out = clustered_attention(q, k, v, lengths, keys=keys, selection=selection, pooled_bias=self.bias, **tiles)
        return out, keys, selection
