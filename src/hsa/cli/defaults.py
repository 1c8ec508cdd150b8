"""The section "Defaults by task" of a command's help, computed from the presets of the tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from hsa.training.recipe import Recipe
from hsa.training.tasks import TASKS

_SOME_DATA = Path("DATA")


def defaults_by_task(names: Iterable[str] | None = None, *, models: bool = True) -> str:
    """Return a list of what the preset of each task changes, as Markdown.

    Args:
        names: Tasks to list; all by default.
        models: Also list the models, where the command takes them from the preset.
    """
    lines = ["**Defaults by task**, where they differ from the defaults above:", ""]
    for name in TASKS.names() if names is None else names:
        lines += [f"- {title}: {changes}" for title, changes in _of_task(name, models)]
    return "\n".join(lines)


def changed_options(recipe: Recipe, since: Recipe) -> dict[str, Any]:
    """Return the options that differ between two recipes, by their names on the command line; data and task aside.

    >>> from hsa.training.options import TrainingOptions
    >>> changed_options(Recipe(training=TrainingOptions(epochs=3, batch_size=8)), since=Recipe())
    {'--epochs': 3, '--batch-size': 8}
    """
    groups = [
        (getattr(recipe, part), getattr(since, part)) for part in ("read", "model", "training", "language", "seq2seq")
    ]
    groups += [(recipe.group(name), since.group(name)) for name in recipe.extra]
    changed = {} if recipe.models == since.models else {"models": recipe.models}
    for ours, others in groups:
        values = {f.name: getattr(ours, f.name) for f in fields(ours)}
        changed |= {name: value for name, value in values.items() if value != getattr(others, name)}
    changed.pop("task", None)
    return {f"--{name.replace('_', '-')}": value for name, value in changed.items()}


def _of_task(name: str, models: bool) -> list[tuple[str, str]]:
    """Return a title and the changes of each case: with DATA; then what else changes without DATA, and with --quick."""
    preset = TASKS.get(name).preset
    usual = preset(_SOME_DATA, False)
    cases = {
        name: changed_options(usual, Recipe()),
        f"{name} without DATA": changed_options(preset(None, False), usual),
        f"{name} with --quick": changed_options(preset(_SOME_DATA, True), usual),
    }
    if not models:
        for changes in cases.values():
            changes.pop("--models", None)
    return [
        (title, ", ".join(f"{option} {_shown(value)}" for option, value in changes.items()) or "none")
        for title, changes in cases.items()
        if changes or title == name
    ]


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
