"""α of entmax as a parameter: how sparse attention is, learned for every level of the tree and every head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hsa.attention.normalizers import Entmax
from hsa.nn.alpha_option import AlphaOption

LOWEST = 1 + 1 / 64
"""Not 1: there weights are softmax's, of which none is 0, so that nothing of sparsity is left to learn from; and formulas
divide by α − 1. With this one, whatever lies 64 or more below the row's normaliser still gets no weight. It and 2 − it have
few binary digits, so that no rounding leads out of the range."""
START = 1.5
STRIDE = 10.0
"""Adam moves every number by about the learning rate in a step, which is little for one that has to go from 0 to 3: without
it, α ended a training of 300 steps at rates up to 0.003 within 0.02 of where it began."""


class LearnedAlpha(nn.Module):
    """α between softmax and sparsemax, per level and head (Correia, Niculae & Martins 2019, arXiv:1909.00015, per head).

        α = low + (2 − low) · sigmoid(10 · raw)        low = 1 + 1/64

    Whatever a step of training makes of `raw`, α stays in the range; all begin with 1.5.

    Args:
        levels: rows: families of leaves have the first one's, those above them the next; taller families share the last.
        heads: of attention.

    >>> alpha = LearnedAlpha(levels=3, heads=4)
    >>> alpha().shape, alpha()[0, 0].item()
    (torch.Size([3, 4]), 1.5)
    """

    def __init__(self, levels: int, heads: int):
        super().__init__()
        share = torch.tensor((START - LOWEST) / (2 - LOWEST))
        self.raw = nn.Parameter((share.logit() / STRIDE).expand(levels, heads).clone())

    def forward(self) -> Tensor:
        """`[levels, heads]`, in float32 at least: in half precision neighbouring α would be one."""
        raw = self.raw.to(torch.promote_types(self.raw.dtype, torch.float32))
        return LOWEST + (2 - LOWEST) * (STRIDE * raw).sigmoid()


def make_alpha(alpha: AlphaOption, levels: int, heads: int) -> float | LearnedAlpha | None:
    """What an attention is given."""
    return LearnedAlpha(levels, heads) if alpha == "learned" else alpha


def planned_for(alpha: float | LearnedAlpha | None) -> Literal["softmax"] | Entmax:
    """What plans are made for: the same whatever a learned α is. (Its values may be on other processes.)"""
    return normalizer_of(LOWEST if isinstance(alpha, LearnedAlpha) else alpha)


def normalizer_of(alpha: float | LearnedAlpha | None) -> Literal["softmax"] | Entmax:
    """What an operator is given."""
    if alpha is None:
        return "softmax"
    return Entmax(alpha(), least=LOWEST) if isinstance(alpha, LearnedAlpha) else Entmax(alpha)
