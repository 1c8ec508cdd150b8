"""Verify the saved state of a cache before the cache changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput

Wanted = tuple[tuple[int | str, ...], torch.dtype]
"""Shape and dtype of a tensor. A named size, such as "sequences", is any number, the same wherever the name occurs."""

_FIX = "Make the cache with the sizes of the saved one"


def check_tensors(state: Any, wanted: Mapping[str, Wanted], where: str = "state", **sizes: int) -> dict[str, int]:
    """Check that a state has the wanted tensors, and return the sizes by their names.

    Args:
        state: Tensors by name.
        wanted: Shapes and dtypes by name.
        where: Name of the state, for errors.
        sizes: Known sizes, by name.
    """
    if not isinstance(state, Mapping):
        raise InvalidInput(where, got=type(state).__name__, expected="what state_dict of a cache returned")
    for name, (shape, dtype) in wanted.items():
        tensor: Any = state.get(name)
        shaped = isinstance(tensor, Tensor)
        actual = tuple(tensor.shape) if shaped else None
        if actual is not None and len(actual) == len(shape):
            for size, own in zip(shape, actual, strict=True):
                if isinstance(size, str):
                    sizes.setdefault(size, own)
        known = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)
        if actual is None or actual != known:
            raise InvalidInput(
                f"{where}[{name!r}]",
                got=f"shape {actual}",
                problem="missing" if actual is None else None,
                expected=f"a tensor of shape ({', '.join(map(str, known))}), as in this cache",
                fix=_FIX,
            )
        if tensor.dtype != dtype:
            raise InvalidInput(f"{where}[{name!r}]", got=tensor.dtype, expected=f"{dtype}, as in this cache")
    return sizes


def check_lengths(lengths: Any, sequences: int | None = None, longest: int | None = None) -> list[int]:
    """Return the lengths of the sequences in a state.

    Args:
        lengths: Value to check.
        sequences: Number of sequences; None for one or more.
        longest: Largest number of tokens of a sequence; None for any.
    """
    whole = isinstance(lengths, list | tuple) and len(lengths) > 0 and all(type(n) is int and n >= 0 for n in lengths)
    fits = whole and sequences in (None, len(lengths)) and (longest is None or max(lengths) <= longest)
    if not fits:
        number = "one or more" if sequences is None else str(sequences)
        most = "" if longest is None else f" up to {longest}"
        raise InvalidInput(
            "state['lengths']", got=repr(lengths)[:80], expected=f"{number} lengths{most}, as in this cache"
        )
    return list(lengths)
