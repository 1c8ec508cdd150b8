"""What commands that train classifiers share: their recipe, their folder, their data."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput
from hsa.registry import resolve
from hsa.training.recipe import Recipe, load_recipe, overridden
from hsa.training.tasks import TASKS

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.data.prepare import PreparedData


NAMED: ContextVar[frozenset[str]] = ContextVar("NAMED", default=frozenset())
"""The options that stand on the command line, which override those of a recipe even where they equal the default."""
_RUNS = ("*/checkpoint.pt", "*/*/*/checkpoint.pt", "*/*/*/ended.json")
"""What `hsa train` and `hsa compare` leave in their folders, whether they finished or not."""


def words(given: tuple[str, ...]) -> tuple[str, ...]:
    """Lists with commas as well as without: each word once.

    >>> words(("hierarchical,flat", "deepsets", "hierarchical"))
    ('hierarchical', 'flat', 'deepsets')
    """
    return tuple(dict.fromkeys(word for part in given for word in part.split(",") if word))


def is_recipe(data: Path | None) -> bool:
    return data is not None and data.suffix.lower() in (".yaml", ".yml")


def completed(given: Recipe, quick: bool, models: tuple[str, ...] | None = None) -> Recipe:
    """Return the recipe with what stands on the command line, over a recipe file or the preset of the task.

    Args:
        models: Models where neither the command line nor a recipe file names any, in place of the preset's.
    """
    if given.data is not None and is_recipe(given.data):
        base = load_recipe(given.data)
    else:
        base = TASKS.get(given.read.task).preset(given.data, quick)
        base = base if models is None else replace(base, models=models)
    recipe = overridden(base, given, NAMED.get())
    return quicker(recipe) if quick else recipe


def quicker(given: Recipe) -> Recipe:
    """For a look at how it works: few epochs of a small model."""
    training = replace(given.training, epochs=min(given.training.epochs, 4))
    return replace(given, training=training, model=replace(given.model, width=min(given.model.width, 64)))


def no_time_limit(recipe: Recipe) -> None:
    """Refuses what the loops of other tasks cannot do."""
    if recipe.training.minutes:
        raise InvalidInput(
            "minutes",
            given=f"{recipe.training.minutes:g} with the task {recipe.read.task}",
            expected="classification or regression",
            fix="limit --epochs instead",
        )


def read_data(recipe: Recipe, accelerator: Any, folder: Path, *, small: bool, console: Console) -> PreparedData:
    """The data of a recipe, and on the console what they are. `small`: a fraction of the standard library."""
    from rich.text import Text

    from hsa.training.experiment import check_entmax

    def say(message: str) -> None:
        if accelerator.is_main_process:
            console.print(Text(f"{message} …", style="dim"))

    for group in recipe.extra.values():
        group.check_models(recipe.models)
    check_entmax(recipe.models, recipe.model)
    where = TASKS.get(recipe.read.task).prepare
    assert where is not None  # a task of classifiers
    with accelerator.main_process_first():  # the other processes load the data from the cache
        prepared: PreparedData = resolve(where)(recipe, small, say)
    if accelerator.is_main_process:
        _announce(console, prepared, folder)
    return prepared


def run_folder(recipe: Recipe, out: Path | None, resume: bool, kind: str = "") -> Path:
    """Results are never written over: a new folder, or the one to resume. `kind`: what its name begins with."""
    if out is not None:
        if resume and not out.is_dir():
            raise InvalidInput(
                str(out), given="no such folder", expected="a run to resume", fix="start without --resume"
            )
        if not resume and any(any(out.glob(pattern)) for pattern in _RUNS):
            raise InvalidInput(
                str(out),
                given="a folder with a run",
                expected="a new folder",
                fix="pass --resume to go on with that run, or another --out",
            )
        return out
    own_data = TASKS.get(recipe.read.task).own_data
    name = kind + (own_data if recipe.data is None else recipe.data.stem)
    own = re.compile(re.escape(name) + r"(-\d+)?")
    taken = [path for path in Path("runs").glob("*") if own.fullmatch(path.name)]
    if resume:
        if not taken:
            raise InvalidInput(
                "resume",
                given=f"no run in runs/{name}",
                expected="one to resume",
                fix="start without --resume, or pass the folder of the run as --out",
            )
        return max(taken, key=lambda path: path.stat().st_mtime)
    numbered = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, len(taken) + 2))
    return next(path for path in numbered if not path.exists())


def _announce(console: Console, prepared: PreparedData, folder: Path) -> None:
    from rich.text import Text

    sizes = (
        f"{len(prepared.train):,} to train, {len(prepared.validation):,} to validate, {len(prepared.test):,} to test"
    )
    what = f"{len(prepared.train.classes)} classes" if prepared.train.classes else "numbers"
    leaves = prepared.train.lengths
    console.print(
        Text(f"{prepared.name}: {sizes}; {what}; {leaves.mean():,.0f} leaves each (at most {leaves.max():,})")
    )
    if prepared.skipped:
        console.print(Text(f"left out: {len(prepared.skipped):,}, the first: {prepared.skipped[0]}", style="yellow"))
    console.print(Text(f"results go to {folder}", style="dim"))
