"""`Padding`: between `[batch, heads, seq, head_dim]` with padding and packed `[leaves, heads, head_dim]` without."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Padding:
    """The positions of a padded batch that hold tokens, with padding on the left, on the right or scattered.

    Args:
        mask: `[batch, seq]`, true or 1 where there is a token.
        lengths: tokens per sequence instead of a mask, padding on the right; needs `width`.
        width: the padded length.

    >>> from hsa import Hierarchy, hierarchical_attention
    >>> padding = Padding(lengths=[5, 3], width=6)
    >>> q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)  # [batch, heads, seq, head_dim]
    >>> tree = Hierarchy.regular(padding.lengths, (2, 2))
    >>> out = padding.unpack(hierarchical_attention(*(padding.pack(x) for x in (q, k, v)), tree))
    >>> out.shape, out[1, :, 3:].abs().max().item()
    (torch.Size([2, 4, 6, 8]), 0.0)
    """

    def __init__(self, mask: Tensor | None = None, *, lengths: Any = None, width: int | None = None):
        if (mask is None) == (lengths is None):
            raise InvalidInput("Padding", given="both or none of mask and lengths", expected="exactly one of them")
        if mask is None:
            mask = _mask_from_lengths(lengths, width)
        if mask.ndim != 2:
            raise InvalidInput("mask", given=f"shape {tuple(mask.shape)}", expected="[batch, seq]")
        self.mask = mask.bool()
        self._rows = self.mask.flatten().nonzero().squeeze(-1)
        self.lengths: list[int] = self.mask.sum(1).tolist()
        if 0 in self.lengths:
            raise InvalidInput(
                f"mask[{self.lengths.index(0)}]",
                given="no token",
                expected="at least one per sequence",
                fix="leave empty sequences out of the batch",
            )

    @property
    def full(self) -> bool:
        """Whether there is no padding, so that nothing has to be copied."""
        return len(self._rows) == self.mask.numel()

    def pack(self, x: Tensor) -> Tensor:
        """`[batch, heads, seq, dim]` → `[leaves, heads, dim]`."""
        batch, seq = self.mask.shape
        if x.ndim != 4 or (x.shape[0], x.shape[2]) != (batch, seq):
            raise InvalidInput("x", given=f"shape {tuple(x.shape)}", expected=f"[{batch}, heads, {seq}, head_dim]")
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.full else rows.index_select(0, self._rows)

    def unpack(self, x: Tensor) -> Tensor:
        """`[leaves, heads, dim]` → `[batch, heads, seq, dim]`, zeros at padding."""
        batch, seq = self.mask.shape
        if x.ndim != 3 or len(x) != len(self._rows):
            raise InvalidInput("x", given=f"shape {tuple(x.shape)}", expected=f"[{len(self._rows)}, heads, head_dim]")
        padded = x if self.full else x.new_zeros(batch * seq, *x.shape[1:]).index_copy(0, self._rows, x)
        return padded.unflatten(0, (batch, seq)).transpose(1, 2)


def _mask_from_lengths(lengths: Any, width: int | None) -> Tensor:
    counts = lengths if isinstance(lengths, Tensor) else torch.as_tensor(np.asarray(lengths, np.int64))
    longest = int(counts.max()) if counts.numel() else 0
    width = longest if width is None else width
    if longest > width:
        raise InvalidInput("lengths", given=f"{longest} tokens", expected=f"at most width={width}")
    return torch.arange(width, device=counts.device) < counts[:, None]
