"""Plots of a training run: learning curves, confusion matrix, and the attention within one example."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hsa.attention.dense import dense_weights
from hsa.errors import InvalidInput, MissingExtra
from hsa.files import write_then_rename
from hsa.models.classifier import Classifier
from hsa.models.registry import Explanation
from hsa.registry import KINDS
from hsa.signals.batch import Batch
from hsa.tree.hierarchy import Hierarchy

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


def plot_attention(path: Path, model: Classifier, example: Batch, labels: Sequence[str] | None, title: str) -> None:
    """Plot the attention matrix of one example (first layer, mean over heads), with lines between families.

    Args:
        path: File to write.
        model: Model.
        example: Batch of one tree.
        labels: Texts of its leaves.
        title: Title of the plot.
    """
    weights, families = attention_matrix(model, example)
    weights = weights.clip(0)  # talking heads can have negative weights
    leaves = len(weights)
    size = min(11.0, 3.0 + 0.13 * leaves)
    figure, axes = pyplot().subplots(figsize=(size + 1, size), layout="constrained")
    # Attention weights span orders of magnitude: the square root makes small ones visible.
    image = axes.imshow(np.sqrt(weights), cmap="magma_r", vmin=0)
    for leaf, depth in families:
        width = max(0.3, 1.4 - 0.35 * depth)
        axes.axhline(leaf - 0.5, color="#1f6f8b", lw=width, alpha=0.7)
        axes.axvline(leaf - 0.5, color="#1f6f8b", lw=width, alpha=0.7)
    if labels is not None and leaves <= 90:
        font = max(4.0, min(8.0, 480 / leaves))
        shown = [one_line(label, 12) or "·" for label in labels]
        look: dict[str, Any] = {"fontsize": font, "fontfamily": "monospace", "parse_math": False}
        axes.set_xticks(range(leaves), shown, rotation=90, **look)
        axes.set_yticks(range(leaves), shown, **look)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(one_line(title, 60), parse_math=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight: first layer, mean over heads")
    top = float(np.sqrt(weights.max())) or 1.0
    ticks = np.linspace(0, top, 5)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick**2:.2g}" for tick in ticks])
    save_figure(figure, path)


def has_matrix(model: Classifier) -> bool:
    """Return whether the attention of a model can be drawn as a matrix over pairs of leaves."""
    encoder: Any = model.config.encoder
    return encoder.architecture == "tree" and KINDS.get(encoder.kind).has_matrix


def attention_matrix(model: Classifier, example: Batch) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the weights of the first layer, mean over heads, `[leaves, leaves]`, and (first leaf, depth) of the families.

    Families are those below the root, one per first leaf.

    Raises:
        InvalidInput: The model has no such matrix, see `has_matrix`.
    """
    weights, hierarchy = layer_weights(model, example, layer=0)
    s = hierarchy.structure
    inner = np.flatnonzero((s.num_children > 0) & (s.parent >= 0) & (s.first_leaf > 0))
    deepest_first = sorted(zip(s.first_leaf[inner].tolist(), s.depth[inner].tolist(), strict=True), key=lambda e: -e[1])
    return weights.mean(0), list({leaf: (leaf, depth) for leaf, depth in deepest_first}.values())


@torch.no_grad()
def layer_weights(model: Classifier, example: Batch, layer: int) -> tuple[np.ndarray, Hierarchy]:
    """Return the weights of a layer, `[heads, leaves, leaves]`, and the forest that it attends in.

    Raises:
        InvalidInput: The model has no such weights, see `has_matrix`, or no such layer.
    """
    if not has_matrix(model):
        encoder = model.config.encoder
        kind = getattr(encoder, "kind", encoder.architecture)
        raise InvalidInput(
            "model", got=f"the kind {kind!r}", expected="a model with attention weights for every pair of leaves"
        )
    layers = model.encoder.layers
    if not 0 <= layer < len(layers):
        raise InvalidInput("layer", got=layer, expected=f"an index from 0 to {len(layers) - 1}")
    caught: list[Any] = []
    attention = layers[layer].attention
    if not isinstance(attention, nn.Module):
        raise TypeError("a layer without attention")
    hook = attention.register_forward_pre_hook(lambda module, inputs: caught.append(inputs))
    was_training = model.training
    try:
        model.eval()(example)
    finally:
        hook.remove()
        model.train(was_training)
    *queries_and_keys, v, hierarchy, positions, mixing = caught[0]

    def operator(q: Tensor, k: Tensor, v: Tensor, hierarchy: Any) -> Tensor:
        return attention(*queries_and_keys, v, hierarchy, positions, mixing)

    weights = dense_weights(operator, v, v, hierarchy)  # v in place of q and k: only their lengths matter
    return weights.float().cpu().numpy(), hierarchy


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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # scripts that the font lacks are drawn as boxes
            write_then_rename(path, lambda beside: figure.savefig(beside, dpi=DPI, format=kind))
    finally:
        pyplot().close(figure)


ATTENTION_MATRIX = Explanation("attention.png", 80, plot_attention, has_matrix)
