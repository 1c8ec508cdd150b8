"""Load tables from files, and read columns of a row as a signal."""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput, MissingExtra
from hsa.files import check_unpacked, file_inside, parse_json, unpack_gzip
from hsa.signals.readers.image import read_image
from hsa.signals.readers.json_document import finite
from hsa.signals.readers.outline import build_signal
from hsa.signals.readers.text import decode_file, load_bytes, paragraphs
from hsa.signals.signal import Leaf, Signal

_LONGEST_FIELD = 2**31 - 1  # the largest limit that csv accepts on every system
_BATCH = 1024  # rows of a Parquet file that are unpacked at a time
_NAME_COLUMNS = "Name the columns in the first line, each once"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}  # usual ones
_ALL_DELIMITERS = (",", ";", "\t", "|")
_SAMPLED = 100  # rows that decide on the delimiter


class Rows:
    """Rows of a file, by index, and columns, by name. Values of text files are strings.

    Args:
        file: Name of the file, for messages.
        columns: Values of each column, all of one length.
        lines: Line in which each row begins, counted from 1; None if unknown.

    Raises:
        InvalidInput: If there are no rows.

    >>> rows = Rows("cats.csv", {"name": ["Tom", "Kit"], "age": ["3", "5"]}, lines=[2, 3])
    >>> rows.columns, len(rows), rows.row(1), rows.column("age"), rows.where(1)
    (('name', 'age'), 2, {'name': 'Kit', 'age': '5'}, ['3', '5'], 'cats.csv: row 2 (line 3)')
    >>> [row["name"] for row in rows]
    ['Tom', 'Kit']
    """

    def __init__(self, file: str, columns: Mapping[str, Sequence[Any]], lines: Sequence[int] | None = None):
        self.file = file
        self.columns = tuple(columns)
        self._columns = dict(columns)
        self._lines = lines
        self._length = len(next(iter(columns.values()), ()))
        if not self._length:
            raise InvalidInput(file, problem="no rows", expected="at least one")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows, as `row` returns them."""
        return map(self.row, range(len(self)))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column; None stands for a missing value.

        Raises:
            InvalidInput: For an unknown column; the message lists the columns.
        """
        _check_column(name, self.columns, self.file)
        return list(self._columns[name])

    def row(self, index: int) -> dict[str, Any]:
        """Return the values of a row by column."""
        return {name: values[index] for name, values in self._columns.items()}

    def where(self, index: int) -> str:
        """Return the name of a row for messages: the file, and the row counted from 1."""
        line = "" if self._lines is None else f" (line {self._lines[index]})"
        return f"{self.file}: row {index + 1}{line}"


def load_rows(path: str | PathLike[str], *, delimiter: str | None = None, encoding: str = "utf-8") -> Rows:
    """Load the rows of a .csv, .tsv, .json, .jsonl, .ndjson or .parquet file; text formats may be compressed (.gz).

    CSV and TSV name their columns in the first line; JSON is a list of objects, JSONL an object per line. A value that a row
    does not have is None. Compressed files and Parquet may hold 2 GiB of data.

    Args:
        path: File to load.
        delimiter: Character between the fields of a .csv or .tsv file. By default, the usual one of the suffix, or else the
            one of comma, semicolon, tab and vertical bar that splits the first rows into equal numbers of fields.
        encoding: Encoding of a text format. A byte order mark is left out.

    Raises:
        InvalidInput: For an unknown format, a damaged file, too much compressed data, another encoding or delimiter, no
            rows, missing or repeated names in the first line, more fields than names, or invalid JSON; the message names
            file and line.
        MissingExtra: If `pyarrow` is not installed, for .parquet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "cats.csv")
    ...     _ = path.write_text('name,likes\\nTom,"fish,\\nmice"\\nKit,milk\\n')
    ...     rows = load_rows(path)
    >>> rows.row(1), rows.where(1).removeprefix(folder)
    ({'name': 'Kit', 'likes': 'milk'}, '/cats.csv: row 2 (line 4)')
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = suffixes[-1:] == [".gz"]
    suffix = "".join((suffixes[:-1] if compressed else suffixes)[-1:])
    if suffix == ".parquet" and not compressed:
        if encoding != "utf-8":
            raise InvalidInput(
                "encoding", got=f"{encoding} for {path}", expected="no value for a .parquet file", fix="Leave it out"
            )
        _refuse_delimiter(delimiter, str(path))
        return _parquet_rows(path)
    if suffix not in ROW_SUFFIXES or suffix in (".parquet", ".gz"):
        known = ", ".join(ROW_SUFFIXES[:-1])
        raise InvalidInput(str(path), got=f"the suffix {suffix!r}", expected=f"one of {known}, or .gz of a text format")
    data = load_bytes(path, expected="a readable file")
    text = decode_file(unpack_gzip(data, str(path)) if compressed else data, encoding, str(path))
    return parse_rows(text, suffix, str(path), delimiter)


def parse_rows(text: str, suffix: str, where: str, delimiter: str | None = None) -> Rows:
    """Parse the text of a .csv, .tsv, .json, .jsonl or .ndjson file. Raises as `load_rows` does.

    >>> parse_rows('{"name": "Tom"}', ".jsonl", "cats.jsonl").columns
    ('name',)
    >>> parse_rows("name;weight\\nTom;3,5", ".csv", "cats.csv").row(0)
    {'name': 'Tom', 'weight': '3,5'}
    """
    if not text.strip():
        raise InvalidInput(where, got="an empty file", expected="rows")
    if suffix in _DELIMITERS:
        usual = _DELIMITERS[suffix]
        used = _choose_delimiter(text, usual, where) if delimiter is None else _check_delimiter(delimiter)
        return _separated_rows(text, where, used)
    _refuse_delimiter(delimiter, where)
    return _JSON_READERS[suffix](text, where)


def read_row(
    row: Mapping[str, Any],
    *,
    text: Iterable[str] = (),
    number: Iterable[str] = (),
    image: Iterable[str] = (),
    tokenizer: Any = None,
    language: str = "en",
    folder: str | PathLike[str] | None = None,
    image_reader: Callable[..., Signal | Leaf] = read_image,
    where: str = "row",
) -> Signal:
    """Read columns of a row as a `Table`: texts as in `read_text`, numbers as floats, images as patches.

    Missing texts and images (None, NaN, empty strings) are left out; missing numbers raise. If there is one column of
    text and no other, the result is the signal of that text.

    Args:
        row: Values by column.
        text, number, image: Names of the columns of each kind, in the order for the table.
        tokenizer, language: As in `read_text`.
        folder: Folder of the images that strings name, the working directory by default; nothing outside it is opened. An
            image may also be a `pathlib.Path`, which is opened wherever it lies, its bytes, or a dictionary with "bytes"
            and "path", as in the data sets of Hugging Face.
        image_reader: Function of an image and `where` that reads it, such as `functools.partial(read_image, patch=8)`.
        where: Name of the row in error messages, such as `rows.where(i)`.

    Raises:
        InvalidInput: For an unknown column, a value of the wrong kind, an image that cannot be read, or a row without
            values; the message names row and column.

    >>> row = {"title": "Two cats", "price": "3.50", "review": None}
    >>> print(read_row(row, text=["title", "review"], number=["price"]).show())
    Table('title', 'price') · 3 leaves · text, number
    ├─ .title Sequence(1) · 2 leaves · text
    │  └─ [0] Sequence(1) · 2 leaves · text
    │     └─ [0] Sequence(2) · 2 leaves · text · 'Two' 'cats'
    └─ .price number · 3.5
    """

    def read_picture(value: Any, cell: str) -> Signal | Leaf:
        if isinstance(value, dict):
            value = value["path"] if value.get("bytes") is None else value["bytes"]
        if isinstance(value, (str, PathLike)):
            cell = f"{cell} ({value})"
        root = Path(folder or "")
        if isinstance(value, str):  # may come from a file of unknown origin
            value = file_inside(root, value, cell, expected=f"an image in {root.absolute()}")
        return image_reader(root / value if isinstance(value, PathLike) else value, where=cell)

    kinds: tuple[tuple[str, Iterable[str], Callable[[Any, str], Any]], ...] = (
        ("text", text, lambda value, cell: paragraphs(_as_text(value, cell), language, where=cell)),
        ("number", number, _number),
        ("image", image, read_picture),
    )
    outline: dict[str, Any] = {}
    kind_of: list[str] = []
    for kind, names, read in kinds:
        if isinstance(names, str):
            raise InvalidInput(kind, got=repr(names), expected="a list of columns", fix=f"Write {kind}=[{names!r}]")
        for name in names:
            _check_column(name, row, where)
            if name in outline:
                raise InvalidInput(where, got=f"the column {name!r} twice", expected="each column once")
            kind_of.append(kind)
            is_left_out = kind != "number" and _is_missing(row[name])
            outline[name] = [] if is_left_out else read(row[name], f"{where}, column {name!r}")
    if not outline:
        raise InvalidInput("columns", problem="none given", expected="at least one of text, number or image")
    only_text = kind_of == ["text"]
    return build_signal(
        next(iter(outline.values())) if only_text else outline,
        tokenizer,
        where=where,
        problem="no values",
        expected=f"at least one in {_listed(outline)}",
    )


def _separated_rows(text: str, file: str, delimiter: str) -> Rows:
    records = _records(text, delimiter, file)
    _, header = next(records)
    names = _column_names(header, file)
    columns: list[list[str | None]] = [[] for _ in names]
    lines: list[int] = []
    for line, fields in records:
        if len(fields) > len(names):
            raise InvalidInput(
                f"{file}: row {len(lines) + 1} (line {line})",
                got=f"{len(fields)} fields",
                expected=f"at most {len(names)}, one for each of {_listed(names)}",
                fix="Put quotes around a field with a delimiter in it",
            )
        lines.append(line)
        for column, field in zip(columns, [*fields, *[None] * (len(names) - len(fields))], strict=True):
            column.append(field)
    return Rows(file, dict(zip(names, columns, strict=True)), lines)


def _choose_delimiter(text: str, usual: str, file: str) -> str:
    """Return the usual delimiter, or else the one that splits the header and the first rows into equally many fields.

    Raises:
        InvalidInput: For a single column whose name has a delimiter in it, or if two unusual delimiters fit.
    """
    candidates = (usual, *(d for d in _ALL_DELIMITERS if d != usual))
    fitting = [d for d in candidates if _fits(text, d, file)]
    if usual in fitting:
        return usual
    if len(fitting) == 1:
        return fitting[0]
    _, header = next(_records(text, usual, file))
    inside = fitting or [d for d in candidates if d in header[0]]
    if len(header) == 1 and inside:
        raise InvalidInput(
            f"{file}: line 1",
            got=f"the single column {header[0]!r}",
            expected="names of columns with a delimiter between them",
            fix=f"Pass --delimiter {inside[0]!r}, or --delimiter {usual!r} if it is a single column",
        )
    return usual


def _fits(text: str, delimiter: str, file: str) -> bool:
    """Return whether a delimiter splits the header and the first rows into equally many fields, at least two."""
    try:
        widths = {len(fields) for _, fields in islice(_records(text, delimiter, file), _SAMPLED)}
    except InvalidInput:
        return False
    return len(widths) == 1 and widths.pop() > 1


def _check_delimiter(delimiter: str) -> str:
    """Return the delimiter; shells cannot pass a tab easily, so that it may also be written as tab or \\t."""
    character = "\t" if delimiter in ("tab", "\\t") else delimiter
    if len(character) != 1 or character in '"\r\n':
        raise InvalidInput("delimiter", got=repr(delimiter), expected="one character, such as ';', or tab")
    return character


def _refuse_delimiter(delimiter: str | None, file: str) -> None:
    if delimiter is not None:
        raise InvalidInput(
            "delimiter",
            got=f"{delimiter!r} for {file}",
            expected="no value except for .csv and .tsv",
            fix="Leave it out",
        )


def _records(text: str, delimiter: str, file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank, with the lines they begin in."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(_LONGEST_FIELD)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInput(
            f"{file}: line {line}",
            got=f"a row that cannot be read ({error})",
            expected="fields in quotes that are closed",
            fix="Double the quotes inside a quoted field",
        ) from None
    finally:
        csv.field_size_limit(limit)


def _column_names(header: list[str], file: str) -> list[str]:
    """Return the header, with a made-up name for a column without one, such as the row numbers that pandas writes."""
    where = f"{file}: line 1"
    decimal = next((name for name in header if _is_decimal(name)), None)
    if decimal is not None or not any(name.strip() for name in header):
        problem = "no names of columns" if decimal is None else f"{decimal!r} is a number"
        raise InvalidInput(where, problem=problem, expected="the names of the columns", fix=_NAME_COLUMNS)
    names = [name.strip() or f"column {number}" for number, name in enumerate(header, 1)]
    _check_distinct(names, where, _NAME_COLUMNS)
    return names


def _is_decimal(name: str) -> bool:
    """Return whether a name is a fraction; integers such as years are names in many tables."""
    try:
        return not float(name).is_integer() and math.isfinite(float(name))
    except ValueError:
        return False


def _json_rows(text: str, file: str) -> Rows:
    document = parse_json(text, file)
    if not isinstance(document, list):
        raise InvalidInput(file, got=f"a JSON {type(document).__name__}", expected="a list of objects")
    return _object_rows(document, file, None)


def _json_lines_rows(text: str, file: str) -> Rows:
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return _object_rows([parse_json(line, file, i) for i, line in numbered], file, [i for i, _ in numbered])


def _object_rows(objects: list[Any], file: str, lines: list[int] | None) -> Rows:
    for index, value in enumerate(objects):
        if not isinstance(value, dict):
            line = "" if lines is None else f" (line {lines[index]})"
            got = f"a JSON {type(value).__name__}"
            raise InvalidInput(f"{file}: row {index + 1}{line}", got=got, expected="an object")
    names = dict.fromkeys(name for value in objects for name in value)
    return Rows(file, {name: [value.get(name) for value in objects] for name in names}, lines)


def _parquet_rows(path: str | PathLike[str]) -> Rows:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("pyarrow", "readers", "reading Parquet") from None

    data = load_bytes(path, expected="a readable file")
    batches: list[Any] = []
    size = 0
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        for batch in file.iter_batches(_BATCH):  # not at once: a few bytes can stand for billions of equal values
            columns = (c.indices if pyarrow.types.is_dictionary(c.type) else c for c in batch.columns)
            size += sum(column.nbytes for column in columns)
            check_unpacked(size, str(path))
            batches.append(batch)
        table = pyarrow.Table.from_batches(batches, file.schema_arrow)
        table.validate(full=True)  # else text that is not UTF-8 shows when it is read
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), got=f"damaged data ({error})", expected="a Parquet file") from None
    _check_distinct(names, str(path), "Rename one of them")
    return Rows(str(path), {name: _ArrowColumn(table.column(i)) for i, name in enumerate(names)})


class _ArrowColumn(Sequence):
    """Column of an Arrow table; values become Python objects on access."""

    def __init__(self, values: Any):
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        value = self._values[index]
        try:
            return value.as_py()
        except (
            ValueError,
            OverflowError,
        ):  # a time that Python cannot represent, in a column that may not even be read
            return f"{value.type} {value.value}"

    def __iter__(self) -> Iterator[Any]:
        try:
            return iter(self._values.to_pylist())
        except (ValueError, OverflowError):
            return map(self.__getitem__, range(len(self)))


_JSON_READERS: dict[str, Callable[[str, str], Rows]] = {
    ".json": _json_rows,
    ".jsonl": _json_lines_rows,
    ".ndjson": _json_lines_rows,
}
ROW_SUFFIXES = (*_DELIMITERS, *_JSON_READERS, ".parquet", ".gz")
"""Suffixes of files of rows."""


def _check_column(name: str, columns: Iterable[str], where: str) -> None:
    if name not in columns:
        close = difflib.get_close_matches(name, columns, 1, cutoff=0.5)
        fix = f"Did you mean {close[0]!r}?" if close else None
        raise InvalidInput(where, problem=f"no column {name!r}", expected=f"one of {_listed(columns)}", fix=fix)


def _check_distinct(names: list[str], where: str, fix: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidInput(where, got=f"the column {name!r} {count} times", expected="distinct names", fix=fix)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _is_missing(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("bytes") is None and value.get("path") is None
    return (
        value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value)
    )


def _number(value: Any, where: str) -> Leaf:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InvalidInput(
            where, got="an empty cell", expected="a finite number", fix="Fill it in, or leave out the row"
        )
    return Leaf(finite(value, where), "number")


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, (str, bool, int, float)):
        raise InvalidInput(where, got=f"a {type(value).__name__}", expected="text")
    return str(value)
