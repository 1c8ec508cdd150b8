"""Read nested lists, dictionaries, sets and arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.signals.domains import Domain, Sequence, Set, Table
from hsa.signals.path import Path
from hsa.signals.signal import Leaf, Signal

_SCALARS = (str, bool, int, float, np.generic)


def from_nested(
    nested: Any, modality: str | None = None, *, drop_empty: bool = False, where: str = "nested"
) -> Signal | Leaf:
    """Read a nested Python object.

    | given                          | becomes                                                                  |
    |--------------------------------|--------------------------------------------------------------------------|
    | list, tuple                    | `Sequence` of its entries                                                |
    | dict with string keys          | `Table` of its values                                                    |
    | set, frozenset                 | `Set`, sorted by `repr` so that the result does not vary between runs    |
    | array of one axis or more      | `Sequence` of its rows; each row is one leaf, whatever its shape         |
    | number, string, 0-axis array   | a leaf                                                                   |
    | `Signal`, `Leaf`               | itself                                                                   |

    Args:
        modality: Modality of all leaves; by default "text" for strings, "number" for numbers, "array" for rows with axes.
        drop_empty: Whether None and empty containers (and containers of nothing else) are left out; else they raise.
        where: Name of the object in error messages.

    >>> print(from_nested({"name": "Ada", "years": [1815, 1852], "tags": {"b", "a"}}).show())
    Table('name', 'years', 'tags') · 5 leaves · text, number
    ├─ .name text · 'Ada'
    ├─ .years Sequence(2) · 2 leaves · number · 1815 1852
    └─ .tags Set(2) · 2 leaves · text · 'a' 'b'

    Raises:
        InvalidInput: For an empty container, one that contains itself, or an unknown type; it names the path.
    """
    root = _Container([nested], None, Path(None, where))
    inside = [root]  # an explicit stack: nestings may be deeper than Python's own
    while True:
        container = inside[-1]
        for key, child in container.entries:
            path = container.path if container is root else Path(container.path, _step(key))
            if drop_empty and _is_nothing(child):
                continue
            member = _leaf_or_simple(child, modality, path)
            if member is None:
                if any(above.given is child for above in inside):
                    raise InvalidInput(str(path), given=f"a {_name(child)} that contains itself", expected="a tree")
                inside.append(_Container(child, key, path))
                break
            container.add(key, member)
        else:
            inside.pop()
            if not inside:
                break
            if container.members:
                inside[-1].add(container.key, Signal(container.domain(), container.members, where=container.path))
            elif not drop_empty:
                raise InvalidInput(
                    str(container.path),
                    given=f"an empty {_name(container.given)}",
                    expected="at least one member",
                    fix="leave it out, or pass drop_empty=True",
                )
    if not root.members:
        raise InvalidInput(where, given="nothing but empty containers", expected="at least one value")
    return root.members[0]


class _Container:
    """A list, dictionary or set, and the members read so far."""

    def __init__(self, given: Any, key: str | int | None, path: Path):
        self.given = given
        self.key = key  # in the container around it
        self.path = path
        self.entries = iter(_entries(given, path))
        self.keys: list[Any] = []
        self.members: list[Signal | Leaf] = []

    def add(self, key: str | int | None, member: Signal | Leaf) -> None:
        self.keys.append(key)
        self.members.append(member)

    def domain(self) -> Domain:
        if isinstance(self.given, dict):
            return Table(self.keys)
        return (Set if isinstance(self.given, (set, frozenset)) else Sequence)(len(self.members))


def _entries(container: Any, path: Path) -> Iterable[tuple[str | int, Any]]:
    if isinstance(container, dict):
        for key in container:
            if not isinstance(key, str):
                raise InvalidInput(
                    str(path), given=f"the key {key!r}", expected="keys that are strings", fix="use str(key)"
                )
        return container.items()
    return enumerate(sorted(container, key=repr) if isinstance(container, (set, frozenset)) else container)


def _step(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else Table((key,)).step(0)


def _is_nothing(given: Any) -> bool:
    return given is None or (isinstance(given, (np.ndarray, Tensor)) and given.ndim > 0 and len(given) == 0)


def _name(given: Any) -> str:
    return type(given).__name__


def _leaf_or_simple(given: Any, modality: str | None, path: Path) -> Signal | Leaf | None:
    """Return the object as a leaf or as one stack of leaves; None for a container to read member by member."""
    if isinstance(given, (Signal, Leaf)):
        return given
    if isinstance(given, _SCALARS):
        is_text = isinstance(given, str)
        return Leaf(given, modality or ("text" if is_text else "number"), where=path)
    if isinstance(given, (np.ndarray, Tensor)):
        is_text = isinstance(given, np.ndarray) and given.dtype.kind == "U"
        scalars = "text" if is_text else "number"
        if given.ndim == 0:
            return Leaf(given, modality or scalars, where=path)
        if len(given) == 0:
            raise InvalidInput(str(path), given=f"an array of shape {tuple(given.shape)}", expected="at least one row")
        return Signal.of(given, modality or (scalars if given.ndim == 1 else "array"), where=path)
    if isinstance(given, (list, tuple, set, frozenset)):
        types = set(map(type, given))
        if len(types) == 1 and types <= {str, bool, int, float}:
            modality = modality or ("text" if types == {str} else "number")
            unordered = isinstance(given, (set, frozenset))
            values = sorted(given, key=repr) if unordered else given
            return Signal.of(values, modality, Set(len(given)) if unordered else None, where=path)
        return None
    if isinstance(given, dict):
        return None
    raise InvalidInput(
        str(path),
        given="None" if given is None else f"a {_name(given)}",
        expected="a list, tuple, dict, set, array, number or string",
        fix="leave it out, or pass drop_empty=True" if given is None else "make it one of these, or a Leaf",
    )
