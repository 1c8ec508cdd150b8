"""Report of `hsa train --task lm`: a table, the differences between models, and plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hsa.analysis.tables import TerminalTable, markdown_table, terminal_table
from hsa.files import write_text
from hsa.training.failures import NoResult, lines_of, rows_without_results
from hsa.training.language_model.data import LmData
from hsa.training.language_model.experiment import LmResult
from hsa.training.recipe import Recipe
from hsa.training.report import fewer_operations, options_section

_OPTIONAL = ("tokens seen", "loss", "parameters")
_CAPTION = "bits: per character; operations: attention operations per token of a test block, all layers"


def lm_columns(results: list[LmResult], failed: Mapping[str, NoResult]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of results."""
    header = ["model", "parameters", "perplexity", "loss", "bits", "operations", "tokens seen", "tokens/s", "train s"]
    rows = [
        [
            r.model,
            f"{r.parameters:,}",
            f"{r.perplexity:.2f}",
            f"{r.loss:.4f}",
            f"{r.bits_per_character:.3f}",
            f"{r.operations / 1e6:.2f} M",
            f"{r.tokens / 1e6:,.1f} M",
            f"{r.tokens_per_second:,.0f}",
            f"{r.training_seconds:.1f}",
        ]
        for r in results
    ]
    return header, rows + rows_without_results(failed, len(header))


def lm_table(results: list[LmResult], failed: Mapping[str, NoResult]) -> TerminalTable:
    """Return the table of results for the terminal."""
    return terminal_table(*lm_columns(results, failed), _CAPTION, _OPTIONAL)


def lm_lines(results: list[LmResult]) -> list[str]:
    """Return one line per other model with the difference to the first, and a remark on models with a memory."""
    first = results[0]
    lines = []
    for other in results[1:]:
        change = 100 * (first.perplexity / other.perplexity - 1)
        lines.append(
            f"{first.model} against {other.model}: perplexity {change:+.1f}% on {first.test_tokens:,} test tokens "
            f"(one seed){fewer_operations(first.operations, other.operations)}"
        )
    remembering = [result.model for result in results if result.remembered_tokens]
    if remembering:
        names = ", ".join(remembering)
        lines.append(
            f"{names} carries a memory from block to block in the test; the others start every block without one"
        )
    return lines


def write_lm_report(
    folder: Path, recipe: Recipe, data: LmData, results: list[LmResult], failed: Mapping[str, NoResult]
) -> list[Path]:
    """Write `report.md` and its plots; return the plots."""
    from hsa.training.language_model.plots import plot_by_position, plot_losses

    pictures = [folder / "losses.png", folder / "positions.png"]
    plot_losses(pictures[0], {r.model: r.history for r in results})
    plot_by_position(pictures[1], {r.model: r.by_position for r in results})
    lines = [f"# Language models of {data.name}", "", *markdown_table(*lm_columns(results, failed))]
    lines += ["", f"{_CAPTION[0].upper()}{_CAPTION[1:]}."]
    lines += ["", *(f"- {line}" for line in [*lm_lines(results), *lines_of(failed)]), ""]
    lines += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    lines += options_section(recipe.options("model", "language", "training"))
    write_text(folder / "report.md", "\n".join(lines))
    return pictures
