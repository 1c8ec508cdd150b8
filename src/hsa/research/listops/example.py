"""Registration of the example listops. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from hsa.models.options import ModelOptions
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.tasks import Task


def preset(data: Path | None, quick: bool) -> Recipe:
    """Return a recipe in which every model trains for the same time, so that all take three minutes on two CPU cores."""
    return Recipe(
        data,
        ("bottom-up", "hierarchical", "flat"),
        DataOptions(example="listops"),
        ModelOptions(width=64, layers=2, dropout=0.0),
        TrainingOptions(epochs=100, minutes=0.2 if quick else 0.8, learning_rate=2e-3, patience=0),
    )


LISTOPS = Task(
    preset,
    "listops",
    prepare="hsa.research.listops.data:prepare_recipe",
    report="hsa.research.listops.report:report",
    summary="hsa.research.listops.report:summary",
)
