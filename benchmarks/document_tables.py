"""Build tables of documents and labels for `hsa compare` from published data sets.

    python -m benchmarks.document_tables DATA TABLES [--examples 6000]

DATA must hold imdb_train.parquet and imdb_test.parquet (columns text, label), 20newsgroups_bydate.parquet (text, label_name,
split), peerread_papers_subset.parquet (venue, split, headings, sections) and glove6b_50d_top100k_fp16.npz (words, vectors).
The command writes NAME_train.parquet and NAME_test.parquet for imdb, news and papers, with columns text and label, and
glove.txt to TABLES. `--examples` limits each table to that number of random rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
_ARXIV = {"arxiv.cs.ai_2007-2017": "cs.AI", "arxiv.cs.cl_2007-2017": "cs.CL", "arxiv.cs.lg_2007-2017": "cs.LG"}


def imdb(data: Path) -> Iterable[tuple[str, Row]]:
    """Yield IMDB reviews, labelled positive or negative; line breaks of the HTML become line ends."""
    for split in ("train", "test"):
        for row in _rows(data / f"imdb_{split}.parquet"):
            yield split, {"text": row["text"].replace("<br />", "\n"), "label": str(row["label"])}


def news(data: Path) -> Iterable[tuple[str, Row]]:
    """Yield posts of 20 Newsgroups without their header lines, as some of them name the group."""
    for row in _rows(data / "20newsgroups_bydate.parquet"):
        _, _, body = row["text"].partition("\n\n")
        yield row["split"], {"text": body.strip() or row["text"], "label": row["label_name"]}


def papers(data: Path) -> Iterable[tuple[str, Row]]:
    """Yield PeerRead papers with their arXiv class.

    Development papers join the training set, because `hsa compare` splits off its own validation data.
    """
    for row in _rows(data / "peerread_papers_subset.parquet"):
        if row["venue"] in _ARXIV:
            parts = [part for pair in zip(row["headings"], row["sections"], strict=True) for part in pair if part]
            split = "test" if row["split"] == "test" else "train"
            yield split, {"text": "\n\n".join(parts), "label": _ARXIV[row["venue"]]}


TABLES: dict[str, Callable[[Path], Iterable[tuple[str, Row]]]] = {"imdb": imdb, "news": news, "papers": papers}


def _rows(path: Path) -> list[Row]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    return pq.read_table(path).to_pylist()


def write(name: str, data: Path, tables: Path, most: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(TABLES[name](data))
    for split in ("train", "test"):
        chosen = [row for where, row in rows if where == split and row["text"].strip()]
        order = np.random.default_rng(0).permutation(len(chosen))[: most or len(chosen)]
        pq.write_table(
            pa.Table.from_pylist([chosen[i] for i in order]), tables / f"{name}_{split}.parquet", compression="zstd"
        )
        print(f"{name}_{split}: {len(order):,} documents")


def write_vectors(data: Path, path: Path) -> None:
    loaded = np.load(data / "glove6b_50d_top100k_fp16.npz", allow_pickle=True)
    words, vectors = loaded["words"], loaded["vectors"].astype(np.float32)
    with path.open("w", encoding="utf-8") as file:
        for word, vector in zip(words.tolist(), vectors, strict=True):
            print(word, *(f"{x:.4g}" for x in vector), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--examples", type=int, default=0, help="most rows of each table; 0 for all")
    arguments = parser.parse_args()
    arguments.tables.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        write(name, arguments.data, arguments.tables, arguments.examples)
    write_vectors(arguments.data, arguments.tables / "glove.txt")


if __name__ == "__main__":
    main()
