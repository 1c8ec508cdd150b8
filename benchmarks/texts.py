"""Long texts for benchmarks of decoders, as tokens of a model.

    python -m benchmarks.texts MODEL --books books.parquet --papers papers.parquet --python --length 32769 --out texts.pt

Writes `torch.save` of a dict of integers `[texts, tokens]` by kind of text. Texts of books come from different books; papers
are joined, and so are the modules of Python's standard library. Books need a column `paragraphs` (sections of paragraphs),
papers a column `sections`; `--split` keeps the rows of one split, if there is a column of that name.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__"}
"""Folders of the standard library that are left out."""


def books(path: Path, split: str | None) -> Iterator[Iterator[str]]:
    """Yield the sections of each book."""
    for row in _rows(path, "paragraphs", split):
        yield ("\n\n".join(paragraphs) for paragraphs in row)


def papers(path: Path, split: str | None) -> Iterator[str]:
    """Yield the sections of all papers."""
    for sections in _rows(path, "sections", split):
        yield from sections


def python_source() -> Iterator[str]:
    """Yield the modules of the standard library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if not SKIPPED & set(file.relative_to(library).parts):
            yield file.read_text(errors="replace")


def _rows(path: Path, column: str, split: str | None) -> list[Any]:
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    names = parquet.read_schema(path).names
    if column not in names:
        raise SystemExit(f"{path}: expected a column {column!r}, got {', '.join(names)}")
    filters = [("split", "==", split)] if split and "split" in names else None
    return parquet.read_table(path, columns=[column], filters=filters)[column].to_pylist()


def cut(parts: Iterable[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Yield texts of `length` tokens from joined parts."""
    tokens: list[int] = []
    for part in parts:
        tokens += tokenizer(part + "\n\n", add_special_tokens=False, verbose=False).input_ids
        while len(tokens) >= length:
            yield tokens[:length]
            del tokens[:length]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model, for its tokenizer")
    parser.add_argument("--gguf", help="name of a GGUF file in this folder")
    parser.add_argument("--books", type=Path, help="table of books")
    parser.add_argument("--papers", type=Path, help="table of papers")
    parser.add_argument("--python", action="store_true", help="take the source of Python's standard library")
    parser.add_argument("--split", default="test", help="split of the tables, if they have one")
    parser.add_argument(
        "--length", type=int, required=True, help="number of tokens per text, one more than benchmarks read"
    )
    parser.add_argument("--count", type=int, default=3, help="number of texts of every kind")
    parser.add_argument("--out", type=Path, required=True, help="file for the tokens")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model, **({"gguf_file": options.gguf} if options.gguf else {}))
    sources: dict[str, Iterator[list[int]]] = {}
    if options.books:
        firsts = (list(islice(cut(b, tokenizer, options.length), 1)) for b in books(options.books, options.split))
        sources["book"] = (text for texts in firsts for text in texts)
    if options.python:
        sources["python"] = cut(python_source(), tokenizer, options.length)
    if options.papers:
        sources["papers"] = cut(papers(options.papers, options.split), tokenizer, options.length)
    texts = {kind: list(islice(source, options.count)) for kind, source in sources.items()}
    for kind, found in texts.items():
        print(f"{kind}: {len(found)} texts of {options.length:,} tokens")
        if len(found) < options.count:
            raise SystemExit(f"expected {options.count} texts of {kind}")
    torch.save({kind: torch.tensor(found, dtype=torch.int32) for kind, found in texts.items()}, options.out)


if __name__ == "__main__":
    main()
