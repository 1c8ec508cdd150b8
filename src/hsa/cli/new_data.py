"""Data for `hsa predict` and `hsa evaluate`: tables, texts, files, and models that read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.cli.inspect import STDIN
from hsa.errors import InvalidInput
from hsa.table_format import TableFormat

if TYPE_CHECKING:
    from hsa.signals.readers import Rows
    from hsa.training.loaded_model import LoadedModel


def load_for_data(model: Path, text: tuple[str, ...] = (), label: str | None = None) -> LoadedModel:
    """Load a model; `text` and `label` name the columns of a classifier of transformers, which runs on a GPU if it can."""
    import torch

    from hsa.cli.runs import split_words
    from hsa.models.folders import model_folder
    from hsa.models.saved import is_transformers
    from hsa.training.load import load
    from hsa.training.text_classifier import LoadedTextClassifier

    folder = model_folder(model)
    loaded = load(folder, "cuda" if is_transformers(folder) and torch.cuda.is_available() else "cpu")
    if isinstance(loaded, LoadedTextClassifier):
        loaded.input = loaded.input.changed(text=split_words(text), label=label)
    return loaded


def refuse_options(kind: str, **options: Any) -> None:
    """Refuse options that a kind of model does not take."""
    for name, value in options.items():
        if value is not None and value is not False and value != ():  # 0 is a value
            got = ", ".join(value) if isinstance(value, tuple) else value
            raise InvalidInput(name, got=got, expected=f"no value for a {kind}", fix="Leave it out")


def reads_rows(loaded: LoadedModel) -> bool:
    """Return whether a model reads the rows of tables, rather than files."""
    return loaded.input_spec is None or loaded.input_spec.kind == "rows"


def open_data(loaded: LoadedModel, path: Path, table: TableFormat) -> Rows | Path:
    """Return the rows of a table for a model that reads rows; other paths as they are."""
    from hsa.signals.readers.rows import ROW_SUFFIXES, load_rows

    if reads_rows(loaded) and path.is_file() and path.suffix.lower() in ROW_SUFFIXES:
        return load_rows(path, delimiter=table.delimiter, encoding=table.encoding)
    table.refuse(str(path))
    return path


def open_argument(loaded: LoadedModel, data: str, table: TableFormat) -> str | Rows | Path:
    """Return a text, the rows of a table, or the path that an argument of the command line stands for.

    An argument with a space that names no file is a text, unless it ends as the name of a file does.
    """
    from hsa.signals.readers.files import SUFFIXES
    from hsa.signals.readers.rows import ROW_SUFFIXES
    from hsa.signals.readers.text import decode_file, load_bytes

    if data == STDIN:
        table.refuse("a text", "delimiter")
        return decode_file(sys.stdin.buffer.read(), table.encoding, STDIN)
    path = Path(data)
    if data and _exists(path):
        if path.suffix.lower() == ".txt" and path.is_file() and reads_rows(loaded):
            table.refuse("a text", "delimiter")
            return decode_file(load_bytes(path), table.encoding, data)
        return open_data(loaded, path, table)
    if len(data.split()) > 1 and path.suffix.lower() not in (*ROW_SUFFIXES, *SUFFIXES):
        table.refuse("a text")
        return data
    raise InvalidInput(
        data or "data",
        problem="no such file or folder" if data else "empty",
        expected="a file, a text of several words in quotes, or - for a text from stdin",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is too long for a path
        return False
