"""Normalizers, which turn logits into weights: softmax, or α-entmax, which gives small logits a weight of exactly 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hsa.attention.checks import is_checking
from hsa.errors import InvalidInput

ROUNDING = 1e-6
"""Tolerance below the lower bound of α, for a tensor α that was rounded to its dtype."""
NEAREST = 1e-6
"""Smallest α − 1 in computations: formulas divide by it."""


@dataclass(frozen=True, eq=False)
class Entmax:
    """Normaliser by α-entmax in place of softmax (Peters et al. 2019, arXiv:1905.05702): weights can be exactly 0.

        p_B = n_B · [1 + (α − 1)(z_B − c)]₊^{1/(α − 1)}        Σ p = 1

    where the entry B has the logit z_B and stands for n_B = leaf_count(B) keys. α = 2 is sparsemax; α = 1 is softmax.

    Args:
        alpha: Number from 1 to 2; or a tensor `[heads]`, `[levels, heads]` or `[levels, 1]`, which may require a gradient:
            families of height h (1 for leaf families) use row min(h, levels) − 1.
        counts: "weighted" for the formula above, which is exact where all keys of each B are equal; "logits" to add log n_B
            to z_B and set every n_B to 1, as the energy of the paper's Eq. 51 does.
        least: Lower bound of α, 1 or more. Fused kernels need 1 + 1/64 or more, and do not read the values of a tensor.

    Raises:
        InvalidInput: α is below 1, above 2 or not a number, or a tensor of another shape. (Values on a GPU are checked only
            inside `hsa.checking`.)

    >>> import hsa
    >>> q, k, v = torch.randn(3, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> tree = hsa.Hierarchy.from_nested([[3, 2], [4]])
    >>> hsa.hierarchical_attention(q, k, v, tree, normalizer=Entmax(1.5)).shape
    torch.Size([9, 2, 4])
    >>> Entmax(torch.tensor([[1.5], [1.2]])).at_height(3)
    tensor([1.2000])
    >>> Entmax(3)
    Traceback (most recent call last):
    hsa.errors.InvalidInput: Entmax.alpha: expected a number from 1 (softmax) to 2 (sparsemax), got 3. Keep a learned α in \
range, such as 1 + sigmoid(parameter)
    """

    alpha: float | Tensor = 1.5
    counts: Literal["weighted", "logits"] = "weighted"
    least: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        if self.counts not in ("weighted", "logits"):
            raise InvalidInput("Entmax.counts", got=repr(self.counts), expected="'weighted' or 'logits'")
        if not 1 <= self.least <= 2:
            raise InvalidInput("Entmax.least", got=self.least, expected="a number from 1 to 2")
        if isinstance(self.alpha, Tensor):
            _check_tensor(self.alpha, self.least)
        elif isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float, np.integer, np.floating)):
            raise InvalidInput("Entmax.alpha", got=repr(self.alpha), expected="a number or a tensor")
        elif not self.least <= self.alpha <= 2:
            raise _out_of_range(self.alpha, self.least)

    @property
    def is_softmax(self) -> bool:
        """Whether α is the number 1."""
        return not isinstance(self.alpha, Tensor) and self.alpha == 1

    @property
    def lowest(self) -> float:
        """Lower bound of α."""
        return self.least if isinstance(self.alpha, Tensor) else float(self.alpha)

    @property
    def levels(self) -> int:
        """Number of heights with their own α; taller families share the last."""
        return len(self.alpha) if isinstance(self.alpha, Tensor) and self.alpha.ndim == 2 else 1

    def at_height(self, height: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return α of the families of a height, from 1: `[heads]`, `[1]`, or `[]` (on the CPU) if α is one number."""
        if not isinstance(self.alpha, Tensor):
            return torch.tensor(max(float(self.alpha), 1 + NEAREST), dtype=dtype)
        row = self.alpha if self.alpha.ndim < 2 else self.alpha[min(height, self.levels) - 1]
        return row.to(dtype or row.dtype).clamp(min=1 + NEAREST)

    def by_height(self, heights: int, like: Tensor) -> Tensor:
        """Return α of the families of heights 1 to `heights`: `[heights, heads or 1]`, with dtype and device of `like`."""
        rows = [self.at_height(h, like.dtype).reshape(-1) for h in range(1, heights + 1)]
        return torch.stack(rows).to(like.device)


def resolve_normalizer(normalizer: Any, q: Tensor) -> Entmax | None:
    """Return None for softmax, else the `Entmax`, checked against the heads of q."""
    if isinstance(normalizer, str) and normalizer == "softmax":
        return None
    if not isinstance(normalizer, Entmax):
        raise InvalidInput("normalizer", got=repr(normalizer), expected="'softmax' or an hsa.Entmax")
    alpha, heads = normalizer.alpha, q.shape[1]
    if isinstance(alpha, Tensor):
        if alpha.ndim and alpha.shape[-1] not in (1, heads):
            raise InvalidInput(
                "normalizer.alpha",
                got=f"shape {tuple(alpha.shape)}",
                expected=f"({heads},), (levels, {heads}) or (levels, 1), as q has {heads} heads",
            )
        if alpha.device != q.device:
            raise InvalidInput("normalizer.alpha", got=f"device {alpha.device}", expected=f"{q.device}, as q")
    return None if normalizer.is_softmax else normalizer


def resolve_entmax(normalizer: Any, q: Tensor) -> Entmax:
    """Return the `Entmax`, checked against the heads of q, for functions that softmax has no meaning for."""
    entmax = resolve_normalizer(normalizer, q)
    if entmax is None:
        raise InvalidInput("normalizer", got="softmax", expected="an hsa.Entmax, as softmax has no weights of 0")
    return entmax


def _check_tensor(alpha: Tensor, least: float) -> None:
    if alpha.ndim > 2 or alpha.numel() == 0 or not alpha.is_floating_point():
        raise InvalidInput(
            "Entmax.alpha",
            got=f"shape {tuple(alpha.shape)}, {alpha.dtype}",
            expected="numbers of shape (heads,), (levels, heads) or (levels, 1)",
        )
    # Reading values synchronises with a GPU, and is impossible in compiled code.
    if torch.compiler.is_compiling() or not (alpha.device.type == "cpu" or is_checking()):
        return
    outside = alpha.detach()[~((alpha >= max(1, least - ROUNDING)) & (alpha <= 2))]
    if len(outside):
        raise _out_of_range(outside[0].item(), least)


def _out_of_range(alpha: Any, least: float = 1.0) -> InvalidInput:
    return InvalidInput(
        "Entmax.alpha",
        got=alpha,
        expected=f"a number from {'1 (softmax)' if least == 1 else f'{least} (least)'} to 2 (sparsemax)",
        fix="Keep a learned α in range, such as 1 + sigmoid(parameter)",
    )
