"""Typed description of a call of three-way attention, which backends accept or refuse, and run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hsa.attention.checks import check_count, check_inputs
from hsa.errors import InvalidInput
from hsa.research.trilinear.forms import Form, to_core
from hsa.tree.hierarchy import Hierarchy


class Rows(NamedTuple):
    """Packed inputs, `[leaves, heads, dim]`. v1 and v2 have a common width, which may differ from that of q, k1 and k2."""

    q: Tensor
    k1: Tensor
    k2: Tensor
    v1: Tensor
    v2: Tensor


class Forests(NamedTuple):
    """Forests of q, of k1 and v1, and of k2 and v2."""

    queries: Hierarchy
    first: Hierarchy
    second: Hierarchy


@dataclass(frozen=True, eq=False)
class TrilinearCall:
    """A checked call.

    Attributes:
        rows, forests: Inputs and their trees.
        tensor: Tensor T as passed; in core form, the full tensor `[heads, dim, dim, dim]` or None.
        scale: Factor of the logits.
        left, right: Largest distance of a leaf before and after a query; None for no limit.
        backend: Name of the requested backend, or "auto".
    """

    rows: Rows
    forests: Forests
    tensor: Form
    scale: float
    left: int | None = None
    right: int | None = None
    backend: str = "auto"

    def in_core_form(self) -> TrilinearCall:
        """Return the same call with T multiplied into q, k1 and k2, unless it is a full tensor."""
        q, k1, k2, full = to_core(*self.rows[:3], self.tensor)
        return replace(self, rows=Rows(q, k1, k2, *self.rows[3:]), tensor=full)

    @property
    def full(self) -> Tensor | None:
        """Full tensor of a call in core form, or None."""
        return self.tensor if isinstance(self.tensor, Tensor) else None

    @property
    def limited(self) -> bool:
        """Whether some leaves of a tree are hidden from some of its queries."""
        return self.left is not None or self.right is not None


def limits(forests: Forests, causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """Return the largest distances of a leaf before and after a query; None for no limit."""
    if window is not None:
        window = check_count("window", window, "1 or more leaves to each side, including the query's own", minimum=1)
    elif not causal:
        return None, None
    for name, other in (("first", forests.first), ("second", forests.second)):
        if other is not forests.queries:
            raise InvalidInput(
                name,
                got="another forest, with causal or window",
                expected="None, the forest of the queries",
                fix="Omit causal and window: leaves of different forests have no order",
            )
    reach = None if window is None else window - 1
    return reach, 0 if causal else reach


def check_trees(forests: Forests) -> None:
    """Raise an error unless all forests have the same number of trees."""
    for name, forest in (("first", forests.first), ("second", forests.second)):
        if forest.num_trees != forests.queries.num_trees:
            raise InvalidInput(
                name,
                got=f"{forest.num_trees} trees",
                expected=f"{forests.queries.num_trees}, as the hierarchy of q has",
                fix="Pass one tree per tree of q: queries of tree t see pairs of tree t",
            )


def check_rows(rows: Rows, forests: Forests) -> None:
    """Raise an error unless the rows match their forests and each other."""
    q, k1, k2, v1, v2 = rows
    check_inputs({"q": q}, forests.queries)
    check_inputs({"k1": k1, "v1": v1}, forests.first)
    check_inputs({"k2": k2, "v2": v2}, forests.second)
    check_trees(forests)
    heads, dim = q.shape[1:]
    for name, x, width, other in (("k1", k1, dim, "q"), ("k2", k2, dim, "q"), ("v2", v2, v1.shape[2], "v1")):
        if x.shape[2] != width:
            raise InvalidInput(name, got=x.shape[2], expected=f"a width of {width}, as {other} has")
    for name, x in zip(Rows._fields[1:], rows[1:], strict=True):
        if x.shape[1] != heads:
            raise InvalidInput(name, got=x.shape[1], expected=f"{heads} heads, as q has")
        if x.dtype != q.dtype:
            raise InvalidInput(
                name, got=x.dtype, expected=f"dtype {q.dtype}, as q has", fix="Cast all inputs to one dtype"
            )
        if x.device != q.device:
            raise InvalidInput(name, got=x.device, expected=f"device {q.device}, as q has")
