"""Talking heads: linear maps across heads, of the logits and of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class HeadMixing:
    """Linear maps across heads: talking-heads attention (Shazeer et al. 2020, arXiv:2003.02436).

        logit_g  ← Σ_h logits[g, h] · logit_h      similarities and positions; log leaf counts and masks are added later
        weight_g ← Σ_h weights[g, h] · weight_h    after the softmax; applied to the values of head g

    Identity matrices change nothing. If the rows of `weights` sum to 1, so do the rows of attention.

    Args:
        logits: Map of the logits, `[heads, heads]`.
        weights: Map of the weights, `[heads, heads]`.

    >>> import hsa
    >>> q, k, v = torch.randn(3, 9, 2, 4).unbind(0)  # 9 leaves, 2 heads of 4
    >>> mixing = HeadMixing(torch.eye(2), torch.full((2, 2), 0.5))
    >>> hsa.hierarchical_attention(q, k, v, hsa.Hierarchy.flat([9]), mixing=mixing).shape
    torch.Size([9, 2, 4])
    """

    logits: Tensor
    weights: Tensor

    @staticmethod
    def identity(heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> HeadMixing:
        """Return the mixing that changes nothing."""
        eye = torch.eye(heads, dtype=dtype, device=device)
        return HeadMixing(eye, eye)

    def mix_logits(self, x: Tensor) -> Tensor:
        """Mix logits `[…, heads, queries, keys]`."""
        return _across(self.logits, x)

    def mix_weights(self, x: Tensor) -> Tensor:
        """Mix weights `[…, heads, queries, keys]`."""
        return _across(self.weights, x)


def _across(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("gh,...hij->...gij", matrix.to(x.dtype), x)


def check_mixing(mixing: Any, q: Tensor) -> None:
    """Check that the mixing fits the heads and the device of q."""
    if mixing is None:
        return
    if not isinstance(mixing, HeadMixing):
        raise InvalidInput("mixing", got=type(mixing).__name__, expected="an hsa.HeadMixing")
    heads = q.shape[1]
    for name in ("logits", "weights"):
        matrix = getattr(mixing, name)
        if not isinstance(matrix, Tensor) or matrix.shape != (heads, heads) or not matrix.is_floating_point():
            got = f"{tuple(matrix.shape)}, {matrix.dtype}" if isinstance(matrix, Tensor) else type(matrix).__name__
            expected = f"numbers of shape ({heads}, {heads}), as q has {heads} heads"
            raise InvalidInput(f"mixing.{name}", got=got, expected=expected)
        if matrix.device != q.device:
            raise InvalidInput(f"mixing.{name}", got=f"device {matrix.device}", expected=f"{q.device}, as q")
