"""Thresholds of clustered attention: one number for all query heads, or one per head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.tree.lasting import lasting

THRESHOLD = 1 / 256
"""Default of `threshold`."""
Threshold: TypeAlias = float | tuple[float, ...]
"""Checked threshold: a number, or one per query head."""


def check_threshold(threshold: Any, where: str = "threshold") -> Threshold:
    """Return the threshold, or one per head as a tuple, if each is a share of attention.

    >>> check_threshold(torch.tensor([0.5, 0.25]))
    (0.5, 0.25)
    """
    entries = None if isinstance(threshold, (int, float)) else entries_of(threshold)
    if entries is None:
        return _check_share(threshold, where)
    if not entries:
        raise InvalidInput(where, expected="a number, or one per query head", got=repr(threshold))
    return tuple(_check_share(entry, f"{where}[{i}]") for i, entry in enumerate(entries))


def check_number_of_heads(threshold: Threshold | None, heads: int) -> None:
    """Check that a threshold per head has one number for each of the query heads."""
    if isinstance(threshold, tuple) and len(threshold) != heads:
        expected = f"one number, or one for each of the {heads} query heads"
        raise InvalidInput("threshold", expected=expected, got=f"a sequence of {len(threshold)}")


def entries_of(value: Any) -> list[Any] | None:
    """Return the entries of a sequence, or of a tensor or array with axes; None for anything else.

    >>> entries_of((0.5, [0.5, 0.25])), entries_of(torch.ones(1, 2)), entries_of(0.5)
    ([0.5, [0.5, 0.25]], [[1.0, 1.0]], None)
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value.tolist() if getattr(value, "ndim", 0) > 0 else None


def _check_share(threshold: Any, where: str) -> float:
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not 0 < threshold <= 1:
        raise InvalidInput(
            where,
            expected="a number above 0 and at most 1",
            got=repr(threshold),
            fix="Smaller values open more groups; 1/256 is the default",
        )
    return float(threshold)


def log_of(
    threshold: Threshold, like: Tensor, log: Callable[[float], float] = math.log, shape: Sequence[int] = (-1,)
) -> float | Tensor:
    """Return the logarithm of a threshold: a number, or one per head in a tensor of this shape, which must not be changed.

    The tensor has the type and device of `like`. Later calls share it, so that nothing is copied to the device again.
    """
    if isinstance(threshold, tuple):
        return _logs_per_head(threshold, log, like.dtype, like.device).view(*shape)
    return log(threshold)


@lru_cache(maxsize=1024)
def _logs_per_head(
    threshold: tuple[float, ...], log: Callable[[float], float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with lasting():
        return torch.tensor([log(number) for number in threshold], dtype=dtype, device=device)
