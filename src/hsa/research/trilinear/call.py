"""One description of a call of three-way attention: what its backends are asked about and run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hsa.attention.checks import check_count, check_inputs
from hsa.errors import InvalidInput
from hsa.research.trilinear.forms import Form, to_core
from hsa.tree.hierarchy import Hierarchy


class Rows(NamedTuple):
    """Packed inputs, `[leaves, heads, dim]`, trees one after another. v1 and v2 have one width, which may be another."""

    q: Tensor
    k1: Tensor
    k2: Tensor
    v1: Tensor
    v2: Tensor


class Forests(NamedTuple):
    """The forests of q, of k1 and v1, and of k2 and v2."""

    queries: Hierarchy
    first: Hierarchy
    second: Hierarchy


@dataclass(frozen=True, eq=False)
class TrilinearCall:
    """A checked call.

    Attributes:
        rows, forests: the inputs and their trees.
        tensor: T, as the caller gave it; in core form, the full tensor `[heads, dim, dim, dim]` or None.
        scale: of the logits.
        left, right: how far before and after a query a leaf may lie; None for no limit.
        backend: the backend asked for, or "auto".
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
        """The full tensor, if there is one; of a call in core form."""
        return self.tensor if isinstance(self.tensor, Tensor) else None

    @property
    def limited(self) -> bool:
        """Whether some leaves of a tree are hidden from some of its queries."""
        return self.left is not None or self.right is not None


def limits(forests: Forests, causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """Return how far before and after a query a leaf may lie; None for no limit."""
    if window is not None:
        window = check_count("window", window, "1 or more leaves to each side, the query's own included", minimum=1)
    elif not causal:
        return None, None
    for name, other in (("first", forests.first), ("second", forests.second)):
        if other is not forests.queries:
            raise InvalidInput(
                name,
                given="another set of leaves, with causal or window",
                expected="the queries' own, None",
                fix="before, after and near have a meaning inside one sequence only: leave causal and window out",
            )
    reach = None if window is None else window - 1
    return reach, 0 if causal else reach


def check_trees(forests: Forests) -> None:
    """Raise an error unless each set has as many trees."""
    for name, forest in (("first", forests.first), ("second", forests.second)):
        if forest.num_trees != forests.queries.num_trees:
            raise InvalidInput(
                name,
                given=f"{forest.num_trees} trees",
                expected=f"{forests.queries.num_trees}, as the hierarchy of q",
                fix="tree t of the queries sees the pairs of tree t of both other sets",
            )


def check_rows(rows: Rows, forests: Forests) -> None:
    """Raise an error unless the rows fit their forests and each other."""
    q, k1, k2, v1, v2 = rows
    check_inputs({"q": q}, forests.queries)
    check_inputs({"k1": k1, "v1": v1}, forests.first)
    check_inputs({"k2": k2, "v2": v2}, forests.second)
    check_trees(forests)
    heads, dim = q.shape[1:]
    for name, x, width, other in (("k1", k1, dim, "q"), ("k2", k2, dim, "q"), ("v2", v2, v1.shape[2], "v1")):
        if x.shape[2] != width:
            raise InvalidInput(name, given=f"a width of {x.shape[2]}", expected=f"{width}, as {other}")
    for name, x in zip(Rows._fields[1:], rows[1:], strict=True):
        if x.shape[1] != heads:
            raise InvalidInput(name, given=f"{x.shape[1]} heads", expected=f"{heads}, as q")
        if x.dtype != q.dtype:
            raise InvalidInput(
                name, given=f"dtype {x.dtype}", expected=f"{q.dtype}, as q", fix="cast them to one dtype"
            )
        if x.device != q.device:
            raise InvalidInput(name, given=f"device {x.device}", expected=f"{q.device}, as q")
