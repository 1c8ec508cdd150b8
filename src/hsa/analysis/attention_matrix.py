"""Plot of the attention between the leaves of one example; of a long one, between the leaves of its heaviest families."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hsa.analysis.page import percent, runs
from hsa.analysis.plots import one_line, pyplot, save_figure
from hsa.attention.dense import dense_weights
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.registry import Explanation
from hsa.registry import KINDS
from hsa.signals.batch import Batch
from hsa.tree.hierarchy import Hierarchy

LEAVES = 80
"""Maximum number of leaves in a plot, to be legible."""
_PIECE = 20  # leaves of a larger family that are chosen together


def plot_attention(path: Path, model: Classifier, example: Batch, labels: Sequence[str] | None, title: str) -> None:
    """Plot the attention matrix of one example (first layer, mean over heads), with lines between families.

    Of an example with more than `LEAVES` leaves, plot those of the families that receive most attention.

    Args:
        path: File to write.
        model: Model.
        example: Batch of one tree.
        labels: Texts of its leaves; None for their numbers.
        title: Title of the plot.
    """
    weights, families = attention_matrix(model, example)
    heads = model.encoder.config.heads
    leaves, s = len(weights), example.hierarchy.structure
    shown = heaviest_leaves(weights.mean(0), s.parent[s.leaf_nodes], LEAVES)
    cut = weights[np.ix_(shown, shown)].clip(0)  # talking heads can have negative weights
    size = min(11.0, 3.0 + 0.13 * len(shown))
    figure, axes = pyplot().subplots(figsize=(size + 1, size), layout="constrained")
    # Attention weights span orders of magnitude: the square root makes small ones visible.
    image = axes.imshow(np.sqrt(cut), cmap="magma_r", vmin=0)
    for leaf, depth in families:
        before = int(np.searchsorted(shown, leaf))
        if 0 < before < len(shown):
            _draw_border(axes, before, "#1f6f8b", max(0.3, 1.4 - 0.35 * depth))
    for gap in np.flatnonzero(np.diff(shown) > 1) + 1:
        _draw_border(axes, int(gap), "white", 4.0)
    font = max(4.0, min(8.0, 480 / len(shown)))
    texts = [one_line(labels[leaf], 16) or "·" if labels is not None else str(leaf) for leaf in shown]
    look: dict[str, Any] = {"fontsize": font, "fontfamily": "monospace", "parse_math": False}
    axes.set_xticks(range(len(shown)), texts, rotation=90, **look)
    axes.set_yticks(range(len(shown)), texts, **look)
    axes.set(xlabel="key: leaf that is attended to (lines between families)", ylabel="query: leaf that attends")
    title = one_line(title, 60)
    if len(shown) < leaves:
        share = percent(float(weights[:, shown].sum() / weights.sum()))
        title += f"\n{len(shown)} of {leaves:,} leaves, in the families that receive most attention ({share} of it)"
        title += "; white lines where others are left out"
    axes.set_title(title, fontsize=10, parse_math=False)
    number = f"layer 1 of {len(model.encoder.layers)}, mean over {heads} heads"
    bar = figure.colorbar(image, ax=axes, shrink=0.6, label=f"attention weight: {number}")
    top = float(np.sqrt(cut.max())) or 1.0
    ticks = np.linspace(0, top, 5)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick**2:.2g}" for tick in ticks])
    save_figure(figure, path)


def _draw_border(axes: Any, leaf: int, color: str, width: float) -> None:
    axes.axhline(leaf - 0.5, color=color, lw=width, alpha=0.7)
    axes.axvline(leaf - 0.5, color=color, lw=width, alpha=0.7)


def heaviest_leaves(weights: np.ndarray, families: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` leaves, in order: those of the families with the largest sums of weights that fit.

    Args:
        weights: `[leaves]` Weight of each leaf.
        families: `[leaves]` Family of each leaf. Runs of more than 20 leaves are taken in pieces.
        most: Maximum number of leaves.

    >>> heaviest_leaves(np.array([0.1, 0.1, 0.4, 0.0, 0.3, 0.1]), np.array([0, 0, 1, 1, 2, 2]), 4)
    array([2, 3, 4, 5])
    """
    if len(weights) <= most:
        return np.arange(len(weights))
    size = min(_PIECE, most)
    pieces = [
        range(begin, min(begin + size, end))
        for first, end in pairwise(runs(families))
        for begin in range(first, end, size)
    ]
    chosen: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -float(weights[piece.start : piece.stop].sum())):
        if len(chosen) + len(piece) <= most:
            chosen += piece
    return np.array(sorted(chosen))


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


ATTENTION_MATRIX = Explanation("attention.png", LEAVES, plot_attention, has_matrix)
