"""Report of `hsa train` for classifiers: a table, the differences between models, and plots."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hsa.analysis.sparsity import HEADER
from hsa.analysis.sparsity import rows as rows_of_levels
from hsa.analysis.tables import TerminalTable, markdown_table, terminal_table
from hsa.errors import HsaWarning
from hsa.files import write_json, write_text
from hsa.models.registry import explanation_of
from hsa.models.saved import load_model
from hsa.registry import resolve
from hsa.signals.domains import Table
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.failures import NoResult, lines_of, rows_without_results
from hsa.training.learning import unlearned_lines, why_unlearned
from hsa.training.recipe import Recipe
from hsa.training.reference import Reference, References
from hsa.training.significance import margin
from hsa.training.tasks import task_of

_OPTIONAL = ("epochs", "parameters", "test s")
_TREE_LEAVES = 240  # largest tree that is legible in a plot
_MATRIX_LEAVES = 4096  # largest example whose attention matrix is computed
_SPARSITY = (
    "Measured on up to 256 test examples. Level 1: families of leaves (sentences, statements); level 2: families of these. "
    "Zeros: share of the attention weights of a member (on its siblings and on its own inside) that are exactly 0. "
    "Visited: share of families, per head, that receive any weight from above."
)


def columns(
    results: list[Result], failed: Mapping[str, NoResult], references: References
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of results, with the references at the end."""
    header = ["model", "parameters", *results[0].scores.shown, "operations", "train s", "test s", "epochs"]
    rows = [
        [
            r.model,
            f"{r.parameters:,}",
            *(f"{score:.4f}" for score in r.scores.shown.values()),
            f"{r.operations / 1e6:.2f} M" if r.operations else "0",
            f"{r.training_seconds:.1f}",
            f"{r.test_seconds:.1f}",
            str(r.epochs),
        ]
        for r in results
    ]
    return header, rows + rows_without_results(failed, len(header)) + list(map(_reference_row, references.all))


def _reference_row(reference: Reference) -> list[str]:
    return [
        reference.name,
        format_known(reference.parameters, ","),
        *(f"{score:.4f}" for score in reference.scores.shown.values()),
        "–",
        format_known(reference.training_seconds, ".1f"),
        format_known(reference.test_seconds, ".1f"),
        "–",
    ]


def format_known(number: float | None, form: str) -> str:
    """Format a number; a dash for None."""
    return "–" if number is None else format(number, form)


def result_table(results: list[Result], failed: Mapping[str, NoResult], references: References) -> TerminalTable:
    """Return the table of results for the terminal."""
    header, rows = columns(results, failed, references)
    return terminal_table(header, rows, _caption(header), _OPTIONAL)


def _caption(header: list[str]) -> str:
    score = "F1: mean over classes" if "F1" in header else "error: mean absolute error"
    return f"{score}; operations: attention operations per test example, all layers; test s: all test examples"


def report_lines(prepared: PreparedData, results: list[Result], references: References) -> list[str]:
    """Return the findings, one line each: models that learned nothing, and what the first gains over the others.

    Two models that learned nothing are not compared.
    """
    reasons = {r.model: why_unlearned([r], prepared, references.constant) for r in results}
    lines = unlearned_lines(reasons, prepared, "another --learning-rate")
    first, *others = results
    for other in others:
        if None in (reasons[first.model], reasons[other.model]):
            gain = describe_gain([first.scores.main], [other.scores.main], prepared)
            cheaper = fewer_operations(first.operations, other.operations)
            lines.append(f"{first.model} against {other.model}: {gain}{cheaper}")
    return lines + words_lines(first.model, [first.scores.main], references, prepared)


def words_lines(model: str, scores: Sequence[float], references: References, prepared: PreparedData) -> list[str]:
    """Return the gain of a model over logistic regression on words, and advice if that is better beyond chance.

    Args:
        model: Name of the model.
        scores: Its main scores, one per seed.
        references: References of the data.
        prepared: Data of the run.
    """
    if references.words is None:
        return [] if references.note is None else [references.note]
    name, words = references.words.name, references.words.scores.main
    lines = [f"{model} against {name}: {describe_gain(scores, words, prepared)}"]
    chance = margin(scores, words, len(prepared.test)) or 0.0
    if words - statistics.fmean(scores) > chance:
        advice = "" if prepared.input_spec.encoder else "; a pre-trained text encoder may beat both: --encoder MODEL"
        lines.append(f"{name} is better than {model} beyond chance{advice}")
    return lines


def summary(recipe: Recipe, prepared: PreparedData, results: list[Result]) -> str:
    """Return what the results mean, if the task or example knows; otherwise an empty text."""
    function = task_of(recipe).summary
    return "" if function is None else str(resolve(function)(prepared, results))


def describe_gain(first: Sequence[float], second: Sequence[float] | float, prepared: PreparedData) -> str:
    """Return the difference of two mean scores, and whether it is significant.

    Args:
        first, second: Main scores as in `margin`.
        prepared: Data of the run.
    """
    classes, n = bool(prepared.test.classes), len(prepared.test)
    others = [second] if isinstance(second, float) else second
    better = statistics.fmean(first) - statistics.fmean(others)
    chance = margin(first, second, n if classes else None)
    unit = 100 if classes else 1
    gained = f"{unit * better:+.1f} points" if classes else f"R² {better:+.3f}"
    if chance is None:
        return f"{gained} (significance unknown: one seed)"
    seeds = len(first) if isinstance(second, float) else min(len(first), len(others))
    basis = f"{seeds} seeds" if seeds > 1 else "one seed"
    if classes:
        basis = f"{n:,} test examples and {basis}"
    shown = f"{unit * chance:.1f}" if classes else f"{chance:.3f}"
    return f"{gained} ({significance(better, chance)}: 95% margin ± {shown} with {basis})"


def significance(difference: float, margin: float) -> str:
    """Return whether a difference exceeds its margin, in words."""
    return "significant" if abs(difference) > margin else "not significant"


def fewer_operations(first: float, other: float) -> str:
    """Return the ratio of attention operations as the end of a sentence; empty if a model has none."""
    if not first or not other:
        return ""
    ratio = other / first
    if 0.95 < ratio < 1.05:
        return ", equal attention operations"
    times = f"{ratio:.1f} × fewer" if ratio > 1 else f"{1 / ratio:.1f} × more"
    return f", {times} attention operations"


def write_report(
    folder: Path,
    recipe: Recipe,
    prepared: PreparedData,
    results: list[Result],
    failed: Mapping[str, NoResult],
    references: References,
) -> list[Path]:
    """Write `report.md` with its plots, and `references.json`; return the plots."""
    from hsa.analysis.plots import plot_confusion, plot_curves
    from hsa.analysis.sparsity import plot_sparsity

    first = results[0]
    score = "accuracy" if prepared.test.classes else "R²"
    pictures = [folder / "curves.png"]
    plot_curves(pictures[0], {r.model: r.history for r in results}, score)
    if first.confusion:
        pictures.append(folder / "confusion.png")
        plot_confusion(
            pictures[-1], first.confusion, prepared.test.classes, f"{first.model}: confusion on the test data"
        )
    pictures += _plot_example(folder, first, prepared)
    sparse = {r.model: r.sparsity for r in results if r.sparsity}
    if sparse:
        pictures.append(folder / "sparsity.png")
        plot_sparsity(pictures[-1], sparse)
        pictures += _plot_trees(folder, next(iter(sparse)), prepared)
    header, rows = columns(results, failed, references)
    lines = [f"# {prepared.name}", "", *markdown_table(header, rows)]
    caption = _caption(header)
    lines += ["", f"{caption[0].upper()}{caption[1:]}."]
    lines += ["", *(f"- {line}" for line in [*report_lines(prepared, results, references), *lines_of(failed)]), ""]
    if meaning := summary(recipe, prepared, results):
        lines += [meaning, ""]
    for model, levels in sparse.items():
        lines += [f"## Sparsity of {model}", "", *markdown_table(HEADER, rows_of_levels(levels)), "", _SPARSITY, ""]
    lines += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    added = task_of(recipe).report
    if added is not None:
        more_lines, more_pictures = resolve(added)(folder, recipe, prepared)
        lines, pictures = [*lines, "", *more_lines], [*pictures, *more_pictures]
    lines += options_section(recipe.options("read", "model", "training"))
    write_text(folder / "report.md", "\n".join(lines))
    write_json(folder / "references.json", [asdict(reference) for reference in references.all])
    return pictures


def options_section(options: Mapping[str, Any]) -> list[str]:
    """Return the Markdown section of a report that lists the options."""
    return ["", "## Options", "", "```", *(f"{name}: {value}" for name, value in options.items()), "```", ""]


def _plot_trees(folder: Path, name: str, prepared: PreparedData) -> list[Path]:
    """Draw the branches of a test example that receive weight: on average, and from the leaf with the largest weight."""
    from hsa.analysis.sparse_tree import attention_tree, plot_sparse_tree

    model, _ = load_model(folder / name)
    index = _example_to_draw(prepared, _TREE_LEAVES)
    if index is None or prepared.input_spec.transform is not None:
        return []
    example = prepared.test.select([index])
    title = f"{name}, first layer, mean over heads: {example.names[0]}"
    labels = leaf_labels(example.batch, prepared)
    mean = attention_tree(model, example.batch)
    top = int(mean.weights[mean.structure.leaf_nodes].argmax())
    pictures = {"tree.png": mean, "tree_of_a_leaf.png": attention_tree(model, example.batch, leaf=top)}
    for file, tree in pictures.items():
        plot_sparse_tree(folder / file, tree, labels, title)
    return [folder / file for file in pictures]


def _plot_example(folder: Path, first: Result, prepared: PreparedData) -> list[Path]:
    """Draw the attention of the first model in a test example, if the model can be drawn."""
    model, _ = load_model(folder / first.model)
    explanation = explanation_of(model)
    if explanation is None or prepared.input_spec.transform is not None:
        return []
    index = _example_to_draw(prepared, explanation.leaves)
    if index is None:
        return []
    example = prepared.test.select([index])
    labels, title = leaf_labels(example.batch, prepared), f"{first.model}: {example.names[0]}"
    picture = folder / explanation.file
    explanation.draw(picture, model, example.batch, labels, title)
    return [picture]


def _example_to_draw(prepared: PreparedData, most: int) -> int | None:
    """Return the index of the longest test example with at most `most` leaves, else of the shortest one.

    None, with a warning, if that one has more than `_MATRIX_LEAVES` leaves.
    """
    lengths = prepared.test.lengths
    fitting = np.flatnonzero(lengths <= most)
    if len(fitting):
        return int(fitting[lengths[fitting].argmax()])
    if lengths.min() <= _MATRIX_LEAVES:
        return int(lengths.argmin())
    warnings.warn(
        f"no picture of attention: it takes the weights of all pairs of at most {_MATRIX_LEAVES:,} leaves, and the shortest "
        f"test example has {lengths.min():,}",
        HsaWarning,
        stacklevel=2,
    )
    return None


def leaf_labels(example: Any, prepared: PreparedData) -> list[str] | None:
    """Return a label for each leaf of one example; None if it has neither text nor columns.

    The label of a token is the text that it adds to those before it, with a space where a word begins. The first leaf of a
    column has the name of the column before it. Other leaves have their number in their column.
    """
    labels = [str(number) for number in range(example.hierarchy.num_leaves)]
    tokenizer, has_text = prepared.input_spec.tokenizer, False
    if tokenizer is not None and "text" in example.values:
        has_text, ids = True, example.values["text"].tolist()
        # A character that spans several tokens belongs to the last one; until then it decodes to replacement characters.
        texts = [tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
        for leaf, (before, text) in zip(example.leaves["text"].tolist(), pairwise(texts), strict=True):
            labels[leaf] = text[len(before) :]
    root, s = next(iter(example.domains), None), example.hierarchy.structure
    if not isinstance(root, Table):
        return labels if has_text else None
    tokens = set(example.leaves["text"].tolist()) if has_text else set()
    for name, column in zip(root.keys, range(s.first_child[0], s.first_child[0] + s.num_children[0]), strict=True):
        first, end = int(s.first_leaf[column]), int(s.end_leaf[column])
        for leaf in range(first, end):
            labels[leaf] = labels[leaf] if leaf in tokens else f" {leaf - first}"
        alone = end - first == 1 and first not in tokens  # a number
        labels[first] = f" {name}" if alone else f" {name}: {labels[first].strip()}"
    return labels
