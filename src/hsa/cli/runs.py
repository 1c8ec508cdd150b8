"""Shared parts of the commands that train: the recipe, the folder of the run, and the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.cli.progress import skipped_line
from hsa.errors import InvalidInput, MissingExtra
from hsa.registry import resolve
from hsa.training.old_run import RUNS, remove_run
from hsa.training.recipe import Recipe, load_recipe, overridden
from hsa.training.tasks import task_of

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.data.prepare import PreparedData
    from hsa.training.reference import References


NAMED: ContextVar[frozenset[str]] = ContextVar("NAMED", default=frozenset())
"""Options on the command line, as Python keywords. They override a recipe even where they equal the default."""


def split_words(values: tuple[str, ...]) -> tuple[str, ...]:
    """Split values at commas and return each word once.

    >>> split_words(("hierarchical,flat", "deepsets", "hierarchical"))
    ('hierarchical', 'flat', 'deepsets')
    """
    return tuple(dict.fromkeys(word for value in values for word in value.split(",") if word))


def is_recipe(data: Path | None) -> bool:
    """Return whether `data` is a recipe file rather than data."""
    return data is not None and data.suffix.lower() in (".yaml", ".yml")


def complete_recipe(
    options: Recipe, quick: bool, models: tuple[str, ...] | None = None, *, example: str = "listops"
) -> Recipe:
    """Return the recipe file, or the preset of the task, with the options of the command line in place of its own.

    Args:
        options: Options as parsed from the command line; those in `NAMED` override.
        quick: Whether to shorten the run, see `shorten_recipe`.
        models: Models to train, in place of the preset's, where neither the command line nor a recipe file names any.
        example: Example to use where neither data nor another task are given.
    """
    options = _with_example(options, example)
    if options.data is not None and is_recipe(options.data):
        base = load_recipe(options.data)
    else:
        base = task_of(options).preset(options.data, quick)
        base = base if models is None else replace(base, models=models)
    recipe = _with_example(overridden(base, options, NAMED.get()), example)
    task_of(recipe)  # a recipe file may have data, and the command line name an example
    return shorten_recipe(recipe) if quick else recipe


def _with_example(recipe: Recipe, example: str) -> Recipe:
    """Return the recipe with this example if it is a classification that names neither data nor an example."""
    read = recipe.read
    if recipe.data is not None or read.task != "classification" or read.example is not None:
        return recipe
    return replace(recipe, read=replace(read, example=example))


def shorten_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with at most 4 epochs and a width of at most 64."""
    training = replace(recipe.training, epochs=min(recipe.training.epochs, 4))
    return replace(recipe, training=training, model=replace(recipe.model, width=min(recipe.model.width, 64)))


def refuse_time_limit(recipe: Recipe) -> None:
    """Refuse `--minutes`, which only the training loop of classifiers and regressors supports."""
    if recipe.training.minutes:
        raise InvalidInput(
            "minutes",
            got=f"{recipe.training.minutes:g}",
            expected=f"0 with the task {recipe.read.task}",
            fix="Limit --epochs instead",
        )


def read_data(recipe: Recipe, accelerator: Any, folder: Path, *, small: bool, console: Console) -> PreparedData:
    """Read the data of a recipe and print a summary of them; `small` reads only part of the built-in data."""
    from rich.text import Text

    from hsa.training.experiment import check_entmax

    def say(message: str) -> None:
        if accelerator.is_main_process:
            console.print(Text(f"{message} …", style="dim"))

    for group in recipe.extra.values():
        group.check_models(recipe.models)
    check_entmax(recipe.models, recipe.model)
    prepare = task_of(recipe).prepare
    assert prepare is not None  # every task of a classifier has it
    with accelerator.main_process_first():  # the other processes load the data from the cache
        prepared: PreparedData = resolve(prepare)(recipe, small, say)
    if accelerator.is_main_process:
        _announce(console, prepared, folder)
    return prepared


def measure_references(
    recipe: Recipe, prepared: PreparedData, accelerator: Any, *, small: bool, console: Console
) -> References | None:
    """Return the references of the data, in the first process; None in the others, which write no report."""
    from rich.text import Text

    from hsa.training.reference import References, constant_answer
    from hsa.training.text_baseline import WORDS, has_texts, train_on_words

    if not accelerator.is_main_process:
        return None
    constant = constant_answer(prepared)
    if not has_texts(prepared):
        return References(constant)
    try:
        words = train_on_words(recipe.data, recipe.read, prepared, small=small)
    except MissingExtra as error:
        return References(constant, note=str(error))
    console.print(Text(f"{WORDS}: accuracy {words.scores.main:.3f}", style="dim"))
    return References(constant, words)


def remove_old_run(folder: Path, accelerator: Any) -> None:
    """Remove the run in a folder, in the first process; the others wait."""
    if accelerator.is_main_process:
        remove_run(folder)
    accelerator.wait_for_everyone()


def run_folder(
    recipe: Recipe, out: Path | None, resume: bool, overwrite: bool, accelerator: Any = None, kind: str = ""
) -> Path:
    """Return the folder of a training run, see `choose_folder`, the same in all processes of an accelerator.

    `kind` is a prefix of its default name.
    """
    name = kind + (task_of(recipe).own_data if recipe.data is None else recipe.data.stem)
    if accelerator is None or accelerator.num_processes == 1:
        return choose_folder(name, out, resume, overwrite, files=RUNS)
    from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

    # The first process chooses: it creates the folder, so that others would find its name taken.
    chosen = [choose_folder(name, out, resume, overwrite, files=RUNS) if accelerator.is_main_process else None]
    folder: Path = broadcast_object_list(chosen)[0]
    return folder


def choose_folder(
    name: str, out: Path | None, resume: bool, overwrite: bool | None = None, *, files: Sequence[str]
) -> Path:
    """Return the folder of a run: a new one, so that no results are lost, or that of the run to resume or overwrite.

    Args:
        name: Name of the folder in `runs`, without `out`. A new run gets a number if the name is taken; `resume` and
            `overwrite` select the latest run of this name.
        out: Folder that the user named.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to start again in the folder; None for a command without this option.
        files: Patterns of the files that every run of this command has in its folder.
    """
    if resume and overwrite:
        raise InvalidInput("overwrite", got="both --resume and --overwrite", expected="one of them")
    if out is not None:
        exists = any(any(out.glob(pattern)) for pattern in files)
        if resume and not out.is_dir():
            raise InvalidInput(
                str(out), problem="no such folder", expected="a run to resume", fix="Start without --resume"
            )
        if exists and not resume and not overwrite:
            again = "" if overwrite is None else "--overwrite to start again, "
            raise InvalidInput(
                str(out),
                got="a folder with a run",
                expected="a new folder",
                fix=f"Pass --resume to continue that run, {again}or another --out",
            )
        return out
    own = re.compile(re.escape(name) + r"(-\d+)?")
    taken = [path for path in Path("runs").glob("*") if own.fullmatch(path.name)]
    if resume and not taken:
        raise InvalidInput(
            "resume",
            problem=f"no run in runs/{name}",
            expected="a run to resume",
            fix="Start without --resume, or pass the folder of the run as --out",
        )
    if taken and (resume or overwrite):
        return max(taken, key=lambda path: path.stat().st_mtime)
    numbered = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, len(taken) + 2))
    return next(path for path in numbered if not path.exists())


def _announce(console: Console, prepared: PreparedData, folder: Path) -> None:
    from rich.text import Text

    sizes = (
        f"{len(prepared.train):,} to train, {len(prepared.validation):,} to validate, {len(prepared.test):,} to test"
    )
    labels = f"{len(prepared.train.classes)} classes" if prepared.train.classes else "numbers"
    leaves = prepared.train.lengths
    console.print(
        Text(f"{prepared.name}: {sizes}; {labels}; {leaves.mean():,.0f} leaves on average (at most {leaves.max():,})")
    )
    if prepared.skipped:
        console.print(Text(skipped_line(prepared.skipped), style="yellow"))
    console.print(Text(f"results go to {folder}", style="dim"))
