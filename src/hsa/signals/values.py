"""Leaf values and stacks of them: the types that are allowed, and the values that fit into one tensor.

A value is a string, a number or an array of numbers. Arrays are stored as tensors. A scalar of dtype int64, float64 or
bool is stored as Python's `int`, `float` or `bool`; a scalar of another dtype is a tensor without axes. Therefore a value
taken out of a stack equals the value that was put in, dtype included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.signals.path import Path

Value = str | bool | int | float | Tensor
Where = str | Path
Kind = type[str] | tuple[torch.dtype, tuple[int, ...]]  # strings, or the dtype and shape of a number or an array

_PYTHON_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}
_NUMPY_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_ALLOWED = "a string, a number or an array of numbers"
_INTEGERS = "an integer of at most 64 bits"


def as_value(value: Any, where: Where) -> Value:
    """Return a value in the form in which leaves store it (see the top of this file).

    >>> as_value(np.int64(3), "leaf"), as_value(torch.tensor(3), "leaf"), as_value(np.float32(0.5), "leaf")
    (3, 3, tensor(0.5000))
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind == "U" and value.ndim == 0:
            return str(value.item())
        value = as_tensor(value, where)
    if isinstance(value, Tensor):
        return unstack_scalar(value) if value.ndim == 0 else value
    if isinstance(value, (bool, float)):
        return bool(value) if isinstance(value, bool) else float(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidInput(str(where), got=value, expected=_INTEGERS)
        return int(value)
    fix = "Wrap it: torch.tensor([…])" if isinstance(value, (list, tuple)) else None
    raise InvalidInput(str(where), got=f"a value of type {type(value).__name__}", expected=_ALLOWED, fix=fix)


def as_tensor(array: Any, where: Where) -> Tensor:
    """Return a tensor or a numeric numpy array as a tensor; memory that can be written to is shared."""
    if isinstance(array, Tensor):
        return array
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(np.asarray(array))
    except TypeError:
        raise InvalidInput(str(where), got=f"an array of dtype {array.dtype}", expected=_ALLOWED) from None


def unstack_scalar(scalar: Tensor) -> Value:
    """Return a tensor without axes as a value."""
    return scalar.item() if scalar.dtype in _PYTHON_DTYPES.values() and not scalar.requires_grad else scalar


def kind_of(value: Value) -> Kind:
    """Return the kind of a value: `str`, or dtype and shape. Only values of one kind can be stacked.

    >>> kind_of("cat"), kind_of(3), kind_of(torch.zeros(2, 3))
    (<class 'str'>, (torch.int64, ()), (torch.float32, (2, 3)))
    """
    if isinstance(value, str):
        return str
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return _PYTHON_DTYPES[type(value)], ()


def kind_of_stack(stack: Tensor | tuple[str, ...]) -> Kind:
    """Return the kind of the values of a stack."""
    return (stack.dtype, tuple(stack.shape[1:])) if isinstance(stack, Tensor) else str


def stack(values: Sequence[Value]) -> Tensor | tuple[str, ...] | None:
    """Stack values of one kind into one tensor or one tuple of strings; return None if the kinds differ.

    >>> stack([1, 2, 3]), stack(["a", "b"]), stack([1, 2.5])
    (tensor([1, 2, 3]), ('a', 'b'), None)
    """
    types = set(map(type, values))
    if types == {str}:
        return tuple(values)  # type: ignore[arg-type]
    if len(types) == 1 and (python := next(iter(types))) in _NUMPY_DTYPES:
        return torch.from_numpy(np.array(values, _NUMPY_DTYPES[python]))
    kinds = {kind_of(value) for value in values}
    if len(kinds) != 1:
        return None
    dtype = next(iter(kinds))[0]  # type: ignore[index]
    return torch.stack([torch.as_tensor(value, dtype=dtype) for value in values])


def as_values(values: Any, shape: tuple[int, ...] | None, where: Where) -> Tensor | tuple[str, ...] | list[Value]:
    """Return a stack with one value per member; a list if the values are of several kinds.

    Args:
        values: Array or list.
        shape: Shape of a grid, which an array has as its first axes; None for a domain with one axis.
        where: Name of the values in error messages.
    """
    if isinstance(values, (Tensor, np.ndarray)):
        if values.ndim == 0:
            raise InvalidInput(str(where), got="an array without axes", expected="one row per member")
        if isinstance(values, np.ndarray) and values.dtype.kind == "U":
            if values.ndim > 1 and values.shape != shape:
                raise InvalidInput(str(where), got=f"strings of shape {values.shape}", expected="one string per member")
            return tuple(values.reshape(-1).tolist())
        tensor = as_tensor(values, where)
        if shape is None or len(shape) == 1:
            return tensor
        if tuple(tensor.shape[: len(shape)]) != shape:
            raise InvalidInput(
                str(where),
                got=f"values of shape {tuple(tensor.shape)}",
                expected=f"shape {shape} + the shape of a leaf, as the domain is Grid({shape})",
            )
        return tensor.reshape(math.prod(shape), *tensor.shape[len(shape) :])
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidInput(str(where), got=f"values of type {type(values).__name__}", expected="an array or a list")
    listed = list(values)
    types = set(map(type, listed))
    if types == {int}:
        _check_integers(listed, where)
    elif not types <= {str, float, bool}:  # these need no conversion
        base = where if isinstance(where, Path) else Path(None, where)
        listed = [as_value(value, Path(base, f"[{i}]")) for i, value in enumerate(listed)]
    stacked = stack(listed) if listed else None
    return listed if stacked is None else stacked


def same(a: Any, b: Any) -> bool:
    """Return whether type, dtype, shape and numbers are equal; a NaN equals a NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.detach(), b.detach().to(a.device)
        if torch.equal(a, b):
            return True
        if not (a.is_floating_point() or a.is_complex()):
            return False
        return bool((torch.eq(a, b) | (torch.isnan(a) & torch.isnan(b))).all())
    if type(a) is not type(b):
        return False
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _check_integers(values: list[int], where: Where) -> None:
    if max(values) >= 2**63 or min(values) < -(2**63):
        index = next(i for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise InvalidInput(f"{where}[{index}]", got=values[index], expected=_INTEGERS)
