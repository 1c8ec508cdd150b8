"""One layer of the hierarchical transformer encoder (the paper's appendix F)."""

from __future__ import annotations

from torch import Tensor, nn

from hsa.hierarchy import Hierarchy
from hsa.nn.attention import Attention
from hsa.nn.grouped_linear import GroupedLinear, Groups


class HierarchicalEncoderLayer(nn.Module):
    """Attention on a tree, and a feed-forward network, both with residuals.

        q, k = LayerNorm(W_q x), LayerNorm(W_k x)        v = W_v x
        x ← x + gelu(W_o attention(q, k, v, tree, ε))
        x ← x + W_2 gelu(W_1 LayerNorm(x))

    W_q, W_k, W_v, W_o are those of the leaf's modality. Queries and keys are normalised *after* projection, per head:
    that is what makes the attention descend an energy (the paper, section 3).

    Args:
        width: of the leaf vectors.
        heads: of attention.
        attention: one of `hsa.nn.attention`, or your own.
        modalities: how many.
        feed_forward: inner width of the feed-forward network.
        head_dim: channels per head; width / heads by default.
        dropout: on both residual branches.

    >>> import torch
    >>> from hsa.nn.attention import Hierarchical
    >>> layer = HierarchicalEncoderLayer(16, 2, Hierarchical())
    >>> tree = Hierarchy.from_nested([[3, 2]])
    >>> layer(torch.randn(5, 16), tree, Groups((5,), None, None)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention: Attention,
        *,
        modalities: int = 1,
        feed_forward: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        inner = feed_forward or 2 * width
        self.heads, self.head_dim = heads, head_dim or width // heads
        attended = self.heads * self.head_dim
        self.attention = attention
        self.needs_queries = attention.needs_queries
        self.project = GroupedLinear(modalities, width, (3 if self.needs_queries else 1) * attended)
        if self.needs_queries:
            self.norm_q, self.norm_k = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.output = GroupedLinear(modalities, attended, width)
        self.activation = nn.GELU()
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hierarchy: Hierarchy, groups: Groups, positions: Tensor | None = None) -> Tensor:
        projected = self.project(x, groups).unflatten(-1, (-1, self.heads, self.head_dim))
        if self.needs_queries:
            q, k, v = projected.unbind(1)
            q, k = self.norm_q(q), self.norm_k(k)
        else:
            q = k = v = projected[:, 0]
        attended = self.attention(q.to(v.dtype), k.to(v.dtype), v, hierarchy, positions)
        x = x + self.dropout(self.activation(self.output(attended.flatten(1), groups)))
        return x + self.dropout(self.feed_forward(x))
