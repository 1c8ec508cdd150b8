"""Large families as windows of windows."""

from __future__ import annotations

from itertools import pairwise

from hsa.signals.domains import Sequence
from hsa.signals.signal import Leaf, Signal


def in_windows(signal: Signal | Leaf, most: int) -> Signal | Leaf:
    """The same leaves in the same order, with no sequence of more than `most` members.

    A family costs the square of its size, and real texts have "sentences" of thousands of tokens: tables, listings, scans
    without a full stop. Longer sequences become sequences of windows of equal size, to within one. Other domains stay.

    >>> print(in_windows(Signal.of(range(7), "token"), 3).show())
    Sequence(3) · 7 leaves · token
    ├─ [0] Sequence(3) · 3 leaves · token · 0 1 2
    ├─ [1] Sequence(2) · 2 leaves · token · 3 4
    └─ [2] Sequence(2) · 2 leaves · token · 5 6
    """
    if isinstance(signal, Leaf) or (signal.depth == 1 and signal.domain.size <= most):
        return signal
    if signal.values is None:
        members = [in_windows(member, most) for member in signal.members]
        if any(new is not old for new, old in zip(members, signal.members, strict=True)):
            signal = Signal(signal.domain, members)
    while isinstance(signal.domain, Sequence) and signal.domain.size > most:
        signal = Signal(Sequence(-(-signal.domain.size // most)), list(_cut(signal, most)))
    return signal


def _cut(signal: Signal, most: int) -> list[Signal]:
    size, windows = signal.domain.size, -(-signal.domain.size // most)
    bounds = [(size * i + windows - 1) // windows for i in range(windows + 1)]
    if signal.values is not None:
        return [Signal.of(signal.values[begin:end], signal.modalities[0]) for begin, end in pairwise(bounds)]
    members = signal.members
    return [Signal(Sequence(end - begin), members[begin:end]) for begin, end in pairwise(bounds)]
