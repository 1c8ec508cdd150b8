"""What is worth its cost."""

from __future__ import annotations

from collections.abc import Iterable


def on_frontier(points: Iterable[tuple[float, float]]) -> list[bool]:
    """Of points (cost, score), which ones no other beats: none is as good at a lower cost, or better at no higher one.

    >>> on_frontier([(1, 0.5), (2, 0.9), (3, 0.8), (2, 0.9)])
    [True, True, False, True]
    """
    known = list(points)

    def beaten(cost: float, score: float) -> bool:
        return any(c <= cost and s >= score and (c, s) != (cost, score) for c, s in known)

    return [not beaten(*point) for point in known]
