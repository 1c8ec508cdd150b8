"""Additions to the training report for the task match3."""

from __future__ import annotations

from pathlib import Path

from hsa.analysis.cost_plots import cost_table, plot_costs
from hsa.analysis.tables import markdown_table
from hsa.research.match3.data import rules
from hsa.research.trilinear.costs import costs
from hsa.training.data.prepare import PreparedData
from hsa.training.recipe import Recipe

COSTS = "cost.png"


def report(folder: Path, recipe: Recipe, data: PreparedData) -> tuple[list[str], list[Path]]:
    """Return extra lines for the report (simple rules, cost of attention by length) and the pictures they show."""
    model = recipe.model
    accuracies = [[name, f"{accuracy:.4f}"] for name, accuracy in rules(data, recipe.group("match3").modulus).items()]
    width = model.heads * (model.head_dim or model.width // model.heads)
    measured = costs(model.heads, width)
    plot_costs(folder / COSTS, measured)
    lines = [
        "## Accuracy of simple rules",
        "",
        *markdown_table(["rule", "test accuracy"], accuracies),
        "",
        "## Cost of attention by length",
        "",
        *markdown_table(*cost_table(measured)),
        "",
        f"Operations of one layer ({model.heads} heads, {width} channels), and median time of a forward pass on this CPU.",
        "",
        f"![cost]({COSTS})",
    ]
    return lines, [folder / COSTS]
