"""Read the inputs of a prediction (texts, rows, files) exactly as the data of the training were read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput
from hsa.signals.readers.files import SUFFIXES, read_file
from hsa.signals.readers.python_source import read_python
from hsa.signals.readers.rows import ROW_SUFFIXES, Rows
from hsa.signals.readers.text import read_text
from hsa.signals.signal import Leaf, Signal
from hsa.training.data.data_set import Example
from hsa.training.data.prepare import InputSpec
from hsa.training.data.sources import Files, ImageReader, OnBad

Input = str | Mapping[str, Any] | Path
"""A text; a row, as a dictionary of columns; a file."""
Inputs = Input | Rows | Iterable[Input]
"""One input or several. A path may also name a file of rows or a folder of files, which are several inputs."""


def raise_error(error: InvalidInput) -> None:
    """Raise the error: the `on_bad` that allows no bad input."""
    raise error


def is_single(spec: InputSpec, inputs: Inputs) -> bool:
    """Return whether `inputs` is one input, which gives one result, rather than several, which give a list."""
    if isinstance(inputs, Path):
        return spec.kind != "rows" and inputs.is_file()
    return isinstance(inputs, (str, Mapping))


def read_inputs(spec: InputSpec, inputs: Inputs, on_bad: OnBad) -> Iterator[Example]:
    """Yield an example per input, in order; `on_bad` is called with the error of each that cannot be read.

    Args:
        spec: How the model reads data.
        inputs: For a model trained on rows: texts (if it reads one column of text and nothing else), rows, or the path of
            a file of rows, or the rows that `load_rows` returns. For a model trained on files: texts, paths of files, or
            the path of a folder.

    Raises:
        InvalidInput: For inputs of the wrong type, and for files that do not exist.
    """
    if isinstance(inputs, Path) and spec.kind != "rows":
        return spec.cut(_of_files(spec, inputs, on_bad), on_bad)
    if isinstance(inputs, (Path, Rows)) and spec.kind == "rows":
        if isinstance(inputs, Path):
            check_rows_file(inputs)
        return spec.examples(spec.source(inputs, labelled=False), on_bad)
    return spec.cut(_of_values(spec, values_of(inputs, _expected(spec)), on_bad), on_bad)


def check_rows_file(path: Path) -> None:
    """Raise an error for a folder, and for a file that is no file of rows."""
    if path.exists() and (path.is_dir() or path.suffix.lower() not in ROW_SUFFIXES):
        got = "a folder" if path.is_dir() else f"a {path.suffix or 'nameless'} file"
        expected = f"a file of rows, which the model was trained on: one of {', '.join(ROW_SUFFIXES)}"
        raise InvalidInput(str(path), got=got, expected=expected)


def values_of(inputs: Inputs, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every input that is no path.

    Args:
        inputs: A text, a row, the rows of a file, or an iterable of texts and rows.
        expected: Description of one input, for errors.
    """
    if isinstance(inputs, (str, Mapping)):
        _check_not_a_path(inputs)
        return iter([("input", inputs)])
    if isinstance(inputs, Rows):
        return ((inputs.where(i), row) for i, row in enumerate(inputs))
    _check_several(inputs, expected)
    assert not isinstance(inputs, Path)
    return ((f"inputs[{i}]", value) for i, value in enumerate(inputs))


def _of_files(spec: InputSpec, path: Path, on_bad: OnBad) -> Iterator[Example]:
    if not path.exists():
        raise InvalidInput(str(path), problem="no such file or folder", expected="a file, or a folder of files")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        raise InvalidInput(str(path), problem="no files to read", expected=f"some of {', '.join(sorted(SUFFIXES))}")
    source = Files([("", file) for file in files], spec.columns.language, spec.image_reader())
    return source.examples(spec.tokenizer, on_bad)


def _of_values(spec: InputSpec, values: Iterable[tuple[str, Any]], on_bad: OnBad) -> Iterator[Example]:
    image_reader = spec.image_reader()
    read = _read_row if spec.kind == "rows" else _read_document
    for where, value in values:
        try:
            signal = read(spec, value, where, image_reader)
        except InvalidInput as error:
            on_bad(error)
            continue
        yield Example(signal, "", where)


def _read_row(spec: InputSpec, value: Any, where: str, image_reader: ImageReader) -> Signal:
    columns = spec.columns
    if isinstance(value, str) and _reads_text_only(spec):
        _check_text(value, where)
        value = {columns.text[0]: value}
    if not isinstance(value, Mapping):
        raise InvalidInput(where, got=_kind_of_value(value), expected=_expected(spec))
    missing = [name for name in columns.read if name not in value]
    if missing:
        raise InvalidInput(
            where,
            problem=f"no column {missing[0]!r}",
            expected=f"a row with the columns {', '.join(columns.read)}",
            fix=None if missing[0] in columns.number else "Pass None for a value that is missing",
        )
    return columns.read_row(value, spec.tokenizer, folder=None, image_reader=image_reader, where=where)


def _read_document(spec: InputSpec, value: Any, where: str, image_reader: ImageReader) -> Signal | Leaf:
    """Read a file, or a text as a file of that text would be read."""
    if isinstance(value, Path):
        if not value.is_file():
            problem = "a folder in a list" if value.is_dir() else "no such file"
            raise InvalidInput(f"{where} ({value})", problem=problem, expected="a file")
        return read_file(value, spec.tokenizer, spec.columns.language, image_reader=image_reader)
    if not isinstance(value, str) or spec.kind == "news":
        raise InvalidInput(where, got=_kind_of_value(value), expected=_expected(spec))
    _check_text(value, where)
    if spec.kind == "python":
        return read_python(value, spec.tokenizer, where=where)
    return read_text(value, spec.tokenizer, spec.columns.language, where=where)


def _reads_text_only(spec: InputSpec) -> bool:
    return len(spec.columns.text) == 1 and spec.columns.read == spec.columns.text


def _expected(spec: InputSpec) -> str:
    """Return the name of what the model reads."""
    if spec.kind == "news":
        return "the path of a file"
    if spec.kind != "rows":
        return "a text or the path of a file" if spec.kind == "folders" else "Python source or the path of a file"
    if _reads_text_only(spec):
        return f"a text, or a row with the column {spec.columns.text[0]}"
    return f"rows with the columns {', '.join(spec.columns.read)}"


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise InvalidInput(where, got="an empty text", expected="a text with at least one word")


def _check_not_a_path(value: str | Mapping[str, Any]) -> None:
    """Raise for a string that names a file: it would be read as a text of one word."""
    if isinstance(value, str) and value.lower().endswith((*ROW_SUFFIXES, *SUFFIXES)) and os.path.isfile(value):
        fix = f"Pass pathlib.Path({value!r}) to read the file, or [{value!r}] to read this text"
        raise InvalidInput("input", got="the name of a file", expected="a text", fix=fix)


def _check_several(inputs: Any, expected: str) -> None:
    """Raise unless the inputs are a list or another iterable of inputs."""
    is_frame = hasattr(inputs, "to_dict") and hasattr(inputs, "columns")  # iterating over it gives names of columns
    if is_frame or isinstance(inputs, bytes) or not isinstance(inputs, Iterable):
        fix = "Pass a data frame as frame.to_dict('records')" if is_frame else None
        raise InvalidInput("inputs", got=_kind_of_value(inputs), expected=f"{expected}, or a list of them", fix=fix)


def _kind_of_value(value: Any) -> str:
    if value is None:
        return "None"
    for kind, name in ((str, "a text"), (Mapping, "a row"), (Path, "a path")):
        if isinstance(value, kind):
            return name
    return f"a value of type {type(value).__name__}"
