"""Plots of language models: loss during training, and loss by position in the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsa.analysis.plots import COLORS, pyplot, save_figure


def plot_losses(path: Path, histories: Mapping[str, Sequence[Any]]) -> None:
    """Plot training and validation loss against tokens seen, one line per model.

    Args:
        path: File to write.
        histories: Records with `tokens`, `loss` and `validation_loss`, by model.
    """
    figure, axes = pyplot().subplots(figsize=(5.6, 3.6), layout="constrained")
    for color, (name, history) in zip(COLORS * 3, histories.items(), strict=False):
        tokens = [record.tokens / 1e6 for record in history]
        axes.plot(tokens, [r.validation_loss for r in history], color=color, marker="o", ms=3, label=name)
        axes.plot(tokens, [r.loss for r in history], color=color, ls=":", lw=1)
    axes.set(xlabel="million tokens seen", ylabel="nats per token", title="Validation loss (dotted: training)")
    _finish(axes)
    save_figure(figure, path)


def plot_by_position(path: Path, losses: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Plot the test loss against the position in the block, one line per model.

    Args:
        path: File to write.
        losses: Pairs (position, mean loss), by model.
    """
    figure, axes = pyplot().subplots(figsize=(5.6, 3.6), layout="constrained")
    for color, (name, points) in zip(COLORS * 3, losses.items(), strict=False):
        axes.plot([position for position, _ in points], [loss for _, loss in points], color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the block", ylabel="nats per token", title="Test loss by position")
    _finish(axes)
    save_figure(figure, path)


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
