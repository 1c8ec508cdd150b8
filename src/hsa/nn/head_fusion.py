"""Fusion of the heads of an attention layer into one output: the interface, and the default, concatenation.

A layer passes its queries and keys through `compare`, passes `mixing` to the attention, and passes the output of the heads
through `weigh` before the output projection adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from hsa.attention.mixing import HeadMixing
from hsa.errors import InvalidInput
from hsa.nn.grouped_linear import GroupedLinear
from hsa.registry import FUSIONS


def head_fusion(
    name: str, width: int, heads: int, head_dim: int, *, shared_dim: int | None = None, penalty: float = 0.01
) -> HeadFusion:
    """Build a fusion by its name.

    Args:
        name: "concatenation", "talking" (heads mix logits and weights), "collaborative" (one query and key projection for
            all heads), "over-heads" (each token weighs its heads), or another name registered in `hsa.registry.FUSIONS`.
        width, heads, head_dim: Sizes of the layer.
        shared_dim: For "collaborative": channels of the shared queries and keys; half of all heads' by default.
        penalty: For "over-heads": weight of the penalty that keeps tokens from all using the same head.

    >>> head_fusion("collaborative", 32, 4, 8).key_dim
    16
    """
    return FUSIONS.get(name).for_layer(width, heads, head_dim, shared_dim=shared_dim, penalty=penalty)


class HeadFusion(nn.Module):
    """Base class of the head fusions. Its own methods fuse by concatenation.

    Args:
        heads: Number of heads.
        head_dim: Channels of a head.
    """

    output_gain = 1
    """Factor of the initial output projection, to start at the same scale as concatenation."""

    shares_keys = False
    """Whether all heads share one query and one key projection, of `blocks` blocks each."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.blocks = heads
        """Number of blocks of `head_dim` channels that queries, and keys, have before `compare`."""

    @classmethod
    def for_layer(cls, width: int, heads: int, head_dim: int, *, shared_dim: int | None, penalty: float) -> Self:
        """Build the fusion of a layer of these sizes, with those options of `head_fusion` that apply."""
        return cls(heads, head_dim)

    @property
    def key_dim(self) -> int:
        """Channels of queries and keys per head after `compare`."""
        return self.head_dim

    @property
    def mixing(self) -> HeadMixing | None:
        """Matrices by which the attention mixes logits and weights across heads; None for no mixing."""
        return None

    @property
    def needs_one_query_and_key(self) -> bool:
        """Whether the attention must compare one query with one key."""
        return self.mixing is not None or self.shares_keys

    def compare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of each head: `[leaves, blocks, head_dim]` → `[leaves, heads, key_dim]`."""
        return q, k

    def weigh(self, attended: Tensor, x: Tensor) -> Tensor:
        """Weigh the output of each head, `[leaves, heads, dim]`, by the input x of the layer, `[leaves, width]`."""
        return attended

    @torch.no_grad()
    def scale_output(self, output: nn.Linear | GroupedLinear) -> None:
        """Scale the layer's output projection; called once, after its initialisation."""
        output.weight *= self.output_gain


class Concatenation(HeadFusion):
    """Independent heads: out_i = W_O [head_1; …; head_M]."""


def check_fusion(
    fusion: HeadFusion, heads: int, head_dim: int, parts: Sequence[str] = ("q", "k", "v"), *, mixes: bool = True
) -> None:
    """Raise an error unless the fusion fits a layer of these sizes.

    Args:
        fusion: Fusion to check.
        heads: Number of heads of the layer.
        head_dim: Channels of a head of the layer.
        parts: Names of the projections that the layer's attention takes.
        mixes: Whether that attention can mix heads, because all of them attend to the same nodes.
    """
    if (fusion.heads, fusion.head_dim) != (heads, head_dim):
        raise InvalidInput(
            "fusion",
            got=f"one for {fusion.heads} heads of {fusion.head_dim} channels",
            expected=f"one for {heads} heads of {head_dim} channels, as the layer has",
        )
    kind = type(fusion).__name__
    if tuple(parts[:3]) != ("q", "k", "v") and fusion.needs_one_query_and_key:
        raise InvalidInput(
            "fusion",
            got=f"{kind} for an attention of {', '.join(parts)}",
            expected="one query and one key to compare",
            fix="Use concatenation or over-heads",
        )
    if fusion.mixing is not None and not mixes:
        raise InvalidInput(
            "fusion",
            got=f"{kind} for heads that each attend to nodes of their own selection",
            expected="heads that attend to the same nodes",
            fix="Use multiscale attention without top_k, hierarchical or flat attention, or another fusion",
        )
