"""Pictures of a comparison: how good models are against what they cost."""

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
"""Factor by which a cost of 0 is drawn left of the smallest other cost: the axis is logarithmic."""


@dataclass(frozen=True)
class Point:
    """A model: its cost (0 or more), its score, and the spread of that, where it is known."""

    name: str
    cost: float
    score: float
    spread: float | None = None


def plot_frontiers(path: Path, panels: Mapping[str, Sequence[Point]], score: str, title: str) -> None:
    """The score against each cost, logarithmic; a dashed line shows what can be had for how much.

    Args:
        panels: the name of a cost → the same models in the same order, one or more.
        score: its name.
    """
    size = (max(5.0, 4.2 * len(panels)), 4.0)
    figure, grid = pyplot().subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    drawn = [_draw(axes, points, cost) for axes, (cost, points) in zip(grid[0], panels.items(), strict=True)]
    grid[0][0].set_ylabel(score)
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.canvas.draw()  # fixes the layout, which labels depend on
    figure.set_layout_engine("none")
    for axes, points, xs in zip(grid[0], panels.values(), drawn, strict=True):
        _label(figure, axes, points, xs)
    save_figure(figure, path)


def _draw(axes: Any, points: Sequence[Point], cost: str) -> list[float]:
    """Points, error bars and the frontier; returns where on the axis each point lies."""
    smallest = min((point.cost for point in points if point.cost > 0), default=1.0)
    nothing = smallest / _NOTHING
    xs = [point.cost if point.cost > 0 else nothing for point in points]
    axes.set_xscale("log")
    for color, point, x in zip(cycle(COLORS), points, xs, strict=False):
        axes.errorbar(x, point.score, yerr=point.spread, color=color, marker="o", ms=6, capsize=3, elinewidth=1, ls="")
    best = on_frontier((point.cost, point.score) for point in points)
    line = sorted((x, point.score) for x, point, on in zip(xs, points, best, strict=True) if on)
    left, right = min(xs) / 1.8, max(xs) * 1.8
    line.append((right, line[-1][1]))  # the best score can be had at any higher cost
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
    """Powers of ten between two numbers, with twos and fives where there is room for them.

    >>> _round_numbers(0.8, 30), _round_numbers(0.5, 2e6)
    ([1.0, 2.0, 5.0, 10.0, 20.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0])
    """
    powers = [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    finest = [factor * power for power in powers for factor in (1, 2, 5) if low <= factor * power <= high]
    return finest if len(finest) <= most else [power for power in powers if low <= power <= high]


def _short(number: float) -> str:
    """
    >>> [_short(number) for number in (0.02, 5.0, 20_000.0, 1e6, 2e9)]
    ['0.02', '5', '20 k', '1 M', '2 G']
    """
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
"""Where a name may stand beside its point."""
_DISTANCES = (6, 12, 20, 30, 42, 56)


def _label(figure: Any, axes: Any, points: Sequence[Point], xs: Sequence[float]) -> None:
    """The name of every point, where it covers no other one and no point, as near as that is possible."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    spots = [axes.transData.transform((x, point.score)) for x, point in zip(xs, points, strict=True)]
    taken: list[Any] = [_box(*spot, *spot) for spot in spots]
    for x, point in zip(xs, points, strict=True):
        if point.spread:
            ends = (axes.transData.transform((x, point.score + sign * point.spread)) for sign in (-1, 1))
            taken.append(_box(*next(ends), *next(ends)))
    names: list[Any] = []  # which must not cover each other, whatever else they cover
    for i, (color, point, x) in enumerate(zip(cycle(COLORS), points, xs, strict=False)):
        least, kept, room = math.inf, None, None
        for distance, (across, up) in product(_DISTANCES, _SIDES):
            text = _name(axes, point, x, color, distance * across, distance * up)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line that leads to it
            covered = 1.0 * sum(map(box.overlaps, taken)) + 5 * sum(map(box.overlaps, names))
            covered += _outside(box, axes.bbox) + _astray(box, i, spots)
            if covered >= least:
                text.remove()
                continue
            if kept is not None:
                kept.remove()
            least, kept, room = covered, text, box
            if not covered:
                break
        names.append(room)


def _name(axes: Any, point: Point, x: float, color: str, right: float, up: float) -> Any:
    """Place a label beside its point, at a distance in printer's points; draw a line to it where that is far."""
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
    """In pixels, as large as what is drawn there is wide."""
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(left - 5, bottom - 5, right + 5, top + 5)


def _astray(box: Any, own: int, spots: Sequence[Any]) -> float:
    """A label that stands nearer to another point than to its own misleads."""
    distances = [math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1)) for x, y in spots]
    return 0.5 * (min(distances) < distances[own])


def _outside(box: Any, room: Any) -> float:
    """Worse than to cover something else."""
    return 10.0 * (box.x0 < room.x0 or box.x1 > room.x1 or box.y0 < room.y0 or box.y1 > room.y1)
