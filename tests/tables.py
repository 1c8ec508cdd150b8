"""Small files to train on: tables of reviews in every format, pictures, folders."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

WORDS = {"pos": ("good", "great", "lovely"), "neg": ("bad", "awful", "ugly")}
FILLERS = ("the", "film", "was", "it", "and", "we", "saw")


def reviews(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows with the columns text, title, stars and label."""
    generator = random.Random(seed)
    rows = []
    for i in range(count):
        label = ("pos", "neg")[i % 2]
        words = [*generator.choices(FILLERS, k=generator.randint(2, 5)), generator.choice(WORDS[label])]
        text = f"{' '.join(words)}. {' '.join(generator.choices(FILLERS, k=3))}."
        stars = 1.0 + 3 * (label == "pos") + generator.random()
        rows.append({"text": text, "title": generator.choice(FILLERS), "stars": round(stars, 2), "label": label})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the suffix of the path names."""
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def picture(path: Path, shade: int, size: tuple[int, int] = (32, 16)) -> Path:
    """Write a PNG of noise around one shade."""
    from PIL import Image

    noise = np.random.default_rng(shade).integers(-20, 20, (*size, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(shade + noise, 0, 255).astype(np.uint8)).save(path)
    return path


def mixed_folder(folder: Path, each: int = 4) -> Path:
    """Write two classes of files of many types."""
    for label, words in WORDS.items():
        inner = folder / label / "deeper"
        inner.mkdir(parents=True)
        for i in range(each):
            word = words[i % len(words)]
            (folder / label / f"{i}.txt").write_text(f"The film was {word}. We saw it.")
            (folder / label / f"{i}.md").write_text(f"# {word}\n\nThe film was {word}.\n\n- it\n- was\n")
            (folder / label / f"{i}.html").write_text(f"<h1>{word}</h1><p>The film<p>was {word}.")
            (inner / f"{i}.py").write_text(f"def {word}(x):\n    return x + {i}\n")
            picture(inner / f"{i}.png", 60 if label == "pos" else 200)
        (folder / label / "notes.xyz").write_text("of an unknown type")
    return folder
