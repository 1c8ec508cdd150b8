"""Collaborative heads: query and key projections shared by all heads."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.head_fusion import HeadFusion


class CollaborativeHeads(HeadFusion):
    """Fusion in which all heads share one query and one key projection, and each head weighs their channels.

        logit_h(i→j) = Σ_r mixing[h, r] · q_ir · k_jr / √head_dim

    See Cordonnier, Loukas & Jaggi, 2020, arXiv:2006.16362. With `shared_dim` = heads·head_dim and a mixing of ones in the
    block of each head, this is concatenation. `hsa.research.collaborate` computes shared projections of trained layers.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        shared_dim: Number of shared channels, a multiple of head_dim.

    >>> fusion = CollaborativeHeads(4, 8, shared_dim=16)
    >>> q, k = fusion.compare(*torch.randn(2, 5, 2, 8).unbind(0))
    >>> q.shape, k.shape
    (torch.Size([5, 4, 16]), torch.Size([5, 4, 16]))
    """

    shares_keys = True

    def __init__(self, heads: int, head_dim: int, shared_dim: int):
        super().__init__(heads, head_dim)
        if shared_dim < 1 or shared_dim % head_dim:
            raise InvalidInput(
                "shared_dim",
                got=shared_dim,
                expected=f"a multiple of {head_dim}, the channels of a head",
            )
        if shared_dim > heads * head_dim:
            raise InvalidInput(
                "shared_dim",
                got=shared_dim,
                expected=f"at most {heads * head_dim}, the channels of all heads",
            )
        self.blocks = shared_dim // head_dim
        self.mix_channels = nn.Parameter(torch.randn(heads, shared_dim) * math.sqrt(head_dim / shared_dim))

    @classmethod
    def for_layer(cls, width: int, heads: int, head_dim: int, *, shared_dim: int | None, penalty: float) -> Self:
        return cls(heads, head_dim, max(1, heads // 2) * head_dim if shared_dim is None else shared_dim)

    @property
    def key_dim(self) -> int:
        return self.blocks * self.head_dim

    def compare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Attention divides by √key_dim, but the formula by √head_dim. Mixing keys, not queries, lets heads pool their own.
        mixing = self.mix_channels * math.sqrt(self.key_dim / self.head_dim)
        return q.flatten(1)[:, None].expand(-1, self.heads, -1), k.flatten(1)[:, None] * mixing.to(k.dtype)
