"""Layer of the hierarchical transformer decoder."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.cache.interface import Cache
from hsa.errors import InvalidInput
from hsa.nn.causal_attention import CausalAttention
from hsa.nn.head_fusion import Concatenation, HeadFusion, check_fusion
from hsa.nn.rotary import rotate
from hsa.tree.hierarchy import Hierarchy

Activation = Literal["swiglu", "gelu"]


def inner_width(width: int, activation: Activation) -> int:
    """Return the default inner width of a feed-forward network.

    That is 4 · width for GELU, and 8/3 · width for SwiGLU, whose three matrices then have about as many parameters.
    """
    return 4 * width if activation == "gelu" else -(-8 * width // 3 // 32) * 32


class FeedForward(nn.Module):
    """Feed-forward network: W_2 (silu(W_a x) · W_b x) for SwiGLU, W_2 gelu(W_1 x) for GELU."""

    def __init__(self, width: int, inner: int, activation: Activation, dropout: float):
        super().__init__()
        self.gated = activation == "swiglu"
        self.into = nn.Linear(width, inner * (1 + self.gated), bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x)
        return self.out(self.dropout(x))


class DecoderLayer(nn.Module):
    """Decoder layer: causal attention on a tree and a feed-forward network, both with residual connections.

        x ← x + W_o attention(rotate(W_q n), rotate(W_k n), W_v n, tree)      n = RMSNorm(x)
        x ← x + cross(x, memory)                                              if the layer has cross-attention
        x ← x + feed_forward(RMSNorm(x))

    Args:
        width: Width of the token vectors.
        heads: Number of query heads.
        attention: A module of `hsa.nn.causal_attention`, or your own.
        kv_heads: Number of key/value heads; `heads` by default.
        fusion: Fusion of the heads, from `hsa.nn.head_fusion`; concatenation by default.
        feed_forward: Inner width of the feed-forward network; 4 · width by default.
        activation: Activation of the feed-forward network, "swiglu" or "gelu".
        dropout: Dropout of the residual branches and inside the feed-forward network.
        cross: Cross-attention, a module called as `cross(x, memory)` whose result is added to `x`. It normalises `x` itself.

    >>> import torch
    >>> from hsa.tree.causal_tree import causal_tree
    >>> from hsa.nn.causal_attention import CausalMultiscale
    >>> layer = DecoderLayer(16, 2, CausalMultiscale(2))
    >>> layer(torch.randn(11, 16), causal_tree([7, 4], (3, 2))).shape
    torch.Size([11, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention: CausalAttention,
        *,
        kv_heads: int | None = None,
        fusion: HeadFusion | None = None,
        feed_forward: int | None = None,
        activation: Activation = "swiglu",
        dropout: float = 0.0,
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, width // heads
        self.attention = attention
        self.fusion = Concatenation(heads, self.head_dim) if fusion is None else fusion
        check_fusion(self.fusion, heads, self.head_dim, mixes=attention.mixes)
        blocks = [heads, self.kv_heads, self.kv_heads]
        if self.fusion.shares_keys:
            if self.kv_heads != heads:
                raise InvalidInput(
                    "kv_heads",
                    got=f"{self.kv_heads} for {heads} collaborative heads",
                    expected=f"{heads}, as collaborative heads share one key projection already",
                )
            blocks = [self.fusion.blocks, self.fusion.blocks, heads]
        self.blocks = blocks
        self.norm_attention, self.norm_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project = nn.Linear(width, sum(blocks) * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, width, bias=False)
        self.cross = cross
        self.feed_forward = FeedForward(width, feed_forward or 4 * width, activation, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        hierarchy: Hierarchy,
        angles: Tensor | None = None,
        *,
        memory: Any = None,
        cache: Cache | None = None,
        index: int = 0,
    ) -> Tensor:
        """Process all tokens at once and return their new vectors, `[tokens, width]`.

        Args:
            x: Token vectors, `[tokens, width]`.
            hierarchy: One tree per sequence, whose leaves are the tokens.
            angles: Angles from `rotary_angles`; None for no rotation.
            memory: Second argument of `cross`.
            cache: Cache to fill with the keys and values, after a call of its `begin`.
            index: Index of this layer in the cache.
        """
        q, k, v = self._project(x, angles)
        mixing = self.fusion.mixing
        if cache is None:
            attended = self.attention(q, k, v, hierarchy, mixing=mixing)
        else:
            attended = self.attention.read(q, k, v, hierarchy, cache, index, mixing=mixing)
        return self._finish(x, attended, memory)

    def step(self, x: Tensor, cache: Cache, index: int, angles: Tensor | None = None, *, memory: Any = None) -> Tensor:
        """Process the newest token of every sequence, `[batch, width]`, after a call of the cache's `append`."""
        q, k, v = self._project(x, angles)
        bias, mixing = self.attention.bias, self.fusion.mixing
        return self._finish(x, cache.attend(index, q, k, v, pooled_bias=bias, mixing=mixing), memory)

    def _project(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.project(self.norm_attention(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = projected.split(self.blocks, dim=1)
        q, k = self.fusion.compare(q, k)
        if angles is not None:  # rotate after `compare`: only then do logits depend on distances alone
            q, k = self._rotate(q, angles), self._rotate(k, angles)
        return q, k, v

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate each block of `head_dim` channels separately."""
        blocks = x.flatten(1).unflatten(-1, (-1, self.head_dim))
        return rotate(blocks, angles).flatten(1).unflatten(-1, x.shape[1:])

    def _finish(self, x: Tensor, attended: Tensor, memory: Any) -> Tensor:
        x = x + self.dropout(self.output(self.fusion.weigh(attended, x).flatten(1)))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))


def initialise(module: nn.Module, layers: int, std: float = 0.02) -> None:
    """Draw normally distributed weights for the matrices of a decoder.

    The standard deviation of projections that add to the residual stream is divided by √(2 · layers), so that the variance
    of the stream does not grow with depth. Parameters of head fusions keep their own initialisation.
    """
    kept = {id(p) for m in module.modules() if isinstance(m, HeadFusion) for p in m.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in kept:
            narrow = name.endswith(("output.weight", "feed_forward.out.weight"))
            nn.init.normal_(parameter, std=std / (2 * layers) ** 0.5 if narrow else std)
    for layer in module.modules():
        if isinstance(layer, DecoderLayer):
            layer.fusion.scale_output(layer.output)
