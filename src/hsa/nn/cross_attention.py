"""Cross-attention: the tokens of a decoder attend to the tree of an encoder's leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hsa.attention.checks import check_count
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.select import select
from hsa.errors import InvalidInput
from hsa.nn.attention import flat_tree, note_operations
from hsa.nn.head_fusion import Concatenation, HeadFusion, check_fusion
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class Source:
    """What a decoder reads: the leaves of an encoder, and which sequences ask.

    Attributes:
        vectors: `[leaves, width]`.
        hierarchy: the forest of these leaves.
        tree: `[sequences]` the tree that each sequence of the decoder reads.
        lengths: tokens of each of them, now.
        kept: the keys and values of every layer, once they are known.
    """

    vectors: Tensor
    hierarchy: Hierarchy
    tree: tuple[int, ...]
    lengths: tuple[int, ...]
    kept: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(vectors: Tensor, hierarchy: Hierarchy, lengths: Sequence[int]) -> Source:
        """Sequence i, of `lengths[i]` tokens, reads tree i."""
        return Source(vectors, hierarchy, tuple(range(hierarchy.num_trees)), ()).asked_by(lengths)

    def asked_by(self, lengths: Sequence[int]) -> Source:
        """The same for sequences of other lengths: for a step, a token each."""
        if len(lengths) != len(self.tree):
            raise InvalidInput(
                "lengths",
                given=f"{len(lengths)} sequences",
                expected=f"{len(self.tree)}, one for each tree that is read",
            )
        return replace(self, lengths=tuple(lengths))

    def reorder(self, index: Sequence[int]) -> Source:
        """Sequence i reads what sequence `index[i]` read."""
        return replace(self, tree=tuple(self.tree[i] for i in index), lengths=tuple(self.lengths[i] for i in index))

    def queries(self, *, shared: bool) -> Queries:
        """One group per sequence, or one per token: a selection shared with later tokens would leak them."""

        def build() -> Queries:
            sizes = np.array(self.lengths, np.int64)
            tree = np.array(self.tree, np.int64)
            offsets = np.concatenate([[0], np.cumsum(sizes)]) if shared else np.arange(sizes.sum() + 1)
            asked = tree if shared else np.repeat(tree, sizes)
            device = self.vectors.device
            return Queries(torch.from_numpy(offsets).to(device), torch.from_numpy(asked).to(device))

        return self.once(("queries", shared, self.tree, self.lengths), build)

    def once(self, key: Any, build: Any) -> Any:
        if key not in self.kept:
            self.kept[key] = build()
        return self.kept[key]


class CrossAttention(nn.Module):
    """Multiscale attention of tokens to another sequence's tree: the `top_k` best leaf families exactly, the rest pooled.

        q = W_q RMSNorm(x)      k, v = W_k m, W_v m      m = LayerNorm(the encoder's leaves)
        out = W_o multiscale_attention(q, k, v, tree, selection=the best by q)

    Every token has its own selection. A learned bias per head weighs pooled against exact.

    Args:
        width: of the tokens.
        heads: of attention.
        source_width: of the encoder's leaves.
        top_k: leaf families that a token reads leaf by leaf; None for all: softmax attention.
        fusion: how heads become one, of `hsa.nn.head_fusion`; concatenation by default.

    >>> cross = CrossAttention(8, 2, 6, top_k=1)
    >>> source = Source.of(torch.randn(9, 6), Hierarchy.from_nested([[3, 2], [4]]), lengths=[5, 2])
    >>> cross(torch.randn(7, 8), source).shape
    torch.Size([7, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        source_width: int,
        *,
        top_k: int | None = None,
        fusion: HeadFusion | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        if top_k is not None:
            check_count("top_k", top_k, "0 or more leaf families, or None for all")
        self.heads, self.head_dim, self.top_k = heads, width // heads, top_k
        self.fusion = Concatenation(heads, self.head_dim) if fusion is None else fusion
        check_fusion(self.fusion, heads, self.head_dim, mixes=not top_k)
        self.norm, self.norm_source = nn.RMSNorm(width), nn.LayerNorm(source_width)
        self.sizes = [self.fusion.blocks * self.head_dim, heads * self.head_dim]
        self.query = nn.Linear(width, self.sizes[0], bias=False)
        self.project = nn.Linear(source_width, sum(self.sizes), bias=False)
        self.output = nn.Linear(heads * self.head_dim, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.pooled_bias = None if top_k is None else nn.Parameter(torch.zeros(heads))
        self.initialise()

    def initialise(self) -> None:
        """Queries and keys of size one: with smaller ones every leaf looks alike for long, and nothing is learned."""
        for layer in (self.query, self.project):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        self.fusion.scale_output(self.output)

    def keys_and_values(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """`[leaves, blocks, dim]`, `[leaves, heads, dim]`."""
        k, v = self.project(self.norm_source(vectors)).split(self.sizes, -1)
        return k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, source: Source) -> Tensor:
        """What the source adds to the tokens, `[tokens, width]`."""
        k, v = source.once(id(self), lambda: self.keys_and_values(source.vectors))
        q = self.query(self.norm(x)).unflatten(-1, (-1, self.head_dim)).to(k.dtype)
        q, k = self.fusion.compare(q, k)
        tree = flat_tree(source.hierarchy) if self.top_k is None else source.hierarchy
        queries = source.queries(shared=not self.top_k)
        selection = select(q, k, tree, queries=queries, top_k=self.top_k or 0)
        mixing = self.fusion.mixing
        note_operations(q, v, selection, mixing, hierarchy=tree)
        bias = 0.0 if self.pooled_bias is None else self.pooled_bias
        attended = multiscale_attention(q, k, v, tree, selection=selection, pooled_bias=bias, mixing=mixing)
        return self.dropout(self.output(self.fusion.weigh(attended, x).flatten(1)))
