"""Output of long commands: progress bars on a terminal or lines in a log, then results and their paths."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.analysis.tables import TerminalTable

Watch = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and its total."""


class Bars:
    """A progress bar per stage on a terminal, or a line per stage in a log."""

    def __init__(self, console: Console):
        self.console = console

    def say(self, message: str) -> None:
        """Print a message about what begins now."""
        from rich.text import Text

        self.console.print(Text(f"{message} …", style="dim"), soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Show bars while the context is open; yield the function that updates them."""
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

            def watch(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = progress.add_task(stage, total=total)
                    if not screen:
                        self.say(stage)
                progress.update(tasks[stage], completed=done, total=total)

            yield watch

    @staticmethod
    def counter(watch: Watch, stage: str, total: int) -> Callable[[int], None]:
        """Return a function that adds to the amount done of a stage."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            watch(stage, done, total)

        return count


class TrainingBar:
    """Progress bar of one model in training. `score` is the name of the validation score; None for its loss."""

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
        """Show the progress after a step."""
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task(self.name, total=total, note="")
        if loss is not None:
            self.loss = f"loss {loss:.3f}"
        self.progress.update(self.task, completed=done, note="  ".join(filter(None, [self.loss, self.validation])))

    def epoch(self, record: Any) -> None:
        """Show the validation after an epoch of a classifier, a regressor or an encoder–decoder."""
        self._validated(f"epoch {record.epoch}: {self.score} {record.validation:.3f}", record)

    def evaluated(self, record: Any) -> None:
        """Show the validation after some steps of a language model."""
        self._validated(f"step {record.step:,}: validation {record.validation_loss:.3f}", record)

    def _validated(self, text: str, record: Any) -> None:
        self.validation = text
        if not self.console.is_terminal:  # a log, not a screen
            self.console.print(
                f"{self.name:<14}  loss {record.loss:.3f}  {text}  {record.seconds:.1f} s", highlight=False
            )

    def done(self) -> None:
        """Remove the bar."""
        self.progress.stop()


def print_results(console: Console, table: TerminalTable, lines: Iterable[str], *, soft_wrap: bool = False) -> None:
    """Print the table of results, and lines of text below it."""
    from rich.text import Text

    from hsa.analysis.tables import print_table

    console.print()
    print_table(console, table)
    console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=soft_wrap)


def print_paths(
    console: Console, model: Path | None, report: Path, pictures: Iterable[Path] = (), following: Iterable[object] = ()
) -> None:
    """Print the paths of the results and the command to run next, given by its words."""
    from rich.text import Text

    lines = ["", *([] if model is None else [f"model     {model}"]), f"report    {report}"]
    if shown := ", ".join(map(str, pictures)):
        lines.append(f"pictures  {shown}")
    if command := shlex.join(map(str, following)):
        lines.append(f"\nnext: {command}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)  # paths stay whole, to be copied


def skipped_line(skipped: Sequence[object]) -> str:
    """Return a line about rows and files that could not be read."""
    return f"{len(skipped):,} skipped, the first: {skipped[0]}"


def refuse_several_processes(task: str, fsdp: bool) -> None:
    """Refuse several processes, which `task` does not support."""
    if fsdp or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput(
            "task",
            got=f"{task} in several processes",
            expected="one process",
            fix="Run hsa train without a launcher and without --fsdp",
        )
