"""What `hsa train --task` names: where the data come from, which defaults suit them, what a report adds."""

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
    """One task.

    Attributes:
        preset: `preset(data, quick)`: the recipe that applies where neither a recipe file nor the command line says more.
        own_data: Name of the data that are used without DATA.
        prepare: `"module:attribute"`, for tasks of a classifier: `prepare(recipe, small, say)` returns `PreparedData`.
        report: `"module:attribute"`: `report(folder, recipe, prepared)` returns further lines of the report, and pictures.
    """

    preset: Callable[[Path | None, bool], Recipe]
    own_data: str
    prepare: str | None = None
    report: str | None = None


TASKS: Registry[Task] = Registry("task")
for _name in ("classification", "regression", "lm", "seq2seq"):
    TASKS.register(_name, f"hsa.training.presets:{_name.upper()}")
