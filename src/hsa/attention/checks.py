"""Validation of the operators' arguments, their defaults, and the checking mode for values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hsa.attention.derivatives import check_no_transform
from hsa.errors import InvalidInput, NonFinite
from hsa.tree.hierarchy import MOST_LEAVES, Hierarchy

_checking: ContextVar[bool] = ContextVar("hsa_checking", default=False)


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Make operators raise an error that names the first leaf with a NaN or an infinity in their inputs.

    Use it as a context manager. It is off by default because it costs a pass over the data, and a synchronisation on a GPU.

    >>> import hsa
    >>> q = torch.zeros(3, 1, 2); q[1, 0, 1] = torch.nan
    >>> with checking():
    ...     hsa.hierarchical_attention(q, q, q, Hierarchy.flat([1, 2]))
    Traceback (most recent call last):
    hsa.errors.NonFinite: q: leaf 1 (leaf 0 of tree 1), head 0 is nan. It was computed before the attention
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def is_checking() -> bool:
    """Return whether the checking mode is on."""
    return not torch.compiler.is_compiling() and _checking.get()


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(tensors: dict[str, Tensor], hierarchy: Hierarchy, rows: dict[str, int] | None = None) -> None:
    """Check that q, k and v (or some of them) fit the hierarchy and each other.

    Args:
        rows: Number of rows of the tensors that do not have one row per leaf, by name.
    """
    if not isinstance(hierarchy, Hierarchy):
        raise InvalidInput("hierarchy", got=type(hierarchy).__name__, expected="an hsa.Hierarchy")
    rows = rows or {}
    leaves = Rows(
        hierarchy.num_leaves,
        f"the number of leaves in {hierarchy}",
        "Pass one row per leaf, trees one after another, without padding",
    )
    others = {
        name: Rows(n, "the number of queries", "Pass one row per query, trees one after another, without padding")
        for name, n in rows.items()
    }
    check_packed(tensors, {name: others.get(name, leaves) for name in tensors})
    for name, x in tensors.items():
        if x.device != hierarchy.device:
            raise InvalidInput(
                name,
                got=f"device {x.device}",
                expected=f"device {hierarchy.device}, as the hierarchy",
                fix="Move the hierarchy once with hierarchy.to(device)",
            )
    if is_checking():
        for name, x in tensors.items():
            _check_finite(name, x, None if name in rows else hierarchy)


class Rows(NamedTuple):
    """Expected number of rows of a tensor.

    Attributes:
        number: Number of rows.
        what: Noun phrase that says where the number comes from.
        fix: Advice for another number.
        unit: Name of the rows.
    """

    number: int
    what: str
    fix: str
    unit: str = "leaves"


def check_packed(tensors: dict[str, Tensor], rows: dict[str, Rows]) -> None:
    """Check that q, k and v (or some of them) are packed tensors that fit each other."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(name, got=type(x).__name__, expected=f"a tensor [{rows[name].unit}, heads, head_dim]")
        check_no_transform(name, x)
        if x.ndim != 3:
            raise InvalidInput(
                name,
                got=f"shape {tuple(x.shape)}",
                expected=f"[{rows[name].unit}, heads, head_dim]",
                fix="Convert [batch, heads, seq, head_dim] with hsa.Padding(...).pack",
            )
        if len(x) != rows[name].number:
            expected = f"{rows[name].number} rows, {rows[name].what}"
            raise InvalidInput(name, got=f"{len(x)} rows", expected=expected, fix=rows[name].fix)
        if x.shape[1] == 0 or (x.shape[2] == 0 and name != "v"):
            raise InvalidInput(name, got=f"shape {tuple(x.shape)}", expected="at least one head and one dimension")
        if x.dtype not in DTYPES:
            raise InvalidInput(
                name, got=f"dtype {x.dtype}", expected="a floating-point dtype: float16, bfloat16, float32 or float64"
            )
    first, reference = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.dtype != reference.dtype:
            raise InvalidInput(
                name,
                got=f"dtype {x.dtype}",
                expected=f"dtype {reference.dtype}, as {first}",
                fix="Cast all tensors to one dtype",
            )
    if "q" in tensors and "k" in tensors:  # torch.compile of PyTorch 2.11 cannot trace a comparison of sets
        _check_heads(**tensors)
    elif "k" in tensors and "v" in tensors:
        _check_value_heads(tensors["k"], tensors["v"])


def _check_heads(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise InvalidInput("k", got=f"head_dim {k.shape[-1]}", expected=f"head_dim {q.shape[-1]}, as q")
    if q.shape[1] % k.shape[1]:
        raise InvalidInput(
            "k",
            got=f"{k.shape[1]} heads",
            expected=f"{q.shape[1]} heads, as q, or a divisor of that (grouped-query attention)",
        )
    if v is not None:
        _check_value_heads(k, v)


def _check_value_heads(k: Tensor, v: Tensor) -> None:
    if v.shape[1] != k.shape[1]:
        raise InvalidInput("v", got=f"{v.shape[1]} heads", expected=f"{k.shape[1]} heads, as k")


def check_count(name: str, value: Any, expected: str, minimum: int = 0) -> int:
    """Return the value if it is an integer of at least `minimum`; raise an error with the text `expected` otherwise.

    Values above `MOST_LEAVES` become that: no tree is larger, so they mean the same, and indices do not overflow.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise InvalidInput(name, got=repr(value), expected=expected)
    return min(int(value), MOST_LEAVES)


def check_dropout(dropout_p: Any) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise InvalidInput("dropout_p", expected="a number from 0 to below 1", got=repr(dropout_p))


def check_type(name: str, value: Any, wanted: type, fix: str) -> None:
    if value is not None and not isinstance(value, wanted):
        raise InvalidInput(name, got=type(value).__name__, expected=f"an hsa.{wanted.__name__}", fix=fix)


def check_positions(positions: Tensor | None, q: Tensor, hierarchy: Hierarchy) -> Tensor | None:
    """Return the positions as `[nodes, 1 or heads, dim]`."""
    if positions is None:
        return None
    if not isinstance(positions, Tensor):
        raise InvalidInput("positions", got=type(positions).__name__, expected="a tensor")
    check_no_transform("positions", positions)
    shape = tuple(positions.shape)
    if positions.ndim == 2:
        positions = positions[:, None]
    fits = positions.ndim == 3 and len(positions) == hierarchy.num_nodes and positions.shape[1] in (1, q.shape[1])
    if not fits:
        raise InvalidInput(
            "positions",
            got=f"shape {shape}",
            expected=f"[{hierarchy.num_nodes} nodes, dim] or [{hierarchy.num_nodes} nodes, {q.shape[1]} heads, dim]",
            fix="Pass one row per node of the hierarchy, in node order",
        )
    if positions.device != q.device:
        raise InvalidInput("positions", got=f"device {positions.device}", expected=f"device {q.device}, as q")
    if positions.dtype != q.dtype:
        raise InvalidInput("positions", got=f"dtype {positions.dtype}", expected=f"dtype {q.dtype}, as q")
    if is_checking() and not bool(torch.isfinite(positions).all()):
        node = int((~torch.isfinite(positions)).flatten(1).any(-1).nonzero()[0])
        raise NonFinite(f"positions: node {node} has a value that is not finite")
    return positions


def scale_or_default(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating)) or not math.isfinite(scale):
        raise InvalidInput(
            "scale",
            got=repr(scale),
            expected="a finite number",
            fix="For a scale that is learned or differs between heads, multiply q by it",
        )
    return float(scale)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads for the query heads that share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def without_autocast(x: Tensor) -> Any:
    """Return a context in which autocast is off on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)


def check_same_device(tensors: dict[str, Tensor]) -> None:
    first, reference = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.device != reference.device:
            raise InvalidInput(name, got=f"device {x.device}", expected=f"device {reference.device}, as {first}")


def check_all_finite(tensors: dict[str, Tensor]) -> None:
    """Check that all values are finite, if the checking mode is on."""
    if is_checking():
        for name, x in tensors.items():
            _check_finite(name, x, None)


def _check_finite(name: str, x: Tensor, hierarchy: Hierarchy | None) -> None:
    """Check values; rows are leaves if a hierarchy is given."""
    bad = (~torch.isfinite(x)).any(-1).nonzero()
    if len(bad) == 0:
        return
    row, head = bad[0].tolist()
    value = x[row, head][~torch.isfinite(x[row, head])][0].item()
    where = f"row {row}"
    if hierarchy is not None:
        offsets = hierarchy.structure.leaf_offsets
        tree = int(offsets.searchsorted(row, side="right")) - 1
        where = f"leaf {row} (leaf {row - int(offsets[tree])} of tree {tree})"
    raise NonFinite(f"{name}: {where}, head {head} is {value}. It was computed before the attention")
