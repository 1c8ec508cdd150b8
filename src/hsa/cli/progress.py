"""Progress of long work: a bar on a screen, a line per stage in a log; and its results, and where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Watch = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


class Bars:
    """One bar per kind of work, in the order they begin."""

    def __init__(self, console: Console):
        self.console = console

    def say(self, message: str) -> None:
        from rich.text import Text

        self.console.print(Text(f"{message} …", style="dim"), soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[Watch]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        screen = self.console.is_terminal
        tasks: dict[str, Any] = {}
        with Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not screen,
        ) as progress:

            def watch(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=total)
                    if not screen:
                        self.say(what)
                progress.update(tasks[what], completed=done, total=total)

            yield watch

    @staticmethod
    def counter(watch: Watch, what: str, total: int) -> Callable[[int], None]:
        """Told how many more are done."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            watch(what, done, total)

        return count


class TrainingBar:
    """A bar for one model that is trained. `score` names what validation measures; None: its loss."""

    def __init__(self, name: str, score: str | None, console: Console):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.name, self.score, self.console = name, score, console
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

    def epoch(self, record: Any) -> None:
        """After an epoch of a classifier, a regressor or an encoder–decoder."""
        self._validated(f"epoch {record.epoch}: {self.score} {record.validation:.3f}", record)

    def evaluated(self, record: Any) -> None:
        """After some steps of a language model."""
        self._validated(f"step {record.step:,}: validation {record.validation_loss:.3f}", record)

    def _validated(self, text: str, record: Any) -> None:
        self.validation = text
        if not self.console.is_terminal:  # a log, not a screen
            self.console.print(
                f"{self.name:<14}  loss {record.loss:.3f}  {text}  {record.seconds:.1f} s", highlight=False
            )

    def done(self) -> None:
        self.progress.stop()


def say_results(console: Console, table: Table, lines: Iterable[str], *, soft_wrap: bool = False) -> None:
    """The table of what was trained, and what there is to say of it."""
    from rich.text import Text

    from hsa.analysis.tables import print_table

    console.print()
    print_table(console, table)
    console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=soft_wrap)


def say_where(
    console: Console, model: Path | None, report: Path, pictures: Iterable[Path] = (), following: str = ""
) -> None:
    """Where the results are, of a training with its model, and what to do next."""
    from rich.text import Text

    lines = ["", *([] if model is None else [f"model     {model}"]), f"report    {report}"]
    if shown := ", ".join(map(str, pictures)):
        lines.append(f"pictures  {shown}")
    if following:
        lines.append(f"\nnext: {following}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)  # paths stay whole, to be copied


def one_process(task: str, fsdp: bool) -> None:
    """Refuses what `task` cannot do yet."""
    if fsdp or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput(
            "task", given=f"{task} in several processes", expected="one process", fix="start plain hsa train"
        )
