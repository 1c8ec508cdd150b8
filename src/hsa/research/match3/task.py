"""The task match3: its preset, its data and what its report adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hsa.analysis.cost_plots import cost_table, plot_costs
from hsa.analysis.tables import markdown_table
from hsa.models.options import ModelOptions
from hsa.research.match3.data import prepare_match3, rules
from hsa.research.match3.options import Match3Options
from hsa.research.trilinear.costs import costs
from hsa.training.data.prepare import PreparedData
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.tasks import Task

COSTS = "cost.png"


def report(folder: Path, recipe: Recipe, data: PreparedData) -> tuple[list[str], list[Path]]:
    """Return what the report adds: rules that need no learning, and the cost of attention by length, with its picture."""
    model = recipe.model
    accuracies = [[name, f"{accuracy:.4f}"] for name, accuracy in rules(data, recipe.group("match3").modulus).items()]
    width = model.heads * (model.head_dim or model.width // model.heads)
    measured = costs(model.heads, width)
    plot_costs(folder / COSTS, measured)
    lines = [
        "## Rules without three numbers",
        "",
        *markdown_table(["rule", "test accuracy"], accuracies),
        "",
        "## Cost of attention by length",
        "",
        *markdown_table(*cost_table(measured)),
        "",
        f"Operations of one layer ({model.heads} heads, {width} channels), and the median time of a pass on this CPU.",
        "",
        f"![cost]({COSTS})",
    ]
    return lines, [folder / COSTS]


def preset(data: Path | None, quick: bool) -> Recipe:
    """Return sizes that learn to match three numbers in minutes on one core; recipes/match3.yaml has the same."""
    return Recipe(
        data,
        ("trilinear", "flat", "deepsets"),
        DataOptions(task="match3"),
        ModelOptions(width=64, head_dim=32, dropout=0.0, position_width=0),
        TrainingOptions(epochs=10, learning_rate=2e-3, batch_size=256, patience=0),
        extra={"match3": Match3Options()},
    )


def prepare(recipe: Recipe, small: bool, say: Callable[[str], None]) -> PreparedData:
    """Generate the numbers of a recipe; few if `small`."""
    options: Match3Options = recipe.group("match3")
    if small:
        options = replace(options, sequences=min(options.sequences, _FEW))
    return prepare_match3(recipe.data, options, seed=recipe.training.seed)


_FEW = 2_000
"""Training sequences for a quick look."""
_HERE = "hsa.research.match3.task"
MATCH3 = Task(preset, "match3", prepare=f"{_HERE}:prepare", report=f"{_HERE}:report")
