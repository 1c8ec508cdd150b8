"""Registries of the tasks and built-in examples of `hsa train`, each with its defaults, data and additions to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsa.errors import InvalidInput
from hsa.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from hsa.training.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """A task of `hsa train`, or a built-in example: a classification with data of its own.

    Attributes:
        preset: Function `preset(data, quick)` that returns the default recipe.
        own_data: Name of the data that are used without DATA.
        prepare: `"module:attribute"` of a function `prepare(recipe, small, say)` that returns `PreparedData`; for tasks that
            train a classifier.
        report: `"module:attribute"` of a function `report(folder, recipe, prepared)` that returns more lines for the report,
            and plots.
        summary: `"module:attribute"` of a function `summary(prepared, results)` that returns what the results mean, in a
            sentence or two.
    """

    preset: Callable[[Path | None, bool], Recipe]
    own_data: str
    prepare: str | None = None
    report: str | None = None
    summary: str | None = None


TASKS: Registry[Task] = Registry("task")
for _name in ("classification", "regression", "lm", "seq2seq"):
    TASKS.register(_name, f"hsa.training.presets:{_name.upper()}")

EXAMPLES: Registry[Task] = Registry("example")
"""Built-in examples, which `hsa train` uses without data."""
EXAMPLES.register("python", "hsa.training.presets:PYTHON")


def task_of(recipe: Recipe) -> Task:
    """Return the example that a recipe names, or its task."""
    read = recipe.read
    if read.example is None:
        return TASKS.get(read.task)
    if recipe.data is not None or read.task != "classification":
        given = f"DATA, {recipe.data}" if recipe.data is not None else f"--task {read.task}"
        raise InvalidInput(
            "example",
            got=f"{read.example} with {given}",
            expected="an example alone: it has data and a task of its own",
            fix="Omit one of the two",
        )
    return EXAMPLES.get(read.example)
