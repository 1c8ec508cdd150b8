"""Pareto frontier of scores and costs."""

from __future__ import annotations

from collections.abc import Iterable


def on_frontier(points: Iterable[tuple[float, float]]) -> list[bool]:
    """Return which points (cost, score) are on the Pareto frontier: no different point is at least as good in both.

    >>> on_frontier([(1, 0.5), (2, 0.9), (3, 0.8), (2, 0.9)])
    [True, True, False, True]
    """
    known = list(points)

    def is_dominated(cost: float, score: float) -> bool:
        return any(c <= cost and s >= score and (c, s) != (cost, score) for c, s in known)

    return [not is_dominated(*point) for point in known]
