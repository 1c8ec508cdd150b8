"""The standard transformer layer (that of BERT) on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.attention import Flat
from hsa.tree.hierarchy import Hierarchy

Norm = Literal["pre", "post"]
ActivationName = Literal["gelu", "gelu-tanh", "relu"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
}


class TransformerLayer(nn.Module):
    """Transformer layer: softmax attention inside every tree of a flat forest, then a feed-forward network.

        post: x ← LayerNorm(x + W_o attention(x + p))             x ← LayerNorm(x + W_2 f(W_1 x))
        pre:  x ← x + W_o attention(LayerNorm(x) + p)             x ← x + W_2 f(W_1 LayerNorm(x))

    "post" follows Vaswani et al., *Attention Is All You Need*, 2017, and BERT; "pre" follows Xiong et al., *On Layer
    Normalization in the Transformer Architecture*, 2020.

    Args:
        width: Width of the vectors.
        heads: Number of attention heads; must divide the width.
        feed_forward: Inner width of the feed-forward network; 2·width by default.
        dropout: Dropout rate on both residual branches.
        norm: Position of the norms: "pre" or "post", as above.
        activation: Activation function f.
        epsilon: Epsilon of the norms.
        identity: Whether both residual branches start at zero; a layer with "pre" then starts as the identity.

    `forward` takes x `[leaves, width]`, the forest, and optionally p `[leaves, width]`, position vectors for attention.

    >>> import torch
    >>> layer, x = TransformerLayer(8, 2, identity=True), torch.randn(5, 8)
    >>> torch.equal(layer(x, Hierarchy.flat([3, 2])), x)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        feed_forward: int | None = None,
        dropout: float = 0.0,
        norm: Norm = "pre",
        activation: ActivationName = "gelu",
        epsilon: float = 1e-5,
        identity: bool = False,
    ):
        super().__init__()
        if width % heads:
            raise InvalidInput(
                "heads", got=f"{heads} heads for a width of {width}", expected="heads that divide the width"
            )
        inner = feed_forward or 2 * width
        self.heads, self.norm_first = heads, norm == "pre"
        self.attention = Flat()
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_attention = nn.LayerNorm(width, eps=epsilon)
        self.inner = nn.Linear(width, inner)
        self.activation = _ACTIVATIONS[activation]()
        self.outer = nn.Linear(inner, width)
        self.norm_feed_forward = nn.LayerNorm(width, eps=epsilon)
        self.dropout = nn.Dropout(dropout)
        if identity:
            for layer in (self.output, self.outer):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, hierarchy: Hierarchy, positions: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self._attended(self.norm_attention(x), hierarchy, positions)
            return x + self._fed(self.norm_feed_forward(x))
        x = self.norm_attention(x + self._attended(x, hierarchy, positions))
        return self.norm_feed_forward(x + self._fed(x))

    def _attended(self, x: Tensor, hierarchy: Hierarchy, positions: Tensor | None) -> Tensor:
        q, k, v = self.project(x if positions is None else x + positions).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.dropout(self.output(self.attention(q, k, v, hierarchy, None).flatten(1)))

    def _fed(self, x: Tensor) -> Tensor:
        return self.dropout(self.outer(self.activation(self.inner(x))))
