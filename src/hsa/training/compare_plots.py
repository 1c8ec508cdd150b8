"""Plots of a comparison: the score of each model against its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

from hsa.analysis.frontier import on_frontier
from hsa.analysis.plots import COLORS, pyplot, save_figure

_NOTHING = 4
"""Factor between the smallest cost above 0 and the position where 0 is drawn on the logarithmic axis."""


@dataclass(frozen=True)
class Point:
    """Model with its cost (0 or more), its score, and the standard deviation of the score if known."""

    name: str
    cost: float
    score: float
    spread: float | None = None


def plot_frontiers(path: Path, panels: Mapping[str, Sequence[Point]], score: str, title: str) -> None:
    """Plot the score against each cost, on a logarithmic axis; a dashed line shows the best score up to each cost.

    Args:
        path: File to write.
        panels: Points by the name of the cost: one or more models, the same in every panel and in the same order.
        score: Name of the score.
        title: Title of the figure.
    """
    size = (max(5.0, 4.2 * len(panels)), 4.0)
    figure, grid = pyplot().subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    drawn = [_draw(axes, points, cost) for axes, (cost, points) in zip(grid[0], panels.items(), strict=True)]
    grid[0][0].set_ylabel(score)
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.canvas.draw()  # computes the layout, which the positions of the labels depend on
    figure.set_layout_engine("none")
    for axes, points, xs in zip(grid[0], panels.values(), drawn, strict=True):
        _label(figure, axes, points, xs)
    save_figure(figure, path)


def _draw(axes: Any, points: Sequence[Point], cost: str) -> list[float]:
    """Draw points, error bars and the frontier; return the x coordinate of each point."""
    smallest = min((point.cost for point in points if point.cost > 0), default=1.0)
    nothing = smallest / _NOTHING
    xs = [point.cost if point.cost > 0 else nothing for point in points]
    axes.set_xscale("log")
    for color, point, x in zip(cycle(COLORS), points, xs, strict=False):
        axes.errorbar(x, point.score, yerr=point.spread, color=color, marker="o", ms=6, capsize=3, elinewidth=1, ls="")
    best = on_frontier((point.cost, point.score) for point in points)
    line = sorted((x, point.score) for x, point, on in zip(xs, points, best, strict=True) if on)
    left, right = min(xs) / 1.8, max(xs) * 1.8
    line.append((right, line[-1][1]))  # the best score is reached at any higher cost
    look: dict[str, Any] = {"color": "#999999", "ls": "--", "lw": 1, "zorder": 0, "drawstyle": "steps-post"}
    axes.plot([x for x, _ in line], [score for _, score in line], **look)
    axes.set_xlim(left, right)
    ticks = []
    if min(xs) < smallest:
        ticks, left = [(nothing, "0")], nothing * _NOTHING**0.5
        axes.axvline(left, color="#cccccc", lw=0.8, zorder=0)
    ticks += [(tick, _short(tick)) for tick in _round_numbers(1.2 * left, right)]
    axes.set_xticks([tick for tick, _ in ticks], [name for _, name in ticks])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel(cost)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return xs


def _round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Return the powers of ten between two numbers, with their multiples by 2 and 5 if that makes at most `most`.

    >>> _round_numbers(0.8, 30), _round_numbers(0.5, 2e6)
    ([1.0, 2.0, 5.0, 10.0, 20.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0])
    """
    powers = [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    finest = [factor * power for power in powers for factor in (1, 2, 5) if low <= factor * power <= high]
    return finest if len(finest) <= most else [power for power in powers if low <= power <= high]


def _short(number: float) -> str:
    """Format a number with a unit prefix.

    >>> [_short(number) for number in (0.02, 5.0, 20_000.0, 1e6, 2e9)]
    ['0.02', '5', '20 k', '1 M', '2 G']
    """
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
"""Directions from a point in which its label may lie."""
_DISTANCES = (6, 12, 20, 30, 42, 56)
"""Distances of a label from its point, in typographic points."""


def _label(figure: Any, axes: Any, points: Sequence[Point], xs: Sequence[float]) -> None:
    """Label every point, as near to it as possible without covering other labels or points."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    spots = [axes.transData.transform((x, point.score)) for x, point in zip(xs, points, strict=True)]
    taken: list[Any] = [_box(*spot, *spot) for spot in spots]
    for x, point in zip(xs, points, strict=True):
        if point.spread:
            ends = (axes.transData.transform((x, point.score + sign * point.spread)) for sign in (-1, 1))
            taken.append(_box(*next(ends), *next(ends)))
    labels: list[Any] = []  # overlaps between labels are worse than overlaps with points
    for i, (color, point, x) in enumerate(zip(cycle(COLORS), points, xs, strict=False)):
        least, kept, kept_box = math.inf, None, None
        for distance, (across, up) in product(_DISTANCES, _SIDES):
            text = _annotate(axes, point, x, color, distance * across, distance * up)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line to the point
            penalty = 1.0 * sum(map(box.overlaps, taken)) + 5 * sum(map(box.overlaps, labels))
            penalty += _outside_penalty(box, axes.bbox) + _nearer_penalty(box, i, spots)
            if penalty >= least:
                text.remove()
                continue
            if kept is not None:
                kept.remove()
            least, kept, kept_box = penalty, text, box
            if not penalty:
                break
        labels.append(kept_box)


def _annotate(axes: Any, point: Point, x: float, color: str, right: float, up: float) -> Any:
    """Draw a label at an offset from its point, in typographic points, with a line to the point if it is far."""
    return axes.annotate(
        point.name,
        (x, point.score),
        (right, up),
        textcoords="offset points",
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="center" if right else "bottom" if up > 0 else "top",
        fontsize=8,
        color=color,
        parse_math=False,
        arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5} if abs(up) > _DISTANCES[1] else None,
    )


def _box(left: float, bottom: float, right: float, top: float) -> Any:
    """Return a box in pixels with a margin for the size of the marker."""
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(left - 5, bottom - 5, right + 5, top + 5)


def _nearer_penalty(box: Any, own: int, spots: Sequence[Any]) -> float:
    """Return the penalty of a label that lies nearer to another point than to its own."""
    distances = [math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1)) for x, y in spots]
    return 0.5 * (min(distances) < distances[own])


def _outside_penalty(box: Any, axes: Any) -> float:
    """Return the penalty of a label that leaves the axes, which is worse than covering another label."""
    return 10.0 * (box.x0 < axes.x0 or box.x1 > axes.x1 or box.y0 < axes.y0 or box.y1 > axes.y1)
