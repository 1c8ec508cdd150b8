"""The report of a comparison: a table, what it means, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsa.analysis.sparsity import HEADER
from hsa.analysis.sparsity import rows as rows_of_levels
from hsa.analysis.tables import markdown_table, terminal_table
from hsa.files import write_text
from hsa.models.registry import explanation_of
from hsa.models.saved import load_model
from hsa.registry import resolve
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.failures import NoResult, lines_of, rows_without_results
from hsa.training.recipe import Recipe
from hsa.training.significance import margin
from hsa.training.tasks import TASKS

if TYPE_CHECKING:
    from rich.table import Table

_TREE_LEAVES = 240  # of the largest tree that can be read in a picture
_SPARSITY = (
    "Of up to 256 test examples. Level 1 are families of leaves (sentences, statements), level 2 families of these. Zeros: "
    "of the weights that members of a family give each other and what is inside them. Visited: families, times heads, that "
    "get a weight from above; without gradients, the others are skipped on the way down."
)


def columns(results: list[Result], failed: Mapping[str, NoResult]) -> tuple[list[str], list[list[str]]]:
    """The header and rows of the table."""
    classes = results[0].scores.accuracy is not None
    scores = ["accuracy", "F1"] if classes else ["R²", "error"]
    header = ["model", "parameters", *scores, "operations", "train s", "test s", "epochs"]
    rows = []
    for r in results:
        numbers = (r.scores.accuracy, r.scores.f1) if classes else (r.scores.r2, r.scores.mean_absolute_error)
        rows.append(
            [
                r.model,
                f"{r.parameters:,}",
                *(f"{number:.4f}" for number in numbers),
                f"{r.operations / 1e6:.2f} M" if r.operations else "0",
                f"{r.training_seconds:.1f}",
                f"{r.test_seconds:.1f}",
                str(r.epochs),
            ]
        )
    return header, rows + rows_without_results(failed, len(header))


def result_table(results: list[Result], failed: Mapping[str, NoResult]) -> Table:
    """For the terminal."""
    header, rows = columns(results, failed)
    caption = "operations: of attention, per test example, all layers; F1: mean over classes"
    return terminal_table(header, rows, caption)


def report_lines(prepared: PreparedData, results: list[Result]) -> list[str]:
    """What the first model gained or lost against each of the others, and how sure that is."""
    first, lines = results[0], []
    for other in results[1:]:
        if first.scores.accuracy is None or other.scores.accuracy is None:
            better = first.scores.main - other.scores.main
            cheaper = fewer_operations(first.operations, other.operations)
            lines.append(f"{first.model} against {other.model}: R² {better:+.3f}{cheaper}")
            continue
        a, b, n = first.scores.accuracy, other.scores.accuracy, len(prepared.test)
        by_chance = margin([a], [b], n) or 0.0
        sure = "more than chance" if abs(a - b) > by_chance else "within chance"
        lines.append(
            f"{first.model} against {other.model}: {100 * (a - b):+.1f} points ({sure}: ± {100 * by_chance:.1f} for "
            f"{n:,} test examples and one seed){fewer_operations(first.operations, other.operations)}"
        )
    return lines


def fewer_operations(first: float, other: float) -> str:
    """How many times fewer or more the first has; nothing where one has none."""
    if not first or not other:
        return ""
    ratio = other / first
    if 0.95 < ratio < 1.05:
        return ", as many attention operations"
    times = f"{ratio:.1f} × fewer" if ratio > 1 else f"{1 / ratio:.1f} × more"
    return f", {times} attention operations"


def write_report(
    folder: Path, recipe: Recipe, prepared: PreparedData, results: list[Result], failed: Mapping[str, NoResult]
) -> list[Path]:
    """`report.md` and its pictures; returns the pictures."""
    from hsa.analysis.plots import plot_confusion, plot_curves
    from hsa.analysis.sparsity import plot_sparsity

    first = results[0]
    score = "accuracy" if prepared.test.classes else "R²"
    pictures = [folder / "curves.png"]
    plot_curves(pictures[0], {r.model: r.history for r in results}, score)
    if first.confusion:
        pictures.append(folder / "confusion.png")
        plot_confusion(pictures[-1], first.confusion, prepared.test.classes, f"{first.model}: test examples")
    pictures += _picture_of_an_example(folder, first, prepared)
    sparse = {r.model: r.sparsity for r in results if r.sparsity}
    if sparse:
        pictures.append(folder / "sparsity.png")
        plot_sparsity(pictures[-1], sparse)
        pictures += _pictures_of_trees(folder, next(iter(sparse)), prepared)
    header, rows = columns(results, failed)
    lines = [f"# {prepared.name}", "", *markdown_table(header, rows)]
    lines += [
        "",
        "Operations: of attention, per test example, all layers. F1: mean over classes. Error: mean absolute.",
    ]
    lines += ["", *(f"- {line}" for line in [*report_lines(prepared, results), *lines_of(failed)]), ""]
    for model, levels in sparse.items():
        lines += [f"## Sparsity of {model}", "", *markdown_table(HEADER, rows_of_levels(levels)), "", _SPARSITY, ""]
    lines += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    added = TASKS.get(recipe.read.task).report
    if added is not None:
        more_lines, more_pictures = resolve(added)(folder, recipe, prepared)
        lines, pictures = [*lines, "", *more_lines], [*pictures, *more_pictures]
    lines += options_section(recipe.options("read", "model", "training"))
    write_text(folder / "report.md", "\n".join(lines))
    return pictures


def options_section(options: Mapping[str, Any]) -> list[str]:
    """Return the last section of a report, in Markdown."""
    return ["", "## Options", "", "```", *(f"{name}: {value}" for name, value in options.items()), "```", ""]


def _pictures_of_trees(folder: Path, name: str, prepared: PreparedData) -> list[Path]:
    """Which branches of a test example get no weight: on average, and from the leaf that gets most."""
    from hsa.analysis.sparse_tree import attention_tree, plot_sparse_tree

    model, _ = load_model(folder / name)
    chosen = _longest_readable(prepared, _TREE_LEAVES)
    if chosen is None or prepared.input_spec.transform is not None:
        return []
    example = prepared.test.select([chosen])
    labels, title = leaf_labels(example.batch, prepared), f"{name}, first layer: {example.names[0]}"
    mean = attention_tree(model, example.batch)
    top = int(mean.weights[mean.structure.leaf_nodes].argmax())
    pictures = {"tree.png": mean, "tree_of_a_leaf.png": attention_tree(model, example.batch, leaf=top)}
    for file, tree in pictures.items():
        plot_sparse_tree(folder / file, tree, labels, title)
    return [folder / file for file in pictures]


def _picture_of_an_example(folder: Path, first: Result, prepared: PreparedData) -> list[Path]:
    """Draw what the first model attends to in a test example, where that can be shown."""
    model, _ = load_model(folder / first.model)
    explanation = explanation_of(model)
    if explanation is None or prepared.input_spec.transform is not None:
        return []
    index = _longest_readable(prepared, explanation.leaves)
    if index is None:
        return []
    example = prepared.test.select([index])
    labels, title = leaf_labels(example.batch, prepared), f"{first.model}: {example.names[0]}"
    picture = folder / explanation.file
    explanation.draw(picture, model, example.batch, labels, title)
    return [picture]


def _longest_readable(prepared: PreparedData, most: int) -> int | None:
    """Return the longest test example of at most `most` leaves, if there is one."""
    lengths = prepared.test.lengths
    fitting = np.flatnonzero(lengths <= most)
    return int(fitting[lengths[fitting].argmax()]) if len(fitting) else None


def leaf_labels(example: Any, prepared: PreparedData) -> list[str] | None:
    """The text of every token: what it adds to those before it, with a space where a word begins."""
    tokenizer = prepared.input_spec.tokenizer
    if tokenizer is None or list(example.values) != ["text"]:
        return None
    ids = example.values["text"].tolist()
    # A character of several tokens is that of the last one: until then it is decoded to replacement characters.
    texts = [tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    return [text[len(before) :] for before, text in pairwise(texts)]
