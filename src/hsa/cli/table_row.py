"""Read one row of a table for `hsa inspect`, with the columns that the user names or with all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput
from hsa.files import is_inside

if TYPE_CHECKING:
    from hsa.signals import Signal
    from hsa.signals.readers import Rows

Columns = Mapping[str, tuple[str, ...]]
"""Names of columns by kind: text, number, image."""


def read_table_row(rows: Rows, number: int, columns: Columns, tokenizer: Any, language: str) -> tuple[str, Signal]:
    """Return the name and the tree of a row, counted from 1; without columns, of all columns that can be read."""
    from hsa.signals.readers import read_row

    if not 1 <= number <= len(rows):
        raise InvalidInput("row", got=number, expected=f"1 to {len(rows):,}, the rows of {rows.file}")
    row, where, folder = rows.row(number - 1), rows.where(number - 1), Path(rows.file).parent
    if not any(columns.values()):
        columns = _guess_columns(row, folder, where)
    signal = read_row(
        row,
        text=columns["text"],
        number=columns["number"],
        image=columns["image"],
        tokenizer=tokenizer,
        language=language,
        folder=folder,
        where=where,
    )
    return f"{where} of {len(rows):,}", signal


def _guess_columns(row: Mapping[str, Any], folder: Path, where: str) -> Columns:
    """Return the columns of a row that hold a value, by kind; print the names of those that cannot be read."""
    columns: dict[str, tuple[str, ...]] = {"text": (), "number": (), "image": ()}
    left_out = []
    for name, value in row.items():
        if value is None or value != value:
            continue
        kind = _kind(value, folder)
        if kind is None:
            left_out.append(f"{name!r} ({type(value).__name__})")
        else:
            columns[kind] += (name,)
    if left_out:
        print(
            f"{where}: left out, because only text, numbers and images are read: {', '.join(left_out)}", file=sys.stderr
        )
    return columns


def _kind(value: Any, folder: Path) -> str | None:
    from hsa.signals.readers import SUFFIXES
    from hsa.signals.readers.json_document import finite

    if isinstance(value, bytes) or (isinstance(value, dict) and {"bytes", "path"} & value.keys()):
        return "image"
    if not isinstance(value, (str, bool, int, float)):
        return None
    try:
        finite(value, "cell")
    except InvalidInput:
        if isinstance(value, str) and SUFFIXES.get(Path(value).suffix.lower()) == "image":
            return "image" if is_inside(folder / value, folder) else "text"
        return "text"
    return "number"
