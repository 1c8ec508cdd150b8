"""`Signal`: an immutable nested object of members on domains.

A signal maps every position of its domain to a `Leaf` (a value with a modality) or to another signal, to any depth and
with unequal depths. A family of leaves of one modality and one kind is always stored as one stack, without an object per
leaf. Hence equal signals are equal field by field.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from hsa.errors import InvalidInput
from hsa.signals.domains import Domain, Grid, Sequence
from hsa.signals.values import Value, Where, as_value, as_values, kind_of_stack, same, stack, unstack_scalar


class Leaf:
    """A value and its modality: a token id, a string, a vector, a patch.

    An int64, float64 or bool scalar is stored as Python's int, float or bool; other numbers are stored as tensors and keep
    their dtype. Arrays are not copied: do not write to them.

    Args:
        value: String, number or array of numbers.
        modality: Name of the kind of data, such as "text" or "patch".
        where: Name of the leaf in error messages.

    Raises:
        InvalidInput: For a value of another type, or a modality that is not a name.

    >>> Leaf("cat", "text")
    Leaf('cat', 'text')
    >>> import torch
    >>> Leaf(torch.zeros(3, 5), "patch")
    Leaf(float32[3, 5], 'patch')
    """

    value: Value
    modality: str

    def __init__(self, value: Any, modality: str, *, where: Where = "leaf"):
        self.__dict__.update(value=as_value(value, where), modality=_modality(modality, where))

    def __setattr__(self, name: str, value: Any) -> None:
        raise _frozen(self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and self.modality == other.modality and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Leaf({_preview(self.value)}, {self.modality!r})"


class Signal:
    """A domain and a member for each of its positions: a `Leaf` or another `Signal`.

    Args:
        domain: Arrangement of the members.
        members: A `Leaf` or a `Signal` for each position.
        where: Name of this object in error messages, such as `page[2].image`.

    Raises:
        InvalidInput: If the number of members is not that of the domain, or a member is neither a leaf nor a signal.

    >>> import numpy as np
    >>> from hsa.signals import Table
    >>> title = Signal.of(["Two", "cats"], "text")
    >>> picture = Signal.of(np.zeros((2, 3, 5, 5), np.float32), "patch", Grid((2, 3)))  # 2 × 3 patches of 5 × 5
    >>> page = Signal(Table(["title", "picture", "likes"]), [title, picture, Leaf(7, "number")])
    >>> page
    Signal(Table('title', 'picture', 'likes'), 9 leaves, 3 families, depth 2, text, patch, number)
    >>> print(page.show())
    Table('title', 'picture', 'likes') · 9 leaves · text, patch, number
    ├─ .title Sequence(2) · 2 leaves · text · 'Two' 'cats'
    ├─ .picture Grid((2, 3)) · 6 leaves · patch · float32[5, 5]
    └─ .likes number · 7
    """

    domain: Domain
    num_leaves: int
    num_families: int
    depth: int  # steps down to the deepest leaf
    modalities: tuple[str, ...]  # in order of appearance
    values: Tensor | tuple[str, ...] | None  # of a family of leaves of one modality and kind, else None
    _members: tuple[Signal | Leaf, ...]  # empty if `values` holds them

    def __init__(self, domain: Domain, members: Iterable[Signal | Leaf], *, where: Where = "signal"):
        _check_domain(domain, where)
        listed: tuple[Any, ...] = tuple(members)
        for i, member in enumerate(listed):
            if not isinstance(member, (Signal, Leaf)):
                step = domain.step(i) if i < domain.size else f"[{i}]"
                raise InvalidInput(
                    f"{where}{step}",
                    got=f"a value of type {type(member).__name__}",
                    expected="a Signal or a Leaf",
                    fix="Wrap a value: Leaf(value, modality); many of one modality: Signal.of(values, modality)",
                )
        _check_size(domain, len(listed), where)
        self._fill(domain, listed)

    @classmethod
    def of(cls, values: Any, modality: str, domain: Domain | None = None, *, where: Where = "signal") -> Signal:
        """Build a family of leaves of one modality from an array or a list, without an object per leaf.

        Args:
            values: Array with a row per member (for a grid, of the shape of the grid + the shape of a leaf), or a list.
            modality: Modality of the leaves.
            domain: Domain; a sequence by default.
            where: Name of the family in error messages.

        >>> Signal.of([3, 1, 4], "token") == Signal(Sequence(3), [Leaf(i, "token") for i in (3, 1, 4)])
        True
        """
        _modality(modality, where)
        if domain is not None:
            _check_domain(domain, where)
        listed = as_values(values, domain.shape if isinstance(domain, Grid) else None, where)
        if domain is None:
            if len(listed) == 0:
                raise InvalidInput(
                    str(where), problem="no values", expected="at least one: families have at least one member"
                )
            domain = Sequence(len(listed))
        _check_size(domain, len(listed), where)
        signal = cls.__new__(cls)
        if isinstance(listed, list):
            signal._fill(domain, tuple(Leaf(value, modality) for value in listed))
        else:
            signal._fill_stacked(domain, listed, modality)
        return signal

    def _fill(self, domain: Domain, members: tuple[Signal | Leaf, ...]) -> None:
        leaves = [member for member in members if isinstance(member, Leaf)]
        modalities = dict.fromkeys(
            name
            for member in members
            for name in ((member.modality,) if isinstance(member, Leaf) else member.modalities)
        )
        if len(leaves) == len(members) and len(modalities) == 1:
            values = stack([leaf.value for leaf in leaves])
            if values is not None:
                self._fill_stacked(domain, values, leaves[0].modality)
                return
        signals = [member for member in members if isinstance(member, Signal)]
        self.__dict__.update(
            domain=domain,
            num_leaves=len(leaves) + sum(signal.num_leaves for signal in signals),
            num_families=1 + sum(signal.num_families for signal in signals),
            depth=1 + max((signal.depth for signal in signals), default=0),
            modalities=tuple(modalities),
            values=None,
            _members=members,
        )

    def _fill_stacked(self, domain: Domain, values: Tensor | tuple[str, ...], modality: str) -> None:
        self.__dict__.update(
            domain=domain,
            num_leaves=domain.size,
            num_families=1,
            depth=1,
            modalities=(modality,),
            values=values,
            _members=(),
        )

    @property
    def members(self) -> abc.Sequence[Signal | Leaf]:
        """Members, one per position of the domain. The leaves of a stack are made on access.

        >>> Signal.of(range(100_000), "token").members[-1]
        Leaf(99999, 'token')
        """
        return self._members if self.values is None else _StackedLeaves(self.values, self.modalities[0])

    def first(self, leaves: int) -> Signal | None:
        """Return the first `leaves` leaves of the signal; None if nothing is left.

        Empty families are removed. A grid that the cut would divide is left out, so that there may be fewer leaves. Members
        before the cut are shared with this signal.

        Raises:
            InvalidInput: For a negative number of leaves.

        >>> sentences = [Signal.of(["Two", "cats"], "text"), Signal.of(["They", "sat", "down"], "text")]
        >>> print(Signal(Sequence(2), sentences).first(3).show())
        Sequence(2) · 3 leaves · text
        ├─ [0] Sequence(2) · 2 leaves · text · 'Two' 'cats'
        └─ [1] Sequence(1) · 1 leaf · text · 'They'
        """
        if leaves < 0:
            raise InvalidInput("leaves", got=leaves, expected="0 or more")
        if leaves >= self.num_leaves:
            return self
        above: list[tuple[Signal, int]] = []  # signals that are cut, and the number of their whole members
        inside: Signal | Leaf = self
        while leaves and isinstance(inside, Signal) and not isinstance(inside.domain, Grid):
            if inside.values is not None:
                above.append((inside, leaves))
                break
            whole = 0
            while (size := _num_leaves(inside._members[whole])) <= leaves:
                leaves -= size
                whole += 1
            above.append((inside, whole))
            inside = inside._members[whole]
        cut: Signal | None = None
        for signal, whole in reversed(above):
            cut = signal._first_members(whole, cut)
        return cut

    def _first_members(self, whole: int, cut: Signal | None) -> Signal | None:
        """Return the first `whole` members, followed by the part that is left of the next one."""
        count = whole + (cut is not None)
        if not count:
            return None
        domain = self.domain.first(count)
        if self.values is None:
            return Signal(domain, self._members[:whole] if cut is None else (*self._members[:whole], cut))
        signal = Signal.__new__(Signal)
        signal._fill_stacked(domain, self.values[:whole], self.modalities[0])
        return signal

    def __setattr__(self, name: str, value: Any) -> None:
        raise _frozen(self, name)

    def __eq__(self, other: object) -> bool:
        """Compare exactly: domains, modalities, and values with their dtypes and shapes. A NaN equals a NaN."""
        if not isinstance(other, Signal):
            return NotImplemented
        pairs: list[tuple[Any, Any]] = [(self, other)]
        while pairs:  # no recursion: chains may be deeper than Python's stack
            a, b = pairs.pop()
            if a is b:
                continue
            if not (isinstance(a, Signal) and isinstance(b, Signal)):
                if a != b:
                    return False
                continue
            if a.domain != b.domain or a.modalities != b.modalities or a.num_leaves != b.num_leaves:
                return False
            if not same(a.values, b.values):
                return False
            pairs.extend(zip(a._members, b._members, strict=True))
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Signal({self.domain!r}, {_count(self.num_leaves, 'leaf', 'leaves')}, "
            f"{_count(self.num_families, 'family', 'families')}, depth {self.depth}, {', '.join(self.modalities)})"
        )

    def show(self, max_rows: int = 40, max_members: int = 8) -> str:
        """Return the tree as text, a row per family or single leaf.

        Args:
            max_rows: Maximum number of rows; an ellipsis stands for the others.
            max_members: Maximum number of members shown per family; a row counts the others.

        >>> sentences = [Signal.of(["word"] * n, "text") for n in (2, 3, 5, 7, 11)]
        >>> print(Signal(Sequence(5), sentences).show(max_members=3))
        Sequence(5) · 28 leaves · text
        ├─ [0] Sequence(2) · 2 leaves · text · 'word' 'word'
        ├─ [1] Sequence(3) · 3 leaves · text · 'word' 'word' 'word'
        ├─ [2] Sequence(5) · 5 leaves · text · 'word' 'word' 'word' 'word' 'word'
        └─ … 2 more
        """
        rows: list[str] = []
        todo: list[tuple[Signal | Leaf | int, str, str]] = [(self, "", "")]
        while todo and len(rows) < max_rows:
            node, stem, indent = todo.pop()
            if isinstance(node, int):
                rows.append(f"{stem}… {node:,} more")
                continue
            rows.append(stem + _label(node))
            if isinstance(node, Leaf) or node.values is not None:
                continue
            shown = list(node._members[:max_members])
            entries: list[tuple[Signal | Leaf | int, str]] = [
                (member, f"{node.domain.step(i)} ") for i, member in enumerate(shown)
            ]
            if len(shown) < len(node._members):
                entries.append((len(node._members) - len(shown), ""))
            last = len(entries) - 1
            for i, (entry, name) in reversed(list(enumerate(entries))):
                branch, below = ("└─ ", "   ") if i == last else ("├─ ", "│  ")
                todo.append((entry, f"{indent}{branch}{name}", indent + below))
        return "\n".join([*rows, "…"] if todo else rows)


class _StackedLeaves(abc.Sequence):
    """The leaves of a stack, each made on access."""

    def __init__(self, values: Tensor | tuple[str, ...], modality: str):
        self._values = values
        self._modality = modality

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        value = self._values[index]
        if isinstance(value, Tensor) and value.ndim == 0:
            value = unstack_scalar(value)
        return Leaf(value, self._modality)

    def __iter__(self) -> Iterator[Leaf]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"({_count(len(self), 'leaf', 'leaves')}, {self._modality!r})"


def _check_domain(domain: Any, where: Where) -> None:
    if not isinstance(domain, Domain):
        raise InvalidInput(
            str(where),
            got=f"a domain of type {type(domain).__name__}",
            expected="Sequence, Grid, Graph, Set or Table",
        )


def _check_size(domain: Domain, members: int, where: Where) -> None:
    if members != domain.size:
        raise InvalidInput(
            str(where),
            got=_count(members, "member", "members"),
            expected=f"{domain.size:,}, one per position of {domain!r}",
        )


def _modality(modality: Any, where: Where) -> str:
    if not isinstance(modality, str) or not modality:
        raise InvalidInput(str(where), got=f"modality {modality!r}", expected="a name, such as 'text'")
    return modality


def _frozen(thing: object, name: str) -> AttributeError:
    return AttributeError(f"{type(thing).__name__} is frozen: cannot set {name!r}; build a new one instead")


def _num_leaves(member: Signal | Leaf) -> int:
    return member.num_leaves if isinstance(member, Signal) else 1


def _count(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"


def _label(node: Signal | Leaf) -> str:
    if isinstance(node, Leaf):
        return f"{node.modality} · {_preview(node.value)}"
    label = f"{node.domain!r} · {_count(node.num_leaves, 'leaf', 'leaves')} · {', '.join(node.modalities)}"
    return label if node.values is None else f"{label} · {_preview_stack(node.values)}"


def _preview(value: Value, longest: int = 48) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _preview_stack(values: Tensor | tuple[str, ...], longest: int = 48) -> str:
    kind = kind_of_stack(values)
    if isinstance(kind, tuple) and kind[1]:
        return f"{str(kind[0]).removeprefix('torch.')}{list(kind[1])}"
    head = values[: longest // 2 + 1]  # more than fits
    text = " ".join(map(repr, head.tolist() if isinstance(head, Tensor) else head))
    return text if len(text) <= longest and len(head) == len(values) else f"{text[: longest - 1].rstrip()}…"
