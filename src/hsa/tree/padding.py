"""`Padding`: conversion between padded `[batch, heads, seq, head_dim]` and packed `[leaves, heads, head_dim]` tensors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Padding:
    """Conversion of a padded batch to packed tensors and back. Padding may be on the left, on the right or anywhere.

    Args:
        mask: True or 1 at tokens, `[batch, seq]`.
        lengths: Number of tokens per sequence, in place of a mask; padding is on the right.
        width: Padded length; by default the longest of `lengths`.

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
            raise InvalidInput(
                "Padding", got="neither" if mask is None else "both", expected="exactly one of mask and lengths"
            )
        if mask is None:
            counts = lengths.tolist() if isinstance(lengths, Tensor) else [int(n) for n in lengths]
            longest = max(counts, default=0)
            width = longest if width is None else width
            if longest > width:
                raise InvalidInput("lengths", expected=f"at most width={width}", got=f"{longest} tokens")
            self.shape, self.lengths = (len(counts), width), counts
        else:
            if mask.ndim != 2:
                raise InvalidInput("mask", expected="shape [batch, seq]", got=f"{tuple(mask.shape)}")
            self.mask = mask.bool()
            self.shape, self.lengths = (len(mask), mask.shape[1]), self.mask.sum(1).tolist()
        if 0 in self.lengths:
            raise InvalidInput(
                f"mask[{self.lengths.index(0)}]",
                problem="no token",
                expected="at least one token per sequence",
                fix="Leave empty sequences out of the batch",
            )

    @cached_property
    def mask(self) -> Tensor:
        """`[batch, seq]`, True where there is a token."""
        return torch.arange(self.shape[1]) < torch.tensor(self.lengths, dtype=torch.long)[:, None]

    @cached_property
    def _rows(self) -> Tensor:
        """Rows of the tokens among `batch · seq`."""
        return self.mask.flatten().nonzero().squeeze(-1)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def full(self) -> bool:
        """Whether there is no padding, in which case nothing is copied."""
        return self.num_tokens == self.shape[0] * self.shape[1]

    def pack(self, x: Tensor) -> Tensor:
        """Convert `[batch, heads, seq, dim]` to `[leaves, heads, dim]`."""
        batch, seq = self.shape
        if x.ndim != 4 or (x.shape[0], x.shape[2]) != (batch, seq):
            raise InvalidInput("x", expected=f"shape [{batch}, heads, {seq}, head_dim]", got=f"{tuple(x.shape)}")
        return self.pack_tokens(x.transpose(1, 2))

    def unpack(self, x: Tensor) -> Tensor:
        """Convert `[leaves, heads, dim]` to `[batch, heads, seq, dim]`, with zeros at padding."""
        if x.ndim != 3 or len(x) != self.num_tokens:
            raise InvalidInput("x", expected=f"shape [{self.num_tokens}, heads, head_dim]", got=f"{tuple(x.shape)}")
        return self.unpack_tokens(x).transpose(1, 2)

    def pack_tokens(self, x: Tensor) -> Tensor:
        """Convert `[batch, seq, …]` to `[leaves, …]`."""
        rows = x.flatten(0, 1)
        return rows if self.full else rows.index_select(0, self._rows.to(x.device))

    def unpack_tokens(self, x: Tensor) -> Tensor:
        """Convert `[leaves, …]` to `[batch, seq, …]`, with zeros at padding."""
        if self.full:
            return x.unflatten(0, self.shape)
        empty = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return empty.index_copy(0, self._rows.to(x.device), x).unflatten(0, self.shape)
