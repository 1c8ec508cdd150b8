"""Plots of a training run: learning curves and confusion matrix. Colours, titles and files of all plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsa.analysis.fonts import add_fallbacks, noting_missing_characters
from hsa.errors import MissingExtra
from hsa.files import write_then_rename

COLORS = ("#1f6f8b", "#d1495b", "#7f7f7f", "#edae49", "#6a4c93", "#66a182", "#8c564b", "#2b2d42", "#e377c2")
_NAMES_INSIDE = 4
DPI = 140


def plot_curves(path: Path, histories: dict[str, Sequence[Any]], score: str) -> None:
    """Plot losses and validation score against epochs, one line per model.

    Args:
        path: File to write.
        histories: Epoch records by model.
        score: Name of the validation score.
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for color, (name, history) in zip(COLORS * 3, histories.items(), strict=False):
        epochs = [record.epoch for record in history]
        left.plot(epochs, [record.loss for record in history], color=color, marker="o", ms=3, label=name)
        left.plot(epochs, [record.validation_loss for record in history], color=color, ls=":", lw=1)
        right.plot(epochs, [record.validation for record in history], color=color, marker="o", ms=3, label=name)
    left.set(xlabel="epoch", ylabel="loss", title="Loss (dotted: validation)")
    right.set(xlabel="epoch", ylabel=score, title=f"Validation {score}")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    add_legend(figure, right)
    save_figure(figure, path)


def add_legend(figure: Any, axes: Any) -> None:
    """Add a legend of the lines of `axes`, outside the axes if it is long."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > _NAMES_INSIDE:
        figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    else:
        axes.legend(frameon=False, fontsize=8)


def plot_confusion(path: Path, table: Sequence[Sequence[int]], classes: Sequence[str], title: str) -> None:
    """Plot a confusion matrix: a row per true class, with shares of the row as colours and counts as text."""
    counts = np.array(table)
    size = min(12.0, 2.6 + 0.42 * len(classes))
    figure, axes = pyplot().subplots(figsize=(size + 0.8, size), layout="constrained")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= 24:
        for i, j in np.argwhere(counts > 0):
            shade = "white" if shares[i, j] > 0.55 else "#333333"
            axes.text(j, i, counts[i, j], ha="center", va="center", fontsize=7, color=shade)
    names = [one_line(name, 24) for name in classes]
    axes.set_xticks(range(len(classes)), names, rotation=60, ha="right", fontsize=8, parse_math=False)
    axes.set_yticks(range(len(classes)), names, fontsize=8, parse_math=False)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(one_line(title, 60), parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.7, label="share of the examples of the true class")
    save_figure(figure, path)


def one_line(text: str, most: int) -> str:
    """Return the text on one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def pyplot() -> Any:
    """Import pyplot with a backend that draws to files."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "train", "plots") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure in the format of the suffix, and close it."""
    kind = path.suffix.removeprefix(".")
    try:
        add_fallbacks(figure)
        with noting_missing_characters():
            write_then_rename(path, lambda beside: figure.savefig(beside, dpi=DPI, format=kind))
    finally:
        pyplot().close(figure)
