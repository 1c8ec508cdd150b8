"""Plots of conversions: operations per layer, time by length, the frontier of a search, scores by start layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from hsa.analysis.plots import COLORS, pyplot, save_figure
from hsa.attention.flops import Flops

PARTS = tuple(field.name for field in fields(Flops))
"""Purposes of operations."""


def plot_operations(path: Path, layers: Sequence[Mapping[str, float]], title: str) -> None:
    """Plot the operations of each layer by purpose, as a share of exact attention.

    Args:
        path: File to write.
        layers: Operations by `PARTS`, and `exact`, for each layer.
        title: Title of the plot.
    """
    figure, axes = pyplot().subplots(figsize=(min(14.0, max(5.0, 1.6 + 0.45 * len(layers))), 3.6), layout="constrained")
    bottom = np.zeros(len(layers))
    for color, part in zip(COLORS, PARTS, strict=False):
        height = np.array([100 * layer[part] / layer["exact"] for layer in layers])
        axes.bar(range(len(layers)), height, bottom=bottom, color=color, label=part, width=0.75)
        bottom += height
    axes.axhline(100, color="#333333", lw=1, ls="--")
    axes.text(len(layers) - 0.5, 101, "exact", ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="layer", ylabel="operations, % of exact attention", ylim=(0, max(112.0, bottom.max() * 1.08)))
    axes.set_title(title, parse_math=False)
    axes.set_xticks(range(len(layers)))
    axes.legend(frameon=False, ncols=len(PARTS), fontsize=8, loc="upper left")
    _tidy(axes)
    save_figure(figure, path)


def plot_timing(path: Path, rows: Sequence[Any], title: str) -> None:
    """Plot time and memory of a forward pass by length, before and after a conversion; `rows` are `Timed`."""
    measured = all(None not in (row.before_mib, row.after_mib) for row in rows)
    figure, panels = pyplot().subplots(
        1, 1 + measured, figsize=(4.5 * (1 + measured), 3.6), layout="constrained", squeeze=False
    )
    lengths = [row.length for row in rows]
    units = {"ms": "Time of a forward pass, ms", "mib": "Memory beyond the weights, MiB"}
    for axes, (unit, name) in zip(panels[0], units.items(), strict=False):
        for color, when, version in ((COLORS[2], "before", "exact"), (COLORS[0], "after", "converted")):
            # The axis is logarithmic, and small amounts of memory may be 0.
            values = [max(getattr(row, f"{when}_{unit}"), 0.001 if unit == "ms" else 0.1) for row in rows]
            axes.plot(lengths, values, color=color, marker="o", ms=4, label=version)
        axes.set(xlabel="tokens", title=name, xscale="log", yscale="log")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 5 else 0)
        axes.minorticks_off()
        _tick_values(axes)
        axes.legend(frameon=False)
        _tidy(axes)
    figure.suptitle(title, fontsize=10, parse_math=False)
    save_figure(figure, path)


def _tick_values(axes: Any) -> None:
    """Label round values on a logarithmic y axis: within a decade, matplotlib would label none."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def plot_frontier(
    path: Path,
    points: Sequence[Mapping[str, Any]],
    metric: str,
    title: str,
    *,
    original: float,
    budget: str | None = None,
    limit: float | None = None,
    least_saved: float | None = None,
) -> None:
    """Plot a metric against operations saved, with a point per step of the search and a mark on the chosen one.

    Args:
        path: File to write.
        points: `ops`, the metric and `chosen` of each step, measured on the texts of the search.
        metric: Name of the metric.
        title: Title of the plot.
        original: Value of the metric for the exact model on the same texts.
        budget: Budget of the search, for the legend.
        limit, least_saved: What the budget demands, of the metric or of operations.
    """
    figure, axes = pyplot().subplots(figsize=(6.4, 3.8), layout="constrained")
    saved, values = [p["ops"] for p in points], [p[metric] for p in points]
    axes.plot(saved, values, color=COLORS[0], marker="o", ms=4, label="settings tried")
    for x, y, point in zip(saved, values, points, strict=True):
        if point.get("chosen"):
            axes.plot(x, y, marker="o", ms=11, mfc="none", mec=COLORS[1], mew=2, label="chosen", ls="")
    axes.axhline(original, color="#333333", lw=1, ls="--", label="exact model")
    look: dict[str, Any] = {"color": COLORS[3], "lw": 1.5, "ls": "-.", "label": f"budget: {budget}"}
    if limit is not None:
        axes.axhline(limit, **look)
    if least_saved is not None:
        axes.axvline(least_saved, **look)
    names = {"kept": "share of the answers kept", "cosine": "cosine with the original"}
    axes.set(xlabel="times fewer operations", ylabel=names.get(metric, metric))
    axes.set_title(title, fontsize=10, parse_math=False)
    legend = axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for text in legend.get_texts():
        text.set_parse_math(False)
    _tidy(axes)
    save_figure(figure, path)


def plot_sensitivity(path: Path, rows: Sequence[Mapping[str, Any]], candidates: Sequence[str], title: str) -> None:
    """Plot the change of the answers when one layer is converted alone, as a heat map of settings by layer.

    Args:
        path: File to write.
        rows: `layer`, `candidate` (index into `candidates`) and `distance` of each measurement.
        candidates: Descriptions of the settings.
        title: Title of the plot.
    """
    layers = sorted({row["layer"] for row in rows})
    table = np.full((len(candidates), len(layers)), np.nan)
    positive = [row["distance"] for row in rows if row["distance"] > 0]
    for row in rows:
        table[row["candidate"], layers.index(row["layer"])] = max(row["distance"], min(positive, default=1e-9))
    size = (1.4 + 0.07 * max(map(len, candidates)) + 0.45 * len(layers), 1.2 + 0.34 * len(candidates))
    figure, axes = pyplot().subplots(figsize=size, layout="constrained")
    image = axes.imshow(np.log10(table), cmap="magma_r", aspect="auto")
    axes.set_xticks(range(len(layers)), layers)
    axes.set_yticks(range(len(candidates)), candidates, fontsize=8, parse_math=False)
    axes.set(xlabel="layer")
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, ax=axes, label="log₁₀ distance of answers")
    save_figure(figure, path)


def plot_start_layers(
    path: Path, scores: Mapping[str, Sequence[float]], original: float, metric: str, title: str
) -> None:
    """Plot scores by first converted layer, where every other layer from there on is converted.

    Args:
        path: File to write.
        scores: Score for each start layer, by name of the variant.
        original: Score of the exact model, shown as the bar on the right.
        metric: Name of the score.
        title: Title of the plot.
    """
    starts = len(next(iter(scores.values())))
    width = 0.8 / len(scores)
    figure, axes = pyplot().subplots(figsize=(min(16.0, max(6.0, 1.5 + 0.75 * starts)), 3.4), layout="constrained")
    for i, (color, (name, values)) in enumerate(zip(COLORS * 2, scores.items(), strict=False)):
        positions = np.arange(starts) + (i - (len(scores) - 1) / 2) * width
        axes.bar(positions, values, width=width * 0.95, color=color, label=name)
    axes.bar(starts, original, width=0.5, color="#333333")
    axes.set_xticks(range(starts + 1), [*map(str, range(starts)), "original"])
    every = [original, *(value for values in scores.values() for value in values)]
    lowest, room = min(every), 0.12  # for the legend
    bottom = lowest - 0.1 if lowest < 0 else max(0.0, lowest - 0.1)  # correlations may be negative
    axes.set(xlabel="first converted layer", ylabel=metric, ylim=(bottom, max(every) + room))
    axes.set_title(title, parse_math=False)
    legend = axes.legend(frameon=False, fontsize=8, ncols=len(scores), loc="upper left")
    for text in legend.get_texts():
        text.set_parse_math(False)
    _tidy(axes)
    save_figure(figure, path)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="y")
