"""Progress of long work: a bar on a screen, a line per stage in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

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
