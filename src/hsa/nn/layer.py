"""Layer of the hierarchical transformer encoder (the paper's appendix F)."""

from __future__ import annotations

from torch import Tensor, nn

from hsa.nn.attention import Attention
from hsa.nn.grouped_linear import GroupedLinear, Groups
from hsa.nn.head_fusion import Concatenation, HeadFusion, check_fusion
from hsa.nn.head_norm import HeadNorm
from hsa.tree.hierarchy import Hierarchy


class EncoderLayer(nn.Module):
    """Encoder layer: attention on a tree and a feed-forward network, both with residual connections.

        q, k = LayerNorm(W_q x), LayerNorm(W_k x)        v = W_v x
        x ← x + gelu(W_o attention(q, k, v, tree, ε))
        x ← x + W_2 gelu(W_1 LayerNorm(x))

    Each modality has its own W_q, W_k, W_v and W_o. Queries and keys are normalised per head *after* the projection, so that
    the attention descends an energy (the paper, section 3).

    Args:
        width: Width of the leaf vectors.
        heads: Number of heads.
        attention: A module of `hsa.nn.attention`, or your own.
        fusion: Fusion of the heads, from `hsa.nn.head_fusion`; concatenation by default.
        modalities: Number of modalities.
        feed_forward: Inner width of the feed-forward network; twice the width by default.
        head_dim: Channels per head; width / heads by default.
        dropout: Dropout of both residual branches.

    >>> import torch
    >>> from hsa.nn.attention import Hierarchical
    >>> layer = EncoderLayer(16, 2, Hierarchical())
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
        fusion: HeadFusion | None = None,
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
        self.fusion = Concatenation(heads, self.head_dim) if fusion is None else fusion
        check_fusion(self.fusion, heads, self.head_dim, attention.parts, mixes=attention.mixes)
        compared = self.fusion.blocks * self.head_dim
        self.sizes = [attended if name.startswith("v") else compared for name in attention.parts]
        self.project = GroupedLinear(modalities, width, sum(self.sizes))
        for name in attention.parts:
            if not name.startswith("v"):
                self.add_module(f"norm_{name}", HeadNorm(self.head_dim))
        self.output = GroupedLinear(modalities, attended, width)
        self.fusion.scale_output(self.output)
        self.activation = nn.GELU()
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hierarchy: Hierarchy, groups: Groups, positions: Tensor | None = None) -> Tensor:
        """Return the new leaf vectors, `[leaves, width]`.

        Args:
            x: Leaf vectors, `[leaves, width]`.
            hierarchy: Forest of the leaves.
            groups: Leaves of each modality.
            positions: ε, `[nodes, heads, dim]`.
        """
        parts = [part.unflatten(-1, (-1, self.head_dim)) for part in self.project(x, groups).split(self.sizes, -1)]
        for i, name in enumerate(self.attention.parts):
            if not name.startswith("v"):
                parts[i] = self.get_submodule(f"norm_{name}")(parts[i])
        if self.attention.parts[:2] == ("q", "k"):
            parts[:2] = self.fusion.compare(*parts[:2])
        attended = self.attention(*parts, hierarchy, positions, self.fusion.mixing)
        attended = self.fusion.weigh(attended, x)
        x = x + self.dropout(self.activation(self.output(attended.flatten(1), groups)))
        return x + self.dropout(self.feed_forward(x))
