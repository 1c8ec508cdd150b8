"""Divide large families into windows."""

from __future__ import annotations

from itertools import pairwise

from hsa.errors import InvalidInput
from hsa.signals.domains import Sequence
from hsa.signals.signal import Leaf, Signal


def in_windows(signal: Signal | Leaf, most: int) -> Signal | Leaf:
    """Divide sequences of more than `most` members into windows.

    Attention within a family costs the square of its size, and real texts have "sentences" of thousands of tokens: tables,
    listings, scans without a full stop. Such a sequence becomes a sequence of windows whose sizes differ by at most one.
    Leaves keep their order; other domains are not changed.

    Args:
        signal: Signal to divide.
        most: Maximum number of members of a sequence, 2 or more.

    Raises:
        InvalidInput: For `most` below 2.

    >>> print(in_windows(Signal.of(range(7), "token"), 3).show())
    Sequence(3) · 7 leaves · token
    ├─ [0] Sequence(3) · 3 leaves · token · 0 1 2
    ├─ [1] Sequence(2) · 2 leaves · token · 3 4
    └─ [2] Sequence(2) · 2 leaves · token · 5 6
    """
    if most < 2:
        raise InvalidInput("most", got=most, expected="2 or more")
    families: list[Signal] = []  # no recursion: chains may be deeper than Python's stack
    todo = [signal]
    while todo:
        node = todo.pop()
        if isinstance(node, Signal):
            families.append(node)
            todo.extend(node.members if node.values is None else ())
    windowed: dict[int, Signal] = {}  # by the id of the signal that it replaces
    for old in reversed(families):  # members before their families
        new = old
        if old.values is None and any(id(member) in windowed for member in old.members):
            new = Signal(old.domain, [windowed.get(id(member), member) for member in old.members])
        while isinstance(new.domain, Sequence) and new.domain.size > most:
            new = Signal(Sequence(-(-new.domain.size // most)), _cut(new, most))
        if new is not old:
            windowed[id(old)] = new
    return windowed.get(id(signal), signal)


def _cut(signal: Signal, most: int) -> list[Signal]:
    size, windows = signal.domain.size, -(-signal.domain.size // most)
    bounds = [(size * i + windows - 1) // windows for i in range(windows + 1)]
    if signal.values is not None:
        return [Signal.of(signal.values[begin:end], signal.modalities[0]) for begin, end in pairwise(bounds)]
    members = signal.members
    return [Signal(Sequence(end - begin), members[begin:end]) for begin, end in pairwise(bounds)]
