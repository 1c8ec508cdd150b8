"""Registry of the tasks that `hsa train --task` accepts, each with its defaults, data and additions to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsa.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from hsa.training.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """A task of `hsa train`.

    Attributes:
        preset: Function `preset(data, quick)` that returns the default recipe.
        own_data: Name of the data that are used without DATA.
        prepare: `"module:attribute"` of a function `prepare(recipe, small, say)` that returns `PreparedData`; for tasks that
            train a classifier.
        report: `"module:attribute"` of a function `report(folder, recipe, prepared)` that returns more lines for the report,
            and plots.
    """

    preset: Callable[[Path | None, bool], Recipe]
    own_data: str
    prepare: str | None = None
    report: str | None = None


TASKS: Registry[Task] = Registry("task")
for _name in ("classification", "regression", "lm", "seq2seq"):
    TASKS.register(_name, f"hsa.training.presets:{_name.upper()}")
