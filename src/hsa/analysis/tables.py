"""Tables for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

_NAME = 18
"""Width at which long names in the first column are folded."""
_BETWEEN = 2
"""Spaces between columns."""


@dataclass(frozen=True)
class TerminalTable:
    """Table that fits the width of the terminal: it folds headers and words, then leaves out columns.

    The first column is left-aligned, the others right-aligned. Numbers are never cut.

    Attributes:
        header, rows: Cells.
        caption: Text below the table.
        optional: Columns to leave out if the table is too wide, the least important first. The report has them.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self._fitted(options.max_width)

    @property
    def narrowest(self) -> int:
        """Width of the table after everything is folded and left out."""
        return _width(self._columns(width=0))

    def _columns(self, width: int) -> list[list[str]]:
        """Return the cells of each column, the header first, of the columns that fit."""
        columns = [list(cells) for cells in zip(self.header, *self.rows, strict=True)]
        if _width(columns) <= width:
            return columns
        columns = [[_folded(cell, i == 0) for cell in column] for i, column in enumerate(columns)]
        kept = dict(zip(self.header, columns, strict=True))
        for name in self.optional:
            if _width(kept.values()) > width:
                kept.pop(name, None)
        return list(kept.values())

    def _fitted(self, width: int) -> Table:
        from rich import box
        from rich.table import Table

        columns = self._columns(width)
        shown = {" ".join(column[0].split()) for column in columns}
        left_out = ", ".join(name for name in self.header if name not in shown)
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            caption=f"{self.caption}; in the report: {left_out}" if left_out else self.caption or None,
            caption_justify="left",
        )
        for i, (name, *_) in enumerate(columns):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for row in zip(*(column[1:] for column in columns), strict=True):
            table.add_row(*row)
        return table


def _folded(cell: str, is_name: bool) -> str:
    """Break a cell into lines: a name where it is long, other words at every space, a number before its deviation.

    >>> _folded("TF-IDF + logistic regression", True), _folded("train s", False), _folded("0.85 ± 0.05", False)
    ('TF-IDF + logistic\\nregression', 'train\\ns', '0.85\\n± 0.05')
    """
    if is_name:
        return fill(cell, _NAME, break_long_words=False, break_on_hyphens=False)
    return cell.replace(" ±", "\n±") if any(map(str.isdigit, cell)) else cell.replace(" ", "\n")


def _width(columns: Iterable[Sequence[str]]) -> int:
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return sum(widths) + _BETWEEN * (len(widths) - 1)


def terminal_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, optional: Sequence[str] = ()
) -> TerminalTable:
    """Return a table for the terminal, see `TerminalTable`."""
    return TerminalTable(header, rows, caption or "", optional)


def print_table(console: Console, table: TerminalTable) -> None:
    """Print a table, even wider than the console if it does not fit: truncated numbers would mislead."""
    before = console.width
    console.width = max(before, table.narrowest)
    console.print(table)
    console.width = before


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> markdown_table(["a", "b"], [["1", "2"]])
    ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body]
