"""Tables for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def terminal_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """Return a table with the first column left-aligned, the others right-aligned, and no wrapped cells."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=caption,
        caption_justify="left",
    )
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table in full width, even on a narrow console: truncated numbers would mislead."""
    before = console.width
    console.width = max(before, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    console.width = before


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> markdown_table(["a", "b"], [["1", "2"]])
    ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body]
