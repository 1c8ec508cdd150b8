"""Texts for a language model: documents, a tokenizer, and three arrays of token ids on disk.

Three tokens mark structure: one blank line ends a paragraph, two end a chapter, and `<|end|>` ends a document. Decoding
restores the text, except for line ends and runs of more than two blank lines.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hsa.errors import InvalidInput
from hsa.files import cache_folder, read_json, write_json
from hsa.signals.readers.python_source import load_python
from hsa.signals.readers.rows import ROW_SUFFIXES, load_rows
from hsa.signals.readers.text import decode_file, load_bytes, normalize_newlines, train_tokenizer
from hsa.signals.readers.tokens import encodable, load_tokenizer
from hsa.table_format import TableFormat
from hsa.training.data.prepare import is_cached, write_cache
from hsa.training.data.sources import digest, stamp

END, PARAGRAPH, CHAPTER = "<|end|>", "\n\n", "\n\n\n"
HEIGHTS = {PARAGRAPH: 3, CHAPTER: 4, END: 5}
"""Height up to which each token closes families, for trees that follow the text; the end of a sentence closes 2."""
SPLITS = ("train", "validation", "test")
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".text")
_TOKENIZER, _ABOUT = "tokenizer.json", "about.json"
_SHARES = (0.9, 0.05, 0.05)
_BLANK = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")
_SENTENCE_END = re.compile(r"""[.!?…][)\]"'”’*]*$""")


@dataclass(frozen=True)
class Document:
    """A text, and the split that the data assign it to, if any."""

    text: str
    split: str | None = None


@dataclass(frozen=True, eq=False)
class LmData:
    """Data for training.

    Attributes:
        train, validation, test: Token ids `[tokens]`, mapped from disk.
        tokenizer: Tokenizer.
        closes: Height up to which a token closes families, by token id, for trees that follow the text.
        name: Name of the data.
        characters: Number of characters of all texts.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    tokenizer: Any
    closes: dict[int, int]
    name: str
    characters: int


def prepare_text(
    data: Path | None,
    *,
    text: tuple[str, ...] = (),
    vocabulary: int = 8192,
    seed: int = 0,
    table: TableFormat = TableFormat(),  # noqa: B008
    say: Callable[[str], None] = lambda message: None,
) -> LmData:
    """Read texts, train a tokenizer on the training part, and encode the texts. The result is cached.

    Args:
        data: Text file, folder of text files, file of rows, or None for the docstrings of the Python standard library.
        text: Columns of a file of rows that hold text.
        vocabulary: Maximum vocabulary size.
        seed: Random seed of the split.
        table: Format of the file of rows; text files have its encoding too.
        say: Callback for progress messages.
    """
    name = "Python standard library" if data is None else data.name
    form = [table.delimiter, table.encoding]
    key = json.dumps([version("hsa"), "lm 1", _fingerprint(data), text, vocabulary, seed, form], default=str)
    folder = cache_folder() / digest([key])
    files = {part: f"{part}.npy" for part in SPLITS}
    if not is_cached(folder, (*files.values(), _TOKENIZER, _ABOUT)):
        say("reading")
        parts = _split(list(_documents(data, text, table)), seed)
        characters = sum(len(d) for part in parts.values() for d in part)
        say(f"training a tokenizer on {sum(map(len, parts['train'])) / 1e6:,.1f} M characters")
        tokenizer = train_tokenizer(parts["train"], vocabulary, special_tokens=(END, PARAGRAPH, CHAPTER))
        say("encoding")
        arrays = {part: encode_documents(documents, tokenizer) for part, documents in parts.items()}

        def write(temporary: Path) -> None:
            for part, array in arrays.items():
                np.save(temporary / files[part], array)
            tokenizer.save(str(temporary / _TOKENIZER))
            write_json(temporary / _ABOUT, characters)

        if not write_cache(folder, write):
            return LmData(
                **arrays, tokenizer=tokenizer, closes=closing_tokens(tokenizer), name=name, characters=characters
            )
    tokenizer, characters = load_tokenizer(folder / _TOKENIZER), read_json(folder / _ABOUT, "a number of characters")
    train, validation, test = (np.load(folder / file, mmap_mode="r") for file in files.values())
    return LmData(train, validation, test, tokenizer, closing_tokens(tokenizer), name, characters)


def held_out_texts(data: Path, columns: tuple[str, ...] = (), table: TableFormat = TableFormat()) -> list[str]:  # noqa: B008
    """Return the texts of the test split if the data have one, otherwise all texts."""
    documents = [document for document in _documents(data, columns, table) if document.text]
    test = [document.text for document in documents if document.split == "test"]
    if not documents:
        raise InvalidInput(str(data), problem="no text", expected="at least one document")
    return test or [document.text for document in documents]


def encode_documents(documents: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Return the token ids of all documents, each followed by `<|end|>`, in the smallest type that holds them."""
    kind = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    end = tokenizer.token_to_id(END)
    parts: list[np.ndarray] = []
    pieces = (piece for document in documents for piece in (*_pieces(document), None))
    while some := list(islice(pieces, 512)):
        encoded = iter(tokenizer.encode_batch_fast([p for p in some if p is not None], add_special_tokens=False))
        parts += [np.array([end] if p is None else next(encoded).ids, kind) for p in some]
    return np.concatenate(parts) if parts else np.empty(0, kind)


def _pieces(document: str) -> Iterator[str]:
    """Yield the chapters: the tokenizer gets long texts in parts, which may be split before any structure token."""
    for i, chapter in enumerate(document.split(CHAPTER)):
        yield CHAPTER + chapter if i else chapter


def closing_tokens(tokenizer: Any) -> dict[int, int]:
    """Return the heights by token id: 2 for tokens that end a sentence, 3 a paragraph, 4 a chapter, 5 a document."""
    closes = {}
    for token, index in tokenizer.get_vocab().items():
        if token in HEIGHTS:
            closes[index] = HEIGHTS[token]
        elif _SENTENCE_END.search(tokenizer.decode([index])):
            closes[index] = 2
    return dict(sorted(closes.items()))


def clean(text: str) -> str:
    """Normalise line ends and blank lines: one between paragraphs, two between chapters."""
    text = encodable(normalize_newlines(text)).strip()
    return _BLANK.sub(lambda match: PARAGRAPH if match[0].count("\n") == 2 else CHAPTER, text)


def _documents(data: Path | None, columns: tuple[str, ...], table: TableFormat) -> Iterator[Document]:
    if data is None:
        table.refuse("the Python standard library")
        yield from _docstrings(Path(sysconfig.get_path("stdlib")))
    elif data.is_dir():
        files = sorted(f for f in data.rglob("*") if f.is_file() and f.suffix.lower() in TEXT_SUFFIXES)
        if not files:
            raise InvalidInput(
                str(data), problem="no text files in the folder", expected=f"some of {', '.join(TEXT_SUFFIXES)}"
            )
        table.refuse("text files", "delimiter")
        yield from (_text_file(file, table) for file in files)
    elif not data.exists():
        raise InvalidInput(
            str(data),
            problem="no such file or folder",
            expected="a text file, a folder of text files, or a file of rows",
        )
    elif data.suffix.lower() in ROW_SUFFIXES:
        yield from _rows(data, columns, table)
    else:
        table.refuse("a text file", "delimiter")
        yield _text_file(data, table)


def _text_file(path: Path, table: TableFormat) -> Document:
    return Document(clean(decode_file(load_bytes(path), table.encoding, str(path))))


def _docstrings(library: Path) -> Iterator[Document]:
    """Yield the docstrings of the Python installation, one document per module: every machine has them."""
    for file in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"} & set(
            file.relative_to(library).parts
        ):
            continue
        try:
            module = load_python(file)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in strings
                nodes = list(ast.walk(ast.parse(module)))
        except (InvalidInput, SyntaxError, RecursionError):  # other encodings, or files broken on purpose
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [clean(text) for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        if sum(map(len, docstrings)) > 500:
            yield Document(PARAGRAPH.join(text.replace(CHAPTER, PARAGRAPH) for text in docstrings if text))


def _rows(data: Path, columns: tuple[str, ...], table: TableFormat) -> Iterator[Document]:
    """Yield one document per row, from the named columns, or from the headings and paragraphs of a book."""
    rows = load_rows(data, delimiter=table.delimiter, encoding=table.encoding)
    book = {"headings", "paragraphs"} <= set(rows.columns)
    if not columns and not book:
        raise InvalidInput(
            str(data),
            problem="no columns to read are given",
            expected=f"one or more of {', '.join(map(repr, rows.columns))}",
            fix="Name the columns that hold text with --text",
        )
    for name in columns:
        rows.column(name)  # raises an error that lists the existing columns
    for i in range(len(rows)):
        row = rows.row(i)
        split = row.get("split")
        split = split if split in SPLITS else None
        read = [clean(str(row[name])) for name in columns if row[name] is not None]
        yield Document(PARAGRAPH.join(read) if columns else _book(row), split)


def _book(row: dict[str, Any]) -> str:
    chapters = []
    for heading, paragraphs in zip(row["headings"], row["paragraphs"], strict=True):
        parts = [clean(part).replace(CHAPTER, PARAGRAPH) for part in (heading, *paragraphs) if part]
        chapters.append(PARAGRAPH.join(part for part in parts if part))
    return CHAPTER.join(chapter for chapter in chapters if chapter)


def _split(documents: list[Document], seed: int) -> dict[str, list[str]]:
    """Split by document, as the data say or at random; if there are fewer than 20 documents, split each of them."""
    documents = [d for d in documents if d.text]
    if not documents:
        raise InvalidInput("data", problem="no text", expected="at least one document")
    named = {d.split for d in documents}
    if named >= set(SPLITS):
        return {split: [d.text for d in documents if d.split == split] for split in SPLITS}
    if len(documents) >= 20:
        order = np.random.default_rng(seed).permutation(len(documents))
        first, second = int(_SHARES[0] * len(order)), int((_SHARES[0] + _SHARES[1]) * len(order))
        groups = (order[:first], order[first:second], order[second:])
        return {split: [documents[i].text for i in sorted(g)] for split, g in zip(SPLITS, groups, strict=True)}
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for document in documents:
        begin = 0
        for split, share in zip(SPLITS, np.cumsum(_SHARES), strict=True):
            end = len(document.text) if split == SPLITS[-1] else _cut(document.text, int(share * len(document.text)))
            parts[split].append(document.text[begin:end].strip())
            begin = end
    return {split: [text for text in texts if text] for split, texts in parts.items()}


def _cut(text: str, near: int) -> int:
    """Return the end of the first paragraph, line or word soon after a position; the position itself if there is none."""
    for mark in (PARAGRAPH, "\n", " "):
        end = text.find(mark, near)
        if 0 <= end < near + len(text) // 50:
            return end
    return near


def _fingerprint(data: Path | None) -> Any:
    if data is None:
        return [sys.version, sysconfig.get_path("stdlib")]
    if data.is_dir():
        return [stamp(f) for f in sorted(data.rglob("*")) if f.is_file() and f.suffix.lower() in TEXT_SUFFIXES]
    return stamp(data) if data.exists() else str(data)
