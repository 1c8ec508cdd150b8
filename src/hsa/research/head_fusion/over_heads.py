"""Attention over heads: every token weighs the outputs of its heads."""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.head_fusion import HeadFusion
from hsa.nn.penalties import add_penalty


class AttentionOverHeads(HeadFusion):
    """Fusion in which every token weighs the outputs of its heads by attention.

        out_i = Σ_m β_im W_m head_m(i)        β_i = softmax over heads of (W_q norm(x_i)) · key_m / √query_dim

    A uniform β is concatenation with W_O / M. In training, `penalty` times the divergence of the mean β over all tokens
    from uniform is added to the loss (see `hsa.nn.penalties`), so that tokens do not all use the same head.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        width: Width of the token vectors.
        query_dim: Channels of the comparison of tokens with heads.
        penalty: Weight of the penalty.

    >>> fusion = AttentionOverHeads(3, 8, width=24)
    >>> fusion.weights(torch.randn(5, 24)).sum(-1)
    tensor([1., 1., 1., 1., 1.], grad_fn=...)
    """

    def __init__(self, heads: int, head_dim: int, width: int, *, query_dim: int = 16, penalty: float = 0.01):
        super().__init__(heads, head_dim)
        self.output_gain = heads
        if not 0 <= penalty < math.inf:
            raise InvalidInput("penalty", got=penalty, expected="a finite number, 0 or more")
        self.penalty = penalty
        self.query = nn.Linear(width, query_dim)
        self.keys = nn.Parameter(torch.zeros(heads, query_dim))  # β starts uniform

    @classmethod
    def for_layer(cls, width: int, heads: int, head_dim: int, *, shared_dim: int | None, penalty: float) -> Self:
        return cls(heads, head_dim, width, penalty=penalty)

    def weights(self, x: Tensor) -> Tensor:
        """Return β, `[leaves, heads]`."""
        q = self.query(F.layer_norm(x, x.shape[-1:]))
        logits = q @ self.keys.T.to(q.dtype) * self.keys.shape[1] ** -0.5
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def weigh(self, attended: Tensor, x: Tensor) -> Tensor:
        β = self.weights(x)
        if self.training and self.penalty > 0 and len(β):
            add_penalty(self.penalty * concentration(β))
        return attended * β[..., None].to(attended.dtype)


def concentration(β: Tensor) -> Tensor:
    """Return KL(mean over tokens of β ‖ uniform): 0 if all heads are used equally, log M if all tokens use one head.

    >>> round(concentration(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item(), 6)
    0.0
    >>> round(concentration(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item(), 6)  # log 2
    0.693147
    """
    used = β.mean(0)
    share = (used * len(used)).clamp(min=torch.finfo(used.dtype).tiny)  # unused heads need a gradient too
    return (used * share.log()).sum()
