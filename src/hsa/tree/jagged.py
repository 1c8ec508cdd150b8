"""Nested tensors with the jagged layout: their tokens are packed already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Jagged:
    """The tokens of a nested tensor `[batch, tokens, …]` or `[batch, heads, tokens, dim]`.

    Attributes:
        rows: `[leaves, …]`, the tokens of all sequences one after another.
        lengths: Number of tokens of each sequence.

    >>> x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    >>> Jagged("x", x).rows.shape
    torch.Size([8, 8])
    """

    def __init__(self, name: str, x: Tensor):
        check_jagged(name, x)
        nested: Any = x
        self._has_heads = nested._ragged_idx == 2
        if nested._ragged_idx > 2 or nested.lengths() is not None:
            expected = "shape [batch, tokens, …] or [batch, heads, tokens, dim], without holes"
            raise InvalidInput(name, expected=expected, got=f"{tuple(x.shape)}")
        self.rows: Tensor = (x.transpose(1, 2) if self._has_heads else x).values()
        self._offsets: Tensor = nested.offsets()
        self.lengths: list[int] = self._offsets.diff().tolist()
        if 0 in self.lengths:
            raise InvalidInput(
                f"{name}[{self.lengths.index(0)}]", problem="an empty sequence", expected="at least one token"
            )

    def wrap(self, rows: Tensor) -> Tensor:
        """Return other rows of the same tokens as a nested tensor of the same form."""
        x = torch.nested.nested_tensor_from_jagged(rows, self._offsets)
        return x.transpose(1, 2) if self._has_heads else x


def check_jagged(name: str, x: Tensor) -> None:
    """Raise an error for padded tensors beside nested ones, and for nested tensors with another layout."""
    if not x.is_nested or x.layout is not torch.jagged:
        got = "the strided layout" if x.is_nested else "a padded tensor beside nested ones"
        fix = "Build it with torch.nested.nested_tensor(…, layout=torch.jagged)"
        if x.is_nested:
            fix += "; inside torch.nn.TransformerEncoder, which builds others, pass enable_nested_tensor=False"
        raise InvalidInput(name, expected="a nested tensor with the jagged layout", got=got, fix=fix)


def few(lengths: list[int]) -> str:
    """Return the first lengths as text.

    >>> few([5, 2, 8, 1, 9])
    '5, 2, 8, 1, …'
    """
    return ", ".join(map(str, lengths[:4])) + (", …" if len(lengths) > 4 else "")
