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


def read_mask(mask: Tensor, shape: tuple[int, int, int, int], *, where: str = "attn_mask") -> Visible:
    """Read a mask as `torch.nn.functional.scaled_dot_product_attention` takes it.

    Args:
        mask: Broadcastable to `shape`. Bool, True where a query may attend; or floating point, 0 there and −∞ (or the
            lowest number of the dtype) elsewhere.
        shape: Numbers of sequences, heads, queries and keys.
        where: Name of the argument in errors.

    Raises:
        InvalidInput: It hides anything but padding and later positions. Rows of padding are not looked at.

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
    present = rows.any(1)
    counts = present if queries == keys else torch.ones(batch, queries, dtype=torch.bool, device=mask.device)
    padding = present[:, None].expand_as(rows)
    if torch.equal(rows[counts], padding[counts]):
        return Visible(present, causal=False)
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    if queries == keys and torch.equal(rows[counts], (padding & ~later)[counts]):
        return Visible(present, causal=True)
    odd = (rows != padding) & counts[..., None]
    earlier = odd & ~later if queries == keys else odd
    row, query, key = (earlier if earlier.any() else odd).nonzero()[0].tolist()
    raise InvalidInput(
        where,
        expected="a mask that hides padding, or padding and later keys",
        got=f"one that hides key {key} from query {query} of sequence {row} but not from all queries",
        fix=_INSTEAD,
    )


_INSTEAD = "Use torch.nn.functional.scaled_dot_product_attention for this mask"


def shows(mask: Tensor, where: str) -> Tensor:
    """Return a mask as bool, True where a query may attend; refuse masks that hold a bias."""
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(where, expected="a tensor of bool or floating-point numbers", got=got)
    if mask.dtype == torch.bool:
        return mask
    shown = mask > torch.finfo(mask.dtype).min / 2
    bias = mask[shown & (mask != 0)]
    if len(bias):
        raise InvalidInput(
            where, expected="0 and −∞ only, as attention over trees takes no bias", got=f"{bias[0]:g}", fix=_INSTEAD
        )
    return shown
