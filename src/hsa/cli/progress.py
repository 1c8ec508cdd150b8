"""Output of long commands: progress bars on a terminal or lines in a log, then results and their paths."""

from __future__ import annotations

import os
import shlex
import time
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
LINE_EVERY = 30.0
"""Seconds between the lines of progress in a log."""


class Pace:
    """Pace of a stage: the share that is done, and the time that the rest will take.

    Args:
        start: Share that was done before, above 0 if the stage is resumed; None if the first step will tell.
    """

    def __init__(self, start: float | None = None):
        self.began = time.monotonic()
        self.start = start
        self.share = start or 0.0

    def elapsed(self) -> float:
        """Return the seconds since the stage began."""
        return time.monotonic() - self.began

    def whole(self) -> float | None:
        """Return an estimate of the seconds of the whole stage; None if nothing was done yet."""
        if self.start is None or self.share <= self.start:
            return None
        return self.elapsed() / (self.share - self.start)

    def left(self) -> float | None:
        """Return an estimate of the seconds left; None if it is unknown."""
        whole = self.whole()
        return None if whole is None else whole * (1 - self.share)


class Log:
    """Lines of progress where output is not a terminal, such as a file or the log of a batch job."""

    def __init__(self, console: Console):
        self.console = console
        self.last = time.monotonic()

    def line(self, text: str) -> None:
        """Print a line in a log; do nothing on a terminal."""
        from rich.text import Text

        if not self.console.is_terminal:
            self.console.print(Text(text), soft_wrap=True)
            self.last = time.monotonic()

    def progress(self, text: str) -> None:
        """Print a line if the last one is `LINE_EVERY` seconds old."""
        if time.monotonic() - self.last >= LINE_EVERY:
            self.line(text)


def format_time(seconds: float) -> str:
    """Return a duration with its unit.

    >>> format_time(40.0), format_time(300.0), format_time(7900.0)
    ('40 s', '5 min', '2.2 h')
    """
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_time_left(seconds: float | None) -> str:
    """Return the time left for a progress line; an empty string if it is unknown.

    >>> format_time_left(40.0), format_time_left(None)
    (', 40 s left', '')
    """
    return "" if seconds is None else f", {format_time(seconds)} left"


class Bars:
    """A progress bar per stage on a terminal; in a log, lines at the start and end of a stage and every half minute."""

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

        screen, log = self.console.is_terminal, Log(self.console)
        tasks: dict[str, Any] = {}
        paces: dict[str, Pace] = {}
        ended: set[str] = set()
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
                    paces[stage] = Pace(done / max(1, total))
                    if not screen and done < total:
                        self.say(stage)
                progress.update(tasks[stage], completed=done, total=total)
                pace = paces[stage]
                pace.share = done / max(1, total)
                if done == total and stage not in ended:
                    ended.add(stage)
                    log.line(f"{stage}: {done:,} of {total:,} in {format_time(pace.elapsed())}")
                else:
                    log.progress(f"{stage}: {done:,} of {total:,}{format_time_left(pace.left())}")

            yield watch

    @staticmethod
    def counter(watch: Watch, stage: str, total: int) -> Callable[[int], None]:
        """Begin a stage; return a function that adds to the amount done of it."""
        done = 0
        watch(stage, done, total)

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
        self.log, self.pace, self.position = Log(console), Pace(), ""
        self.loss = self.validation = ""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        """Show the progress after a step."""
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task(self.name, total=total, note="")
            self.pace.start = (done - 1) / total
        if loss is not None:
            self.loss = f"loss {loss:.3f}"
        note = "  ".join(filter(None, [self.loss, self.validation]))
        self.progress.update(self.task, completed=done, note=note)
        self.pace.share = done / total
        self.position = f"  (step {done:,} of {total:,}{format_time_left(self.pace.left())})"
        self.log.progress(f"{self.name:<14}  {note}{self.position}")

    def epoch(self, record: Any) -> None:
        """Show the validation after an epoch of a classifier, a regressor or an encoder–decoder."""
        self._validated(f"epoch {record.epoch}: {self.score} {record.validation:.3f}", record)

    def evaluated(self, record: Any) -> None:
        """Show the validation after some steps of a language model."""
        self._validated(f"step {record.step:,}: validation {record.validation_loss:.3f}", record)

    def _validated(self, text: str, record: Any) -> None:
        self.validation = text
        self.log.line(f"{self.name:<14}  loss {record.loss:.3f}  {text}  {record.seconds:.1f} s{self.position}")

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
