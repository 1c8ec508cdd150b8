"""Learned α of entmax: a parameter per level of the tree and head that sets how sparse attention is."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hsa.attention.normalizers import Entmax
from hsa.nn.alpha_option import AlphaOption

LOWEST = 1 + 1 / 64
"""Lower limit of α.

It is above 1 because at 1 entmax is softmax, which has no zero weights and therefore no gradient towards sparsity, and
because formulas divide by α − 1. With this value, a logit that lies 64 or more below the row's normaliser still gets no
weight. Both this number and 2 minus it have few binary digits, so that rounding cannot leave the range.
"""
START = 1.5
"""Initial α."""
STRIDE = 10.0
"""Factor of the raw parameter.

Adam moves a parameter by about the learning rate per step, which is too slow for one that has to move from 0 to 3:
without the factor, α stayed within 0.02 of its start in a training of 300 steps at rates up to 0.003.
"""


class LearnedAlpha(nn.Module):
    """Learned α between softmax and sparsemax, per level and head.

        α = low + (2 − low) · sigmoid(10 · raw)        low = 1 + 1/64

    α stays in the range for every value of the parameter `raw`, and starts at 1.5. Correia, Niculae & Martins 2019
    (arXiv:1909.00015) learn it per head.

    Args:
        levels: Number of family heights with their own α, from the leaf families up; taller families share the last.
        heads: Number of heads.

    >>> alpha = LearnedAlpha(levels=3, heads=4)
    >>> alpha().shape, alpha()[0, 0].item()
    (torch.Size([3, 4]), 1.5)
    """

    def __init__(self, levels: int, heads: int):
        super().__init__()
        share = torch.tensor((START - LOWEST) / (2 - LOWEST))
        self.raw = nn.Parameter((share.logit() / STRIDE).expand(levels, heads).clone())

    def forward(self) -> Tensor:
        """Return α, `[levels, heads]`, in float32 or wider, because half precision cannot tell similar values apart."""
        raw = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        return LOWEST + (2 - LOWEST) * (STRIDE * raw).sigmoid()


def make_alpha(alpha: AlphaOption, levels: int, heads: int) -> float | LearnedAlpha | None:
    """Return the α of an attention module for an option: a module with parameters if it is learned."""
    return LearnedAlpha(levels, heads) if alpha == "learned" else alpha


def normalizer_for_plans(alpha: float | LearnedAlpha | None) -> Literal["softmax"] | Entmax:
    """Return a normalizer to make plans for: the same for all values of a learned α, which other processes may hold."""
    return normalizer_of(LOWEST if isinstance(alpha, LearnedAlpha) else alpha)


def normalizer_of(alpha: float | LearnedAlpha | None) -> Literal["softmax"] | Entmax:
    """Return the `normalizer` argument of the operators."""
    if alpha is None:
        return "softmax"
    return Entmax(alpha(), least=LOWEST) if isinstance(alpha, LearnedAlpha) else Entmax(alpha)
