"""The section "Defaults by task" of `--help-all`, computed from the presets of the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from hsa.training.recipe import Recipe
from hsa.training.tasks import EXAMPLES, TASKS

_SOME_DATA = Path("DATA")


def defaults_by_task(names: Iterable[str] | None = None, *, models: bool = True) -> str:
    """Return a list of the options that the preset of each task changes.

    Args:
        names: Tasks to list; all by default.
        models: Whether to list the models too: a command may have its own.
    """
    lines = ["Defaults by task, where they differ from those of --task classification with DATA:", ""]
    for name in TASKS.names() if names is None else names:
        lines += [f"- {title}: {changes}" for title, changes in _of_task(name, models)]
    usual = TASKS.get("classification").preset(_SOME_DATA, False)
    for name in EXAMPLES.names():
        changes = changed_options(EXAMPLES.get(name).preset(None, False), usual)
        lines.append(f"- --example {name}: {_listed(changes, models)}")
    return "\n".join(lines)


def task_defaults(tokens: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a sentence and the defaults that change with the task that is named on the command line.

    >>> task_defaults(["train", "--task=lm"])[1]["models"]
    ('multiscale', 'flat')
    """
    words = [word for token in tokens for word in token.split("=", 1)]
    task = next((value for option, value in pairwise(words) if option == "--task"), Recipe().read.task)
    changes = changed_options(TASKS.get(task).preset(_SOME_DATA, False), Recipe())
    note = f"Defaults are those of --task {task} with DATA."
    return note, {option.removeprefix("--").replace("-", "_"): value for option, value in changes.items()}


def changed_options(recipe: Recipe, since: Recipe) -> dict[str, Any]:
    """Return the options that differ between two recipes, except data and task, by their names on the command line.

    >>> from hsa.training.options import TrainingOptions
    >>> changed_options(Recipe(training=TrainingOptions(epochs=3, batch_size=8)), since=Recipe())
    {'--epochs': 3, '--batch-size': 8}
    """
    groups = [
        (getattr(recipe, part), getattr(since, part)) for part in ("read", "model", "training", "language", "seq2seq")
    ]
    groups += [(recipe.group(name), since.group(name)) for name in recipe.extra]
    changed = {} if recipe.models == since.models else {"models": recipe.models}
    for group, before in groups:
        values = {f.name: getattr(group, f.name) for f in fields(group)}
        changed |= {name: value for name, value in values.items() if value != getattr(before, name)}
    for name in ("task", "example"):
        changed.pop(name, None)
    return {f"--{name.replace('_', '-')}": value for name, value in changed.items()}


def _of_task(name: str, models: bool) -> list[tuple[str, str]]:
    """Return titles and changes: with DATA; without DATA, relative to that; with --quick, relative to that."""
    preset = TASKS.get(name).preset
    usual = preset(_SOME_DATA, False)
    cases = {
        name: changed_options(usual, Recipe()),
        f"{name} without DATA": changed_options(preset(None, False), usual),
        f"{name} with --quick": changed_options(preset(_SOME_DATA, True), usual),
    }
    listed = {title: _listed(changes, models) for title, changes in cases.items()}
    return [(title, changes or "none") for title, changes in listed.items() if changes or title == name]


def _listed(changes: Mapping[str, Any], models: bool) -> str:
    """Return options with their values as a list; without --models, if not `models`."""
    shown = {option: value for option, value in changes.items() if models or option != "--models"}
    return ", ".join(f"{option} {_format(value)}" for option, value in shown.items())


def _format(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(_format, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
