"""The attentions of a decoder layer: as those of `hsa.nn.attention`, strictly causal.

All take packed q `[tokens, heads, dim]`, k, v `[tokens, kv_heads, dim]` and a forest with a tree per sequence, whose leaves
are the tokens in order. None looks at anything after a token: one token at a time, from a cache, gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.flops import Flops, entry_operations
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.cluster import cluster_keys
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.select import select
from hsa.attention.multiscale.selection import Selection
from hsa.nn.attention import flat_tree, is_counting, note_flops, note_operations
from hsa.tree.hierarchy import Hierarchy


class CausalAttention(nn.Module):
    """What all of them share.

    Args:
        pooling_heads: heads that attend to pooled nodes, each with a learned bias of its own; 0 where nothing is pooled.
    """

    mixes = True
    """Whether heads that talk have something to talk about: they look at the same nodes."""

    def __init__(self, pooling_heads: int = 0):
        super().__init__()
        self.pooled_bias = nn.Parameter(torch.zeros(pooling_heads)) if pooling_heads else None

    @property
    def bias(self) -> Tensor | float:
        """What is added to the logits of pooled nodes, per head."""
        return 0.0 if self.pooled_bias is None else self.pooled_bias

    def prepare(self, hierarchy: Hierarchy) -> None:
        """Build what depends on the forest alone, ahead of the first call."""

    def describe_keys(self, k: Tensor, hierarchy: Hierarchy) -> dict[str, Any]:
        """Return what is known of the keys beside themselves, as arguments of `forward` and of `Cache.fill`."""
        return {}


class CausalFlat(CausalAttention):
    """Softmax attention over all tokens so far, by PyTorch's fused kernels. Sequences of equal length share a call."""

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
    """Of every length: the tokens of its sequences, and how many these are."""
    offsets = hierarchy.structure.leaf_offsets
    lengths = np.diff(offsets)
    groups = []
    for length in np.unique(lengths):
        starts = offsets[:-1][lengths == length]
        rows = (starts[:, None] + np.arange(length)).reshape(-1)
        groups.append((torch.from_numpy(rows).to(hierarchy.device), len(starts)))
    return groups


class CausalMultiscale(CausalAttention):
    """The own leaf family and `near` earlier ones token by token, all before them pooled on the tree.

    What is exact follows from the tree alone, so that all layers share it. A learned bias per head weighs pooled against
    exact.
    """

    def __init__(self, heads: int, *, near: int = 1):
        super().__init__(heads)
        self.near = near

    def prepare(self, hierarchy: Hierarchy) -> None:
        self._selection(hierarchy)

    def _selection(self, hierarchy: Hierarchy) -> Selection:
        def build() -> Selection:
            none = torch.empty(hierarchy.num_leaves, 1, 1, device=hierarchy.device)  # nothing about them is looked at
            return select(none, none, hierarchy, near=self.near, causal=True)

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
    """Multiscale attention over the clustered keys of complete chunks: the own chunk and the `top_k` best groups are exact.

    Args:
        heads: Number of query heads.
        chunk: Tokens whose keys are clustered together, once the chunk is complete.
        top_k: Groups of earlier chunks that each token reads key by key.
        beam: Width of the search for them; see `select`.
    """

    mixes = False

    def __init__(self, heads: int, *, chunk: int = 256, top_k: int = 8, beam: int | str | None = None):
        super().__init__(heads)
        self.chunk, self.top_k, self.beam = chunk, top_k, beam

    def describe_keys(self, k: Tensor, hierarchy: Hierarchy) -> dict[str, Any]:
        return {"clusters": cluster_keys(k, hierarchy, chunk=self.chunk)}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hierarchy: Hierarchy,
        *,
        mixing: HeadMixing | None = None,
        clusters: Any = None,
    ) -> Tensor:
        clusters = clusters or cluster_keys(k, hierarchy, chunk=self.chunk)
        selection = select(q, k, hierarchy, top_k=self.top_k, beam=self.beam, clusters=clusters, causal=True)
        note_operations(q, v, selection, mixing, hierarchy=hierarchy, clusters=clusters)
        return multiscale_attention(
            q,
            k,
            v,
            hierarchy,
            selection=selection,
            clusters=clusters,
            causal=True,
            pooled_bias=self.bias,
            mixing=mixing,
        )
