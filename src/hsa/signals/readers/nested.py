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

    | object                         | becomes                                                                  |
    |--------------------------------|--------------------------------------------------------------------------|
    | list, tuple                    | `Sequence` of its entries                                                |
    | dict with string keys          | `Table` of its values                                                    |
    | set, frozenset                 | `Set`, sorted by `repr`: the result does not vary between runs           |
    | array of one axis or more      | `Sequence` of its rows; each row is one leaf, whatever its shape         |
    | number, string, 0-axis array   | a leaf                                                                   |
    | `Signal`, `Leaf`               | itself                                                                   |

    Args:
        nested: Object to read.
        modality: Modality of all leaves; by default "text" for strings, "number" for numbers, "array" for rows with axes.
        drop_empty: Whether to leave out None, empty containers, and containers of nothing else; by default they raise.
        where: Name of the object in error messages.

    Raises:
        InvalidInput: For an empty container, a container that contains itself, or an object of another type; the message
            has its path.

    >>> print(from_nested({"name": "Ada", "years": [1815, 1852], "tags": {"b", "a"}}).show())
    Table('name', 'years', 'tags') · 5 leaves · text, number
    ├─ .name text · 'Ada'
    ├─ .years Sequence(2) · 2 leaves · number · 1815 1852
    └─ .tags Set(2) · 2 leaves · text · 'a' 'b'
    """
    root = _Container([nested], None, Path(None, where))
    inside = [root]  # no recursion: nesting may be deeper than Python's stack
    while True:
        container = inside[-1]
        for key, child in container.entries:
            path = container.path if container is root else Path(container.path, _step(key))
            if drop_empty and _is_nothing(child):
                continue
            member = _leaf_or_simple(child, modality, path)
            if member is None:
                if any(above.content is child for above in inside):
                    raise InvalidInput(str(path), got=f"a {_name(child)} that contains itself", expected="a tree")
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
                    got=f"an empty {_name(container.content)}",
                    expected="at least one member",
                    fix="Leave it out, or pass drop_empty=True",
                )
    if not root.members:
        raise InvalidInput(where, problem="no values, only empty containers", expected="at least one value")
    return root.members[0]


class _Container:
    """A list, dictionary or set, and the members read so far."""

    def __init__(self, content: Any, key: str | int | None, path: Path):
        self.content = content
        self.key = key  # in the container around it
        self.path = path
        self.entries = iter(_entries(content, path))
        self.keys: list[Any] = []
        self.members: list[Signal | Leaf] = []

    def add(self, key: str | int | None, member: Signal | Leaf) -> None:
        self.keys.append(key)
        self.members.append(member)

    def domain(self) -> Domain:
        if isinstance(self.content, dict):
            return Table(self.keys)
        return (Set if isinstance(self.content, (set, frozenset)) else Sequence)(len(self.members))


def _entries(container: Any, path: Path) -> Iterable[tuple[str | int, Any]]:
    if isinstance(container, dict):
        for key in container:
            if not isinstance(key, str):
                raise InvalidInput(
                    str(path), got=f"the key {key!r}", expected="keys that are strings", fix="Use str(key)"
                )
        return container.items()
    return enumerate(sorted(container, key=repr) if isinstance(container, (set, frozenset)) else container)


def _step(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else Table((key,)).step(0)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0 and len(value) == 0)


def _name(value: Any) -> str:
    return type(value).__name__


def _leaf_or_simple(value: Any, modality: str | None, path: Path) -> Signal | Leaf | None:
    """Return the object as a leaf or as one stack of leaves; None for a container to read member by member."""
    if isinstance(value, (Signal, Leaf)):
        return value
    if isinstance(value, _SCALARS):
        is_text = isinstance(value, str)
        return Leaf(value, modality or ("text" if is_text else "number"), where=path)
    if isinstance(value, (np.ndarray, Tensor)):
        is_text = isinstance(value, np.ndarray) and value.dtype.kind == "U"
        scalars = "text" if is_text else "number"
        if value.ndim == 0:
            return Leaf(value, modality or scalars, where=path)
        if len(value) == 0:
            raise InvalidInput(str(path), got=f"an array of shape {tuple(value.shape)}", expected="at least one row")
        return Signal.of(value, modality or (scalars if value.ndim == 1 else "array"), where=path)
    if isinstance(value, (list, tuple, set, frozenset)):
        types = set(map(type, value))
        if len(types) == 1 and types <= {str, bool, int, float}:
            modality = modality or ("text" if types == {str} else "number")
            unordered = isinstance(value, (set, frozenset))
            listed = sorted(value, key=repr) if unordered else value
            return Signal.of(listed, modality, Set(len(value)) if unordered else None, where=path)
        return None
    if isinstance(value, dict):
        return None
    raise InvalidInput(
        str(path),
        got="None" if value is None else f"a value of type {_name(value)}",
        expected="a list, tuple, dict, set, array, number or string",
        fix="Leave it out, or pass drop_empty=True" if value is None else "Convert it to one of these, or to a Leaf",
    )
