"""Registration of the task match3. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from hsa.models.options import ModelOptions
from hsa.research.match3.options import Match3Options
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.tasks import Task


def preset(data: Path | None, quick: bool) -> Recipe:
    """Return a recipe that learns the task in minutes on one core; recipes/match3.yaml is the same."""
    return Recipe(
        data,
        ("trilinear", "flat", "deepsets"),
        DataOptions(task="match3"),
        ModelOptions(width=64, head_dim=32, dropout=0.0, position_width=0),
        TrainingOptions(epochs=10, learning_rate=2e-3, batch_size=256, patience=0),
        extra={"match3": Match3Options()},
    )


MATCH3 = Task(
    preset,
    "match3",
    prepare="hsa.research.match3.data:prepare_recipe",
    report="hsa.research.match3.report:report",
)
