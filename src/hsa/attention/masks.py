"""Masks that attention over trees can honour: padding, and everything later than a query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Visible(NamedTuple):
    """Meaning of a mask."""

    keys: Tensor | None  # [batch, keys], True where a key is a token; None: all are
    causal: bool  # whether queries see nothing after their own position
    queries: Tensor | None = None  # [batch, queries], False where a query sees nothing; None: all see something

    def with_tokens(self, queries: int) -> Visible:
        """Return the same with one key for every sequence of padding alone, as a tree needs a leaf; no query sees it."""
        if self.keys is None or self.keys.shape[1] == 0 or (has_tokens := self.keys.any(1)).all():
            return self
        keys = self.keys.clone()
        keys[:, 0] |= ~has_tokens
        sees = has_tokens[:, None].expand(-1, queries)
        return self._replace(keys=keys, queries=sees if self.queries is None else sees & self.queries)


def read_mask(
    mask: Tensor, shape: tuple[int, int, int, int], *, padding_attends: bool = False, where: str = "attn_mask"
) -> Visible:
    """Read a mask as `torch.nn.functional.scaled_dot_product_attention` takes it.

    Args:
        mask: Broadcastable to `shape`. Bool, True where a query may attend; or floating point, 0 there and −∞ (or the
            lowest number of the dtype) elsewhere.
        shape: Numbers of sequences, heads, queries and keys.
        padding_attends: Whether queries at the positions of padding attend as well, unless the mask is causal. Otherwise
            their rows of the mask are not looked at.
        where: Name of the argument in errors.

    Raises:
        InvalidInput: It hides anything but padding and later positions. Any query may be hidden from everything.

    >>> read_mask(torch.ones(5, 5).tril().bool(), (2, 4, 5, 5)).causal
    True
    >>> read_mask(torch.tensor([True, True, False]), (1, 4, 4, 3)).keys
    tensor([[ True,  True, False]])
    """
    shown = shows(mask, where)
    batch, heads, queries, keys = shape
    if mask.ndim > 4 or any(size not in (1, full) for size, full in zip(mask.shape[::-1], shape[::-1], strict=False)):
        raise InvalidInput(
            where,
            expected=f"a shape that broadcasts to [{batch} sequences, {heads} heads, {queries} queries, {keys} keys]",
            got=f"{tuple(mask.shape)}",
        )
    shown = shown.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if not torch.equal(shown, shown[:, :1].expand_as(shown)):
        raise InvalidInput(
            where, expected="the same mask for all heads", got="a mask that differs between heads", fix=_INSTEAD
        )
    if shown.shape[2] == 1:
        return Visible(shown[:, 0, 0].expand(batch, keys), causal=False)
    rows = shown[:, 0].expand(batch, queries, keys)
    present, sees = rows.any(1), rows.any(2)
    seeing = None if sees.all() else sees
    tokens = sees & present if queries == keys else sees  # the queries whose rows decide
    padding = present[:, None].expand_as(rows)
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    odd = (rows != padding) & tokens[..., None]
    if queries == keys and odd.any() and torch.equal(rows[tokens], (padding & ~later)[tokens]):
        return Visible(present, True, seeing)
    if padding_attends:
        odd = (rows != padding) & sees[..., None]
    if not odd.any():
        return Visible(present, False, seeing)
    earlier = odd & ~later if queries == keys else odd
    row, query, key = (earlier if earlier.any() else odd).nonzero()[0].tolist()
    raise InvalidInput(
        where,
        expected="a mask that hides padding, or padding and later keys",
        got=f"one that hides key {key} from query {query} of sequence {row} but not from all queries",
        fix=_INSTEAD,
    )


_INSTEAD = "Use PyTorch's attention for this mask. For packed documents, pass nested tensors instead of a mask"


def shows(mask: Tensor, where: str) -> Tensor:
    """Return a mask as bool, True where a query may attend; refuse masks that hold a bias."""
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(where, expected="a tensor of bool or floating-point numbers", got=got)
    if mask.dtype == torch.bool:
        return mask
    shown = mask > torch.finfo(mask.dtype).min / 2
    bias = mask[(shown & (mask != 0)) | mask.isnan()]
    if len(bias):
        raise InvalidInput(
            where,
            expected="0 and −∞ only, as attention over trees takes no bias",
            got=f"{bias[0]:g}",
            fix="For padding, pass −∞ or a bool mask; for a bias, use PyTorch's attention",
        )
    return shown
