"""Read one row of a table for `hsa inspect` as training reads it, with the columns that the user names or with all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput
from hsa.files import is_inside

if TYPE_CHECKING:
    from hsa.signals import Leaf, Signal
    from hsa.signals.readers import Rows

Columns = Mapping[str, tuple[str, ...]]
"""Names of columns by kind: text, number, image."""


def read_table_row(
    rows: Rows, number: int, columns: Columns, tokenizer: Any, language: str, *, skip_bad: bool = False
) -> tuple[str, Signal]:
    """Return the name and the tree of a row, or of the next one that can be read if bad ones are skipped.

    Args:
        rows: Table.
        number: Number of the row, counted from 1.
        columns: Columns to read; without any, all that can be read.
        tokenizer: Path of a tokenizer; by default one is trained on all texts of the columns, as `hsa train` does.
        language: Language of the texts.
        skip_bad: Whether to skip rows that cannot be read; a line on stderr counts them.
    """
    from hsa.cli.evaluate import collect_errors
    from hsa.cli.progress import skipped_line
    from hsa.signals.readers import read_row

    if not 1 <= number <= len(rows):
        raise InvalidInput("row", got=number, expected=f"1 to {len(rows):,}, the rows of {rows.file}")
    for name in (name for names in columns.values() for name in names):
        rows.column(name)  # raises an error that lists the existing columns
    folder = Path(rows.file).parent
    own_tokenizer = cache(lambda names: _train_tokenizer(rows, names))
    skipped: list[InvalidInput] = []
    on_bad = collect_errors(skipped, skip_bad)
    for index in range(number - 1, len(rows)):
        row, where = rows.row(index), rows.where(index)
        chosen = columns if any(columns.values()) else _guess_columns(row, folder, where)
        try:
            signal = read_row(
                row,
                text=chosen["text"],
                number=chosen["number"],
                image=chosen["image"],
                tokenizer=own_tokenizer(chosen["text"]) if tokenizer is None else tokenizer,
                language=language,
                folder=folder,
                where=where,
            )
        except InvalidInput as error:
            on_bad(error)
            continue
        if skipped:
            print(skipped_line(skipped), file=sys.stderr)
        return f"{where} of {len(rows):,}", signal
    raise InvalidInput(
        rows.file, problem=f"no row from row {number} on can be read", expected=f"another one than {skipped[0]}"
    )


def cut(signal: Signal | Leaf, max_tokens: int, max_family: int, *, where: str) -> Signal | Leaf:
    """Return the signal with at most `max_tokens` leaves and with sequences in windows of `max_family`, as in training."""
    from hsa.training.data.data_set import Example
    from hsa.training.data.prepare import InputSpec
    from hsa.training.data.sources import Columns as Roles
    from hsa.training.raw_inputs import raise_error

    spec = InputSpec("rows", Roles(), max_tokens, max_family)
    (example,) = spec.cut([Example(signal, "", where)], raise_error)
    return example.signal


class _TokenTexts:
    """Tokenizer that returns the texts of tokens in place of their ids, for people to read."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the part of the text that each token stands for."""
        offsets = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).offsets
        return [text[begin:end] or " " for begin, end in offsets]


def _train_tokenizer(rows: Rows, names: tuple[str, ...]) -> _TokenTexts | None:
    """Train a tokenizer on columns of texts with the defaults of `hsa train`; None without texts."""
    from hsa.signals import train_tokenizer
    from hsa.training.options import DataOptions

    texts = [str(value) for name in names for value in rows.column(name) if value is not None]
    return _TokenTexts(train_tokenizer(texts, DataOptions.vocabulary)) if texts else None


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
