"""Talking heads: linear maps across heads, of the logits and of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class HeadMixing:
    """How heads share what they see (Shazeer et al., *Talking-Heads Attention*, 2020, arXiv:2003.02436).

        logit_g  ← Σ_h logits[g, h] · logit_h      similarities and positions; log leaf counts and masks come after
        weight_g ← Σ_h weights[g, h] · weight_h    after the softmax; applied to the values of head g

    Both `[heads, heads]`. Two identities change nothing. Rows of `weights` that sum to 1 keep rows of attention that do.

    >>> HeadMixing.identity(3).logits.shape
    torch.Size([3, 3])
    """

    logits: Tensor
    weights: Tensor

    @staticmethod
    def identity(heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> HeadMixing:
        eye = torch.eye(heads, dtype=dtype, device=device)
        return HeadMixing(eye, eye)

    def mix_logits(self, x: Tensor) -> Tensor:
        """`[…, heads, queries, keys]`."""
        return _across(self.logits, x)

    def mix_weights(self, x: Tensor) -> Tensor:
        """`[…, heads, queries, keys]`."""
        return _across(self.weights, x)


def _across(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("gh,...hij->...gij", matrix.to(x.dtype), x)


def check_mixing(mixing: Any, q: Tensor) -> None:
    """Check that the mixing is for the heads of q, on its device."""
    if mixing is None:
        return
    if not isinstance(mixing, HeadMixing):
        raise InvalidInput("mixing", given=type(mixing).__name__, expected="an hsa.HeadMixing")
    heads = q.shape[1]
    for name in ("logits", "weights"):
        matrix = getattr(mixing, name)
        if not isinstance(matrix, Tensor) or matrix.shape != (heads, heads) or not matrix.is_floating_point():
            given = f"{tuple(matrix.shape)}, {matrix.dtype}" if isinstance(matrix, Tensor) else type(matrix).__name__
            raise InvalidInput(
                f"mixing.{name}", given=given, expected=f"numbers of shape ({heads}, {heads}), as q has {heads} heads"
            )
        if matrix.device != q.device:
            raise InvalidInput(f"mixing.{name}", given=f"device {matrix.device}", expected=f"{q.device}, as q")
