"""`hsa train --task lm`: language models of a text, and a table of how well they predict it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.lm_data import LmData
    from hsa.training.lm_experiment import LmResult


def run_lm(recipe: Recipe, folder: Path, *, resume: bool, cpu: bool, fsdp: bool, console: Console) -> None:
    from rich.text import Text

    from hsa.training.lm_data import prepare_text
    from hsa.training.lm_experiment import check_lm_models, compare_language_models

    check_lm_models(recipe.models)
    if fsdp or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput("task", given="lm in several processes", expected="one process", fix="start plain hsa train")

    def say(message: str) -> None:
        console.print(Text(f"{message} …", style="dim"))

    read = recipe.read
    data = prepare_text(recipe.data, text=read.text, vocabulary=read.vocabulary, seed=recipe.training.seed, say=say)
    sizes = ", ".join(f"{len(getattr(data, part)):,} to {verb}" for part, verb in _VERBS.items())
    console.print(Text(f"{data.name}: {data.characters / 1e6:,.1f} M characters; tokens: {sizes}"))
    console.print(Text(f"results go to {folder}", style="dim"))
    results = compare_language_models(
        recipe.models,
        recipe.model,
        data,
        recipe.training,
        recipe.language,
        folder,
        resume=resume,
        device="cpu" if cpu else None,
        watch=lambda name: LmBar(name, console),
    )
    _report(console, recipe, data, results, folder)


_VERBS = {"train": "train", "validation": "validate", "test": "test"}


class LmBar:
    """A progress bar for one model; in a log, a line per look at the validation text."""

    def __init__(self, name: str, console: Console):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.name, self.console = name, console
        self.progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: Any = None
        self.loss = self.validation = ""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task(self.name, total=total, note="")
        if loss is not None:
            self.loss = f"loss {loss:.3f}"
        self.progress.update(self.task, completed=done, note="  ".join(filter(None, [self.loss, self.validation])))

    def evaluated(self, record: Any) -> None:
        self.validation = f"validation {record.validation_loss:.3f}"
        if not self.console.is_terminal:
            losses = f"loss {record.loss:.3f}  {self.validation}"
            self.console.print(
                f"{self.name:<10}  step {record.step:,}  {losses}  {record.seconds:.1f} s", highlight=False
            )

    def done(self) -> None:
        self.progress.stop()


def _report(console: Console, recipe: Recipe, data: LmData, results: list[LmResult], folder: Path) -> None:
    from rich.text import Text

    from hsa.analysis.tables import print_table
    from hsa.training.lm_report import lm_lines, lm_table, write_lm_report

    pictures = write_lm_report(folder, recipe, data, results)
    console.print()
    print_table(console, lm_table(results))
    console.print()
    for line in lm_lines(results):
        console.print(Text(line))
    model = folder / results[0].model
    for line in (
        f"\nmodel     {model}",
        f"report    {folder / 'report.md'}",
        f"pictures  {', '.join(str(picture) for picture in pictures)}",
        f'\nnext: hsa generate {model} --prompt "The"',
    ):
        console.print(Text(line), soft_wrap=True)  # paths stay whole, to be copied
