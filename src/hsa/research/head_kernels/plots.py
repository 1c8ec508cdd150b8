"""Plots of heads: alignment of all pairs, learned weights, and scores of pruned models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsa.analysis.plots import COLORS, pyplot, save_figure


def plot_alignment(
    path: Path, alignment: Sequence[Sequence[float]], heads: Sequence[tuple[int, int]], title: str
) -> None:
    """Plot the alignments of all pairs of heads, with lines between layers.

    Args:
        path: File to write.
        alignment: `[heads, heads]` Alignments from −1 to 1.
        heads: Layer and number of each head.
        title: Title of the plot.
    """
    table = np.asarray(alignment)
    size = min(9.0, max(3.6, 2.2 + 0.07 * len(heads)))
    figure, axes = pyplot().subplots(figsize=(size + 1.0, size), layout="constrained")
    lowest = float(table.min())
    # Alignments of outputs are never negative; those of similarities may be, and need a diverging colour map.
    look: dict[str, Any] = {"cmap": "magma_r", "vmin": 0, "vmax": 1}
    if lowest < -0.02:
        look = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1}
    image = axes.imshow(table, interpolation="nearest", **look)
    borders, names, middles = _layers(heads)
    for border in borders:
        axes.axhline(border - 0.5, color="#1f6f8b", lw=0.8)
        axes.axvline(border - 0.5, color="#1f6f8b", lw=0.8)
    _name_layers(axes.xaxis, names, middles)
    _name_layers(axes.yaxis, names, middles)
    axes.set(xlabel="heads, layer by layer", ylabel="heads, layer by layer")
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.75, label="centred alignment")
    save_figure(figure, path)


def plot_weights(path: Path, weights: Sequence[float], heads: Sequence[tuple[int, int]], title: str) -> None:
    """Plot a bar per head, with colours alternating between layers; a dashed line marks equal weights."""
    width = min(14.0, max(5.0, 2.0 + 0.11 * len(heads)))
    figure, axes = pyplot().subplots(figsize=(width, 3.2), layout="constrained")
    colors = [COLORS[0] if layer % 2 == 0 else COLORS[3] for layer, _ in heads]
    axes.bar(range(len(heads)), weights, color=colors, width=0.8)
    axes.axhline(1 / len(heads), color="#333333", lw=1, ls="--")
    axes.text(len(heads), 1 / len(heads), "equal", ha="left", va="center", fontsize=8)
    borders, names, middles = _layers(heads)
    for border in borders:
        axes.axvline(border - 0.5, color="#cccccc", lw=0.8, zorder=0)
    _name_layers(axes.xaxis, names, middles)
    axes.set(
        xlabel="heads, layer by layer (colours alternate between layers)",
        ylabel="weight",
        xlim=(-0.7, len(heads) - 0.3),
    )
    axes.set_title(title, parse_math=False)
    _tidy(axes)
    save_figure(figure, path)


def plot_pruning(path: Path, curves: Sequence[Any], score: str, title: str) -> None:
    """Plot the score against the number of removed heads, a line per order; random orders have a band for their range.

    Args:
        path: File to write.
        curves: Objects with `name`, `removed`, `scores` (a list per draw) and `mean`.
        score: Name of the score.
        title: Title of the plot.
    """
    figure, axes = pyplot().subplots(figsize=(6.0, 3.8), layout="constrained")
    colors = {True: "#7f7f7f", False: None}
    own = iter((COLORS[0], COLORS[1], COLORS[3], COLORS[5]))
    for curve in curves:
        several = len(curve.scores) > 1
        color = colors[several] or next(own)
        if several:
            low, high = np.min(curve.scores, 0), np.max(curve.scores, 0)
            axes.fill_between(curve.removed, low, high, color=color, alpha=0.25, lw=0)
        label = f"{curve.name} ({len(curve.scores)} draws)" if several else curve.name
        axes.plot(curve.removed, curve.mean, color=color, marker="o", ms=4, ls="--" if several else "-", label=label)
    axes.set(xlabel="heads removed", ylabel=score)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, parse_math=False)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)
    _tidy(axes)
    save_figure(figure, path)


def _layers(heads: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], list[float]]:
    """Return the first heads of all layers but the first, the layers' numbers, and their middles."""
    layers = np.array([layer for layer, _ in heads])
    begins = np.flatnonzero(np.diff(layers, prepend=-1))
    ends = np.append(begins[1:], len(layers))
    return begins[1:].tolist(), layers[begins].tolist(), ((begins + ends - 1) / 2).tolist()


def _name_layers(axis: Any, names: Sequence[int], middles: Sequence[float]) -> None:
    every = -(-len(names) // 24)  # at most 24 labels, to be legible
    axis.set_ticks(middles[::every], [f"{name}" for name in names[::every]])
    axis.set_tick_params(length=0)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
