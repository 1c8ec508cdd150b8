"""Collaborative heads: one query and one key projection for all heads."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.head_fusion import HeadFusion


class CollaborativeHeads(HeadFusion):
    """Share one query and one key projection among all heads; each head weighs the channels in its own way.

        logit_h(i→j) = Σ_r mixing[h, r] · q_ir · k_jr / √head_dim

    (Cordonnier, Loukas & Jaggi, 2020, arXiv:2006.16362.) With `shared_dim` = heads·head_dim and a mixing of ones in the
    blocks of the heads it is concatenation; `hsa.research.collaborative` computes it for trained layers.

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
                given=shared_dim,
                expected=f"a multiple of {head_dim}, the channels of a head: they are normalised and rotated together",
            )
        if shared_dim > heads * head_dim:
            raise InvalidInput(
                "shared_dim",
                given=shared_dim,
                expected=f"at most {heads * head_dim}, the channels of all heads: more add nothing",
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
        # Attention divides by √key_dim, an independent head by √head_dim. Mixing the keys gives each head its own to pool.
        mixing = self.mix_channels * math.sqrt(self.key_dim / self.head_dim)
        return q.flatten(1)[:, None].expand(-1, self.heads, -1), k.flatten(1)[:, None] * mixing.to(k.dtype)
