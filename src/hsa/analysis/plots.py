"""Pictures of a training run: curves, confusion, and what one example attends to."""

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
    """Training loss and validation score by epoch, a line per model.

    Args:
        histories: model → epoch records.
        score: the name of the validation score.
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
    """Add a legend of the lines of `axes`; beside the picture if it would cover too much of it."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > _NAMES_INSIDE:
        figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    else:
        axes.legend(frameon=False, fontsize=8)


def plot_confusion(path: Path, table: Sequence[Sequence[int]], classes: Sequence[str], title: str) -> None:
    """Which classes are taken for which: a row per true class, shares of the row as colour, counts as text."""
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
    figure.colorbar(image, ax=axes, shrink=0.7, label="share of the true class")
    save_figure(figure, path)


def plot_attention(path: Path, model: Classifier, example: Batch, labels: Sequence[str] | None, title: str) -> None:
    """The attention matrix of one example, first layer, mean over heads; lines where its families begin.

    Args:
        example: a batch of one tree.
        labels: of its leaves.
    """
    weights, families = attention_matrix(model, example)
    weights = weights.clip(0)  # heads that talk may subtract
    leaves = len(weights)
    size = min(11.0, 3.0 + 0.13 * leaves)
    figure, axes = pyplot().subplots(figsize=(size + 1, size), layout="constrained")
    # A matrix of attention spans orders of magnitude: a root shows the small weights too.
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
    axes.set(xlabel="attended to", ylabel="attends")
    axes.set_title(one_line(title, 60), parse_math=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    top = float(np.sqrt(weights.max())) or 1.0
    ticks = np.linspace(0, top, 5)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick**2:.2g}" for tick in ticks])
    save_figure(figure, path)


def has_matrix(model: Classifier) -> bool:
    """Return whether the layers give a weight to every pair of leaves, which can be drawn as a matrix."""
    encoder: Any = model.config.encoder
    return encoder.architecture == "tree" and KINDS.get(encoder.kind).has_matrix


def attention_matrix(model: Classifier, example: Batch) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """`[leaves, leaves]` weights of the first layer, mean over heads; and the first leaf and depth of every inner family.

    Raises:
        InvalidInput: there is none, see `has_matrix`.
    """
    weights, hierarchy = layer_weights(model, example, layer=0)
    s = hierarchy.structure
    inner = np.flatnonzero((s.num_children > 0) & (s.parent >= 0) & (s.first_leaf > 0))
    deepest_first = sorted(zip(s.first_leaf[inner].tolist(), s.depth[inner].tolist(), strict=True), key=lambda e: -e[1])
    return weights.mean(0), list({leaf: (leaf, depth) for leaf, depth in deepest_first}.values())


@torch.no_grad()
def layer_weights(model: Classifier, example: Batch, layer: int) -> tuple[np.ndarray, Hierarchy]:
    """`[heads, leaves, leaves]` weights of a layer, and the forest that it attends in.

    Raises:
        InvalidInput: there are none, see `has_matrix`; or no such layer.
    """
    if not has_matrix(model):
        encoder = model.config.encoder
        given = f"a {getattr(encoder, 'kind', encoder.architecture)} encoder"
        raise InvalidInput("model", given=given, expected="one whose layers see all leaves, one by one")
    layers = model.encoder.layers
    if not 0 <= layer < len(layers):
        raise InvalidInput("layer", given=layer, expected=f"from 0 to {len(layers) - 1}")
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
    *compared, v, hierarchy, positions, mixing = caught[0]

    def operator(q: Tensor, k: Tensor, v: Tensor, hierarchy: Any) -> Tensor:
        return attention(*compared, v, hierarchy, positions, mixing)

    weights = dense_weights(operator, v, v, hierarchy)  # which asks queries and keys only for their number
    return weights.float().cpu().numpy(), hierarchy


def one_line(text: str, most: int) -> str:
    """On one line, and no longer than there is room for."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "train", "plots") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    kind = path.suffix.removeprefix(".")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # tokens of other scripts are drawn as boxes
            write_then_rename(path, lambda beside: figure.savefig(beside, dpi=DPI, format=kind))
    finally:
        pyplot().close(figure)


ATTENTION_MATRIX = Explanation("attention.png", 80, plot_attention, has_matrix)
