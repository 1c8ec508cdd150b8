"""Additions to the training report of listops: accuracy by the length of expressions, and what the results mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hsa.analysis.plots import COLORS, pyplot, save_figure
from hsa.analysis.tables import markdown_table
from hsa.models.saved import load_model
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import DataSet
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.loop import Trainer
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe

PICTURE = "lengths.png"
PARTS = 5
"""Number of equally large parts of the test expressions, by length."""
KNOWS_TREE = ("hierarchical", "multiscale", "bottom-up", "hierarchical-trilinear")
"""Models that read the tree of an expression; the others read its tokens."""


def report(folder: Path, recipe: Recipe, prepared: PreparedData) -> tuple[list[str], list[Path]]:
    """Return the accuracy by length as lines of the report, and its picture."""
    test = prepared.test
    right = {name: _is_right(folder / name, test) for name in recipe.models if (folder / name).is_dir()}
    accuracies = {name: by_length(own, test.lengths) for name, own in right.items()}
    frequent = by_length((test.targets == test.targets.bincount().argmax()).numpy(), test.lengths)
    plot_lengths(folder / PICTURE, accuracies, frequent)
    rows = [[name, *(f"{share:.3f}" for share in of.values())] for name, of in accuracies.items()]
    lines = [
        "## Accuracy by the length of expressions",
        "",
        *markdown_table(["model", *(f"{length:.0f} tokens" for length in frequent)], rows),
        "",
        f"Mean lengths of {PARTS} equally large parts of the test expressions.",
        "",
        f"![lengths]({PICTURE})",
    ]
    return lines, [folder / PICTURE]


def summary(prepared: PreparedData, results: Sequence[Result]) -> str:
    """Return what the results mean: the best model that knows the tree, beside the best one that does not."""
    accuracies = {result.model: result.scores.accuracy or 0.0 for result in results}
    frequent = float(prepared.test.targets.bincount().max()) / len(prepared.test)
    parts = []
    for knows, verb in ((True, "knows"), (False, "does not know")):
        side = {name: score for name, score in accuracies.items() if (name.split("+")[0] in KNOWS_TREE) is knows}
        if side:
            name, score = max(side.items(), key=lambda item: item[1])
            parts.append(f"{name}, which {verb} the tree of an expression, evaluates {score:.0%} of them correctly")
    return f"{'; '.join(parts)}; the most frequent answer is right for {frequent:.0%}."


def by_length(right: np.ndarray, lengths: np.ndarray) -> dict[float, float]:
    """Return the share of right answers in equally large parts of the expressions, by the mean length of each part.

    >>> by_length(np.array([1, 0, 1, 1, 0, 0, 0, 1, 0, 0]), np.array([1, 9, 2, 3, 10, 8, 7, 4, 6, 5]))
    {1.5: 1.0, 3.5: 1.0, 5.5: 0.0, 7.5: 0.0, 9.5: 0.0}
    """
    parts = np.array_split(np.argsort(lengths, kind="stable"), PARTS)
    return {float(lengths[part].mean()): float(right[part].mean()) for part in parts if len(part)}


def plot_lengths(path: Path, accuracies: Mapping[str, Mapping[float, float]], frequent: Mapping[float, float]) -> None:
    """Plot accuracy against length, a line per model and one for the most frequent answer."""
    figure, axes = pyplot().subplots(figsize=(6.4, 3.8), layout="constrained")
    for color, (name, of) in zip(COLORS * 3, accuracies.items(), strict=False):
        axes.plot(list(of), list(of.values()), color=color, marker="o", ms=4, label=name)
    axes.plot(list(frequent), list(frequent.values()), color="black", ls=":", lw=1, label="most frequent answer")
    axes.set(xlabel="tokens per expression", ylabel="test accuracy", ylim=(0, 1), title="ListOps: accuracy by length")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    save_figure(figure, path)


def _is_right(folder: Path, test: DataSet) -> np.ndarray:
    """Return for every test expression whether a saved model evaluates it correctly."""
    options = TrainingOptions(batch_size=256)
    accelerator = make_accelerator(options)
    model, _ = load_model(folder, accelerator.device)
    predicted = Trainer(model, test, test, options, accelerator=accelerator).evaluate(test).predicted
    return np.asarray(predicted == test.targets.numpy())
