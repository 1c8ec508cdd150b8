"""Additions to the training report of listops: accuracy by the depth of expressions, and what the results mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hsa.analysis.plots import COLORS, add_legend, pyplot, save_figure
from hsa.analysis.tables import markdown_table
from hsa.models.saved import load_model
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import DataSet
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.loop import Trainer
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe

PICTURE = "depth.png"
FEWEST = 20
"""Number of test expressions of a depth from which its accuracy is shown."""
KNOWS_TREE = ("hierarchical", "multiscale", "bottom-up", "hierarchical-trilinear")
"""Models that read the tree of an expression; the others read its tokens."""


def report(folder: Path, recipe: Recipe, prepared: PreparedData) -> tuple[list[str], list[Path]]:
    """Return the accuracy by depth as lines of the report, and its picture."""
    test = prepared.test
    right = {name: _is_right(folder / name, test) for name in recipe.models if (folder / name).is_dir()}
    accuracies = {name: by_depth(own, depths(test)) for name, own in right.items()}
    frequent = by_depth((test.targets == test.targets.bincount().argmax()).numpy(), depths(test))
    plot_depths(folder / PICTURE, accuracies, frequent)
    rows = [[name, *(f"{share:.3f}" for share in of.values())] for name, of in accuracies.items()]
    lines = [
        "## Accuracy by the depth of expressions",
        "",
        *markdown_table(["model", *(f"{depth} levels" for depth in frequent)], rows),
        "",
        f"![depth]({PICTURE})",
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


def depths(data: DataSet) -> np.ndarray:
    """Return the number of levels of nested operations of every expression."""
    structure = data.batch.hierarchy.structure
    return structure.height[structure.parent < 0]


def by_depth(right: np.ndarray, depth: np.ndarray) -> dict[int, float]:
    """Return the share of right answers of every depth that has enough expressions."""
    numbers, counts = np.unique(depth, return_counts=True)
    return {
        int(n): float(right[depth == n].mean()) for n, count in zip(numbers, counts, strict=True) if count >= FEWEST
    }


def plot_depths(path: Path, accuracies: Mapping[str, Mapping[int, float]], frequent: Mapping[int, float]) -> None:
    """Plot accuracy against depth, a line per model and one for the most frequent answer."""
    figure, axes = pyplot().subplots(figsize=(6, 3.8), layout="constrained")
    for color, (name, of) in zip(COLORS * 3, accuracies.items(), strict=False):
        axes.plot(list(of), list(of.values()), color=color, marker="o", ms=4, label=name)
    axes.plot(list(frequent), list(frequent.values()), color="black", ls=":", lw=1, label="most frequent answer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(
        xlabel="levels of nested operations", ylabel="test accuracy", ylim=(0, 1), title="ListOps: accuracy by depth"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    save_figure(figure, path)


def _is_right(folder: Path, test: DataSet) -> np.ndarray:
    """Return for every test expression whether a saved model evaluates it correctly."""
    options = TrainingOptions(batch_size=256)
    accelerator = make_accelerator(options)
    model, _ = load_model(folder, accelerator.device)
    predicted = Trainer(model, test, test, options, accelerator=accelerator).evaluate(test).predicted
    return np.asarray(predicted == test.targets.numpy())
