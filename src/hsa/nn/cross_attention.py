"""Cross-attention from the tokens of a decoder to the tree of an encoder's leaves."""

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
    """Leaves of an encoder, and the decoder sequences that attend to them.

    Attributes:
        vectors: Leaf vectors, `[leaves, width]`.
        hierarchy: Forest of the leaves.
        tree: Tree that each sequence of the decoder attends to, `[sequences]`.
        lengths: Number of tokens of each sequence in the current call, `[sequences]`.
        kept: Results that later calls use again, such as the keys and values of each layer.
    """

    vectors: Tensor
    hierarchy: Hierarchy
    tree: tuple[int, ...]
    lengths: tuple[int, ...]
    kept: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(vectors: Tensor, hierarchy: Hierarchy, lengths: Sequence[int]) -> Source:
        """Build a source whose tree i is attended to by sequence i, of `lengths[i]` tokens."""
        return Source(vectors, hierarchy, tuple(range(hierarchy.num_trees)), ()).with_lengths(lengths)

    def with_lengths(self, lengths: Sequence[int]) -> Source:
        """Return the same source for sequences of other lengths, such as one token each in a decoding step."""
        if len(lengths) != len(self.tree):
            raise InvalidInput(
                "lengths",
                got=len(lengths),
                expected=f"{len(self.tree)} sequences, one for each tree that is attended to",
            )
        return replace(self, lengths=tuple(lengths))

    def reorder(self, index: Sequence[int]) -> Source:
        """Return a source in which sequence i attends to the tree of the former sequence `index[i]`."""
        return replace(self, tree=tuple(self.tree[i] for i in index), lengths=tuple(self.lengths[i] for i in index))

    def queries(self, *, shared: bool) -> Queries:
        """Return the queries in one group per sequence (`shared`) or one per token.

        A selection by the queries of a group needs one group per token: a shared one would leak later tokens.
        """

        def build() -> Queries:
            sizes = np.array(self.lengths, np.int64)
            tree = np.array(self.tree, np.int64)
            offsets = np.concatenate([[0], np.cumsum(sizes)]) if shared else np.arange(sizes.sum() + 1)
            tree_of_group = tree if shared else np.repeat(tree, sizes)
            device = self.vectors.device
            return Queries(torch.from_numpy(offsets).to(device), torch.from_numpy(tree_of_group).to(device))

        return self.once(("queries", shared, self.tree, self.lengths), build)

    def once(self, key: Any, build: Any) -> Any:
        """Return `build()`, computed by the first call with this key."""
        if key not in self.kept:
            self.kept[key] = build()
        return self.kept[key]


class CrossAttention(nn.Module):
    """Multiscale attention from tokens to the tree of another sequence, with projections.

        q = W_q RMSNorm(x)      k, v = W_k m, W_v m      m = LayerNorm(source.vectors)
        out = W_o multiscale_attention(q, k, v, source.hierarchy, top_k=top_k)

    Each token has its own selection. A learned bias per head is added to the logits of pooled nodes.

    Args:
        width: Width of the token vectors.
        heads: Number of heads.
        source_width: Width of the source's leaf vectors.
        top_k: Number of leaf families that a token attends to exactly: the best ones. None for softmax attention.
        fusion: Fusion of the heads, from `hsa.nn.head_fusion`; concatenation by default.
        dropout: Dropout of the output.

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
        """Draw the projections so that queries and keys have unit variance.

        With smaller ones, attention stays nearly uniform for long and learns nothing.
        """
        for layer in (self.query, self.project):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        self.fusion.scale_output(self.output)

    def keys_and_values(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[leaves, blocks, dim]` and values `[leaves, heads, dim]`."""
        k, v = self.project(self.norm_source(vectors)).split(self.sizes, -1)
        return k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, source: Source) -> Tensor:
        """Return the attended values, `[tokens, width]`, which a layer adds to the tokens `x`."""
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
