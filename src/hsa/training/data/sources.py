"""Sources of examples: rows of a file, a folder per class, N24News, or the Python standard library.

A source yields its examples twice: as texts, to train a tokenizer, and as signals read with that tokenizer.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from hsa.errors import InvalidInput
from hsa.files import is_inside
from hsa.signals.batch import collate
from hsa.signals.readers.files import SUFFIXES, read_file, text_of
from hsa.signals.readers.image import read_image
from hsa.signals.readers.json_document import finite
from hsa.signals.readers.python_source import definitions, read_python
from hsa.signals.readers.rows import Rows as LoadedRows
from hsa.signals.readers.rows import read_row
from hsa.signals.readers.text import load_text
from hsa.signals.signal import Leaf, Signal
from hsa.training.data.data_set import Example
from hsa.training.data.n24news import read_n24news

ImageReader = Callable[..., Signal | Leaf]
OnBad = Callable[[InvalidInput], None]
"""Callback for a row or file that cannot be read: raises the error, or counts it and returns."""


def or_skip(error: InvalidInput) -> InvalidInput:
    """Add the hint to use --skip-bad to an error."""
    hint = "pass --skip-bad to leave out what cannot be read"
    fix = hint.capitalize() if error.fix is None else f"{error.fix}, or {hint}"
    return error.moved(error.where, fix=fix)


class Source(Protocol):
    """Examples that can be read any number of times."""

    def texts(self) -> Iterator[str]:
        """Yield the texts that a tokenizer is trained on."""

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        """Yield the examples; call `on_bad` for each one that cannot be read."""

    def fingerprint(self) -> str:
        """Return a hash that changes with the data, the key of the cached data set."""


class NamedSource(Source, Protocol):
    """Source that yields the texts of examples by name."""

    def named_texts(self) -> Iterator[tuple[str, str]]:
        """Yield the name (`where`) of every example with its whole text; without text, an empty one."""


@dataclass(frozen=True)
class Columns:
    """Roles of the columns of a file. A row with several columns to read becomes a `Table` signal.

    Args:
        text, number, image: Columns to read.
        label: Column to predict; None without one.
        numeric: Whether the label is a number.
        language: Language of the text.
    """

    text: tuple[str, ...] = ()
    number: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    label: str | None = None
    numeric: bool = False
    language: str = "en"

    @property
    def read(self) -> tuple[str, ...]:
        """All columns to read."""
        return (*self.text, *self.number, *self.image)

    def read_row(
        self, row: Mapping[str, Any], tokenizer: Any, *, folder: Path | None, image_reader: ImageReader, where: str
    ) -> Signal:
        """Read the columns of a row as a signal; paths of images are relative to `folder`."""
        return read_row(
            row,
            text=self.text,
            number=self.number,
            image=self.image,
            tokenizer=tokenizer,
            language=self.language,
            folder=folder,
            image_reader=image_reader,
            where=where,
        )


class Rows:
    """Rows of a file, which `load_rows` loaded."""

    def __init__(self, rows: LoadedRows, columns: Columns, image_reader: ImageReader = read_image):
        self.rows, self.columns, self.image_reader = rows, columns, image_reader
        self.path = path = Path(rows.file)
        for name in (*columns.read, *((columns.label,) if columns.label else ())):
            self.rows.column(name)  # raises an error that lists the existing columns
        if not columns.read:
            raise InvalidInput(
                str(path),
                problem="no columns to read are given",
                expected=f"one or more of {', '.join(map(repr, self.rows.columns))}",
                fix="Name them with --text, --number or --image",
            )
        if columns.label in columns.read:
            raise InvalidInput(
                f"{path}: column {columns.label!r}",
                problem="both read and predicted",
                expected="one or the other",
                fix="Choose another --label, or leave the column out of --text, --number and --image",
            )

    def texts(self) -> Iterator[str]:
        for name in self.columns.text:
            yield from (str(value) for value in self.rows.column(name) if value is not None)

    def named_texts(self) -> Iterator[tuple[str, str]]:
        for i, cells in enumerate(zip(*map(self.rows.column, self.columns.text), strict=True)):
            yield self.rows.where(i), "\n".join(str(cell) for cell in cells if cell is not None and cell == cell)

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        columns = self.columns
        first: tuple[str, int] | None = None  # kind of the first label, and its row
        for i in range(len(self.rows)):
            try:
                row, where = self.rows.row(i), self.rows.where(i)
                target: str | float = ""
                if columns.label:
                    cell = f"{where}, column {columns.label!r}"
                    target = _target(row[columns.label], columns.numeric, cell)
                    first = first or (_kind(row[columns.label]), i)
                    if not columns.numeric:
                        _check_kind(row[columns.label], first, cell)
                signal = columns.read_row(
                    row, tokenizer, folder=self.path.parent, image_reader=self.image_reader, where=where
                )
            except InvalidInput as error:
                on_bad(error)
                continue
            yield Example(signal, target, where)

    def fingerprint(self) -> str:
        images = (value for name in self.columns.image for value in self.rows.column(name) if isinstance(value, str))
        folder = self.path.parent
        files = [folder / image for image in images if is_inside(folder / image, folder)]
        return digest([repr(self.columns), stamp(self.path), *map(stamp, files)])


def _kind(label: Any) -> str:
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(label), type(label).__name__)


def _check_kind(label: Any, first: tuple[str, int], where: str) -> None:
    """Raise an error if a label is of another kind than the first: 1 and "1" would silently become different classes."""
    kind, row = first
    if _kind(label) != kind:
        raise InvalidInput(
            where,
            got=f"{label!r} ({_kind(label)})",
            expected=f"{kind}, as in row {row + 1}",
            fix="Write all labels of the column in the same way",
        )


def _target(value: Any, numeric: bool, where: str) -> str | float:
    """Return a class name or a number. Class names that are numbers lose a trailing .0, which file formats add."""
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise InvalidInput(where, problem="empty", expected="a label")
    if numeric:
        return finite(value, where)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (dict, list)):
        raise InvalidInput(where, got=f"a label of type {type(value).__name__}", expected="a name or a number")
    return str(value).strip()


class Files:
    """Files with their classes; each file is an example."""

    def __init__(self, files: list[tuple[str, Path]], language: str = "en", image_reader: ImageReader = read_image):
        self.files, self.language, self.image_reader = files, language, image_reader

    def texts(self) -> Iterator[str]:
        return (text for _, text in self.named_texts() if text)

    def named_texts(self) -> Iterator[tuple[str, str]]:
        for _, file in self.files:
            try:
                text = text_of(file) or ""
            except InvalidInput:
                continue  # `examples` reports the same file
            yield str(file), text

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        for name, file in self.files:
            try:
                signal = read_file(file, tokenizer, self.language, image_reader=self.image_reader)
            except InvalidInput as error:
                on_bad(error)
                continue
            yield Example(signal, name, str(file))

    def fingerprint(self) -> str:
        return digest([self.language, *(stamp(file) for _, file in self.files)])


class Folders(Files):
    """Folder with a subfolder per class; every file in a subfolder, at any depth, is an example."""

    def __init__(self, path: Path, language: str = "en", image_reader: ImageReader = read_image):
        classes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        files = [
            (folder.name, file)
            for folder in classes
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.suffix.lower() in SUFFIXES
        ]
        if not files:
            raise InvalidInput(
                str(path),
                problem="no files in subfolders",
                expected=f"{path}/CLASS/FILE, where FILE ends in one of {', '.join(sorted(SUFFIXES))}",
            )
        super().__init__(files, language, image_reader)


class News:
    """Split of N24News in its published layout: headline, abstract, caption, body and image of each article."""

    def __init__(
        self,
        path: Path,
        split: Literal["train", "dev", "test"],
        encoder: Any = None,
        image_reader: ImageReader = read_image,
        on_bad_image: Literal["raise", "skip"] = "raise",
    ):
        self.path, self.split, self.encoder = path, split, encoder
        self.image_reader, self.on_bad_image = image_reader, on_bad_image

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether a folder has the layout of N24News."""
        return (path / "news").is_dir()

    def texts(self) -> Iterator[str]:
        return (text for _, text in self.named_texts())

    def named_texts(self) -> Iterator[tuple[str, str]]:
        for example in read_n24news(self.path, self.split, image_reader=None):
            yield example.where, " ".join(map(str, collate([example.signal]).values.get("text", ())))

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        yield from read_n24news(
            self.path,
            self.split,
            tokenizer=tokenizer,
            paragraph_encoder=self.encoder,
            image_reader=self.image_reader,
            on_bad=self.on_bad_image,
        )

    def fingerprint(self) -> str:
        return digest([self.split, *(stamp(file) for file in sorted((self.path / "news").glob("*.json")))])


class StandardLibrary:
    """Classes and functions of the Python standard library, labelled with their package.

    Every Python installation has these source files, so no download is needed. Packages with few definitions are left
    out; from packages with many, `most` definitions are taken, evenly spaced.
    """

    FEWEST = 60

    def __init__(self, most: int = 200, packages: int | None = 12):
        self.most = most
        self.folder = Path(sysconfig.get_path("stdlib"))
        packaged: dict[str, list[tuple[str, str]]] = {}
        for folder in sorted(p for p in self.folder.iterdir() if (p / "__init__.py").is_file()):
            if folder.name in ("test", "idlelib", "turtledemo", "lib2to3", "site-packages", "ensurepip", "pydoc_data"):
                continue
            packaged[folder.name] = [
                (f"{file.relative_to(self.folder)}: {name}", source)
                for file in sorted(folder.rglob("*.py"))
                if not {"test", "tests"} & set(file.relative_to(self.folder).parts)
                for name, source in _definitions(file)
            ]
        large = [name for name in packaged if len(packaged[name]) >= self.FEWEST]
        largest = sorted(sorted(large, key=lambda name: -len(packaged[name]))[:packages])
        self.definitions = [
            (package, name, source)
            for package in largest
            for name, source in packaged[package][:: max(1, len(packaged[package]) // most)][:most]
        ]
        if len(largest) < 2:
            raise InvalidInput(
                str(self.folder),
                problem="no source files of the standard library",
                expected="a Python installation with its .py files",
                fix="Pass your own DATA",
            )

    def texts(self) -> Iterator[str]:
        return (source for _, _, source in self.definitions)

    def named_texts(self) -> Iterator[tuple[str, str]]:
        return ((where, source) for _, where, source in self.definitions)

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        for package, where, source in self.definitions:
            try:
                yield Example(read_python(source, tokenizer, where=where), package, where)
            except InvalidInput as error:
                on_bad(error)

    def fingerprint(self) -> str:
        return digest([sys.version, str(self.folder), str(self.most), *(where for _, where, _ in self.definitions)])


def _definitions(file: Path) -> Iterator[tuple[str, str]]:
    try:
        source = load_text(file)
        seen = Counter[str]()
        for name, _, text in definitions(source, where=str(file)):
            if len(text) > 80:  # stubs hardly differ between packages
                seen[name] += 1
                yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), text
    except InvalidInput:  # files of other encodings, or broken on purpose
        return


def digest(parts: Iterable[str]) -> str:
    """Return a hash of some strings."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def digest_arrays(*arrays: np.ndarray) -> str:
    """Return a hash of the content of some arrays."""
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(f"{array.dtype} {array.shape} ".encode())
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()


def stamp(path: Path) -> str:
    """Return path, size and modification time of a file; the path also as given, because names of examples contain it."""
    stat = path.stat()
    return f"{path} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
