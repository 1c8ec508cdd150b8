"""Domains: the arrangements of the members of a family.

A domain has a number of members, at least one, and an arrangement: on a line, on a grid, along the edges of a graph,
without order, or under names. It holds no values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from hsa.errors import InvalidInput


class Domain(ABC):
    """Base class of domains. Domains are frozen and compared by value.

    Attributes:
        size: Number of members.

    >>> Sequence(3) == Sequence(3), Sequence(3).size
    (True, 3)
    """

    size: int

    def _freeze(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name!r}; build a new one instead")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def step(self, member: int) -> str:
        """Return the step to a member in a path: `[2]` in `page[2]`.

        >>> Sequence(5).step(2), Grid((2, 3)).step(4), Table(("title", "body")).step(1)
        ('[2]', '[1, 1]', '.body')
        """
        if not 0 <= member < self.size:
            raise InvalidInput("member", got=member, expected=f"a member of {self!r}, 0..{self.size - 1}")
        return self._step(member)

    def _step(self, member: int) -> str:
        return f"[{member}]"

    def first(self, count: int) -> Domain:
        """Return the domain of the first `count` members; a graph keeps the edges among them, a grid cannot be divided.

        Raises:
            InvalidInput: For fewer than one member, more than there are, or a part of a grid.

        >>> Sequence(5).first(2), Table(("title", "body")).first(1), Graph(3, [(0, 1), (1, 2)]).first(2)
        (Sequence(2), Table('title'), Graph(2 nodes, 1 edge))
        """
        count = _at_least_one("count", count)
        if count > self.size:
            raise InvalidInput("count", got=count, expected=f"at most {self.size}, the members of {self!r}")
        return self if count == self.size else self._first(count)

    @abstractmethod
    def _first(self, count: int) -> Domain: ...

    @abstractmethod
    def __repr__(self) -> str: ...


class Sequence(Domain):
    """Members in a row: tokens of a sentence, sentences of a paragraph.

    Args:
        length: Number of members.

    >>> Sequence(5)
    Sequence(5)
    """

    length: int

    def __init__(self, length: int):
        length = _at_least_one("Sequence.length", length)
        self._freeze(length=length, size=length)

    def _first(self, count: int) -> Domain:
        return Sequence(count)

    def __repr__(self) -> str:
        return f"Sequence({self.length})"


class Grid(Domain):
    """Members on an n-dimensional grid, the last axis fastest: patches of an image.

    Args:
        shape: Number of members along each axis.

    >>> Grid((2, 3)).size
    6
    """

    shape: tuple[int, ...]

    def __init__(self, shape: Iterable[int]):
        if isinstance(shape, (int, np.integer)):
            raise InvalidInput(
                "Grid.shape", got=repr(shape), expected="one length per axis", fix=f"Write Grid(({shape},))"
            )
        lengths = tuple(_at_least_one(f"Grid.shape[{axis}]", length) for axis, length in enumerate(shape))
        if not lengths:
            raise InvalidInput("Grid.shape", got="()", expected="at least one axis")
        self._freeze(shape=lengths, size=math.prod(lengths))

    def _first(self, count: int) -> Domain:
        raise InvalidInput(
            "count",
            got=count,
            expected=f"{self.size}, all members of {self!r}",
            fix="Keep a grid whole or leave it out",
        )

    def _step(self, member: int) -> str:
        return f"[{', '.join(str(int(i)) for i in np.unravel_index(member, self.shape))}]"

    def __repr__(self) -> str:
        return f"Grid({self.shape})"


class Graph(Domain):
    """Members at the nodes of a directed graph: pages of a site with their links.

    Args:
        num_nodes: Number of members.
        edges: Pairs (from, to) of nodes, counted from 0: a list, or an array `[edges, 2]`.

    >>> Graph(3, [(0, 1), (0, 2), (2, 0)])
    Graph(3 nodes, 3 edges)
    """

    num_nodes: int
    edges: tuple[tuple[int, int], ...]

    def __init__(self, num_nodes: int, edges: Any):
        num_nodes = _at_least_one("Graph.num_nodes", num_nodes)
        self._freeze(num_nodes=num_nodes, edges=_edges(num_nodes, edges), size=num_nodes)

    def _first(self, count: int) -> Domain:
        return Graph(count, [edge for edge in self.edges if max(edge) < count])

    def __repr__(self) -> str:
        def count(n: int, thing: str) -> str:
            return f"{n} {thing}" if n == 1 else f"{n} {thing}s"

        return f"Graph({count(self.num_nodes, 'node')}, {count(len(self.edges), 'edge')})"


class Set(Domain):
    """Members without order: the boxes of a page. Their order is kept but has no meaning.

    Args:
        size: Number of members.

    >>> Set(4)
    Set(4)
    """

    def __init__(self, size: int):
        self._freeze(size=_at_least_one("Set.size", size))

    def _first(self, count: int) -> Domain:
        return Set(count)

    def __repr__(self) -> str:
        return f"Set({self.size})"


class Table(Domain):
    """Members under distinct names: the columns of a row, the fields of a record.

    Args:
        keys: Name of each member.

    >>> Table(["title", "body"])
    Table('title', 'body')
    """

    keys: tuple[str, ...]

    def __init__(self, keys: Iterable[str]):
        if isinstance(keys, str):
            raise InvalidInput(
                "Table.keys", got=repr(keys), expected="a list of keys", fix=f"For one key write Table([{keys!r}])"
            )
        names = tuple(keys)
        if not names:
            raise InvalidInput(
                "Table.keys", problem="no keys", expected="at least one: families have at least one member"
            )
        first: dict[str, int] = {}
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise InvalidInput(f"Table.keys[{i}]", got=repr(name), expected="a string")
            if name in first:
                raise InvalidInput(
                    f"Table.keys[{i}]", got=repr(name), expected=f"a key other than that of Table.keys[{first[name]}]"
                )
            first[name] = i
        self._freeze(keys=names, size=len(names))

    def _first(self, count: int) -> Domain:
        return Table(self.keys[:count])

    def _step(self, member: int) -> str:
        key = self.keys[member]
        return f".{key}" if key.isidentifier() else f"[{key!r}]"

    def __repr__(self) -> str:
        shown = [repr(key) for key in self.keys[:4]]
        more = self.size - len(shown)
        return f"Table({', '.join([*shown, f'… {more} more'] if more else shown)})"


def _at_least_one(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInput(where, got=repr(value), expected="a positive integer")
    if value < 1:
        raise InvalidInput(where, got=int(value), expected="1 or more: families have at least one member")
    return int(value)


def _edges(num_nodes: int, edges: Any) -> tuple[tuple[int, int], ...]:
    pairs = edges.detach().cpu().numpy() if isinstance(edges, Tensor) else edges
    pairs = pairs if isinstance(pairs, np.ndarray) else list(pairs)
    if len(pairs) == 0:
        return ()
    try:
        array = np.asarray(pairs)
    except ValueError:  # rows of unequal lengths
        array = np.empty(0)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        got = f"an array of shape {array.shape}" if isinstance(pairs, np.ndarray) else _shorten(repr(pairs))
        raise InvalidInput("Graph.edges", got=got, expected="pairs (from, to) of nodes")
    outside = np.argwhere((array < 0) | (array >= num_nodes))
    if len(outside):
        edge = int(outside[0, 0])
        raise InvalidInput(
            f"Graph.edges[{edge}]",
            got=tuple(array[edge].tolist()),
            expected=f"a pair of nodes in 0..{num_nodes - 1}",
            fix="Number the nodes from 0",
        )
    return tuple((int(a), int(b)) for a, b in array.tolist())


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
