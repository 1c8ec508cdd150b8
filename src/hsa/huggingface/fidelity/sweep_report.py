"""Report of a sweep, as a table and plots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsa.analysis.tables import markdown_table
from hsa.files import write_text
from hsa.huggingface.fidelity.plots import plot_start_layers

_START = re.compile(r"(.+) from (\d+)")
_MAIN = {"cola": "matthews"}
"""Main score of tasks for which it is not accuracy."""


def tabulate(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table. Changes are in points."""
    header = [
        "task (tokens)",
        "variant",
        "layers",
        "accuracy",
        "change",
        "precision",
        "recall",
        "F1",
        "kept",
        "× fewer ops",
    ]
    header += ["attention alone"]
    padded = any("padded MFLOP per layer" in row for row in rows)
    header += ["MFLOP per layer, padded"] if padded else []
    original = {row["task"]: row for row in rows if row["variant"] == "original"}
    table = []
    for row in rows:
        before = original.get(row["task"], row)
        cells = [
            f"{row['task']} ({row['mean length']:.0f})",
            row["variant"],
            _layers(row["layers"]),
            f"{row['accuracy']:.4f}",
            "" if row is before else f"{100 * (row['accuracy'] - before['accuracy']):+.2f}",
            *(f"{row[name]:.4f}" for name in ("precision", "recall", "f1")),
            f"{100 * row['kept']:.2f}%" if "kept" in row else "",
            *(
                f"{row[name]:.2f}" if name in row else ""
                for name in ("ops ratio, converted layers", "attention ratio, converted layers")
            ),
        ]
        if padded:
            has = "padded MFLOP per layer" in row
            cells += [f"{row['flat MFLOP per layer']:.2f} → {row['padded MFLOP per layer']:.3f}" if has else ""]
        table.append(cells)
    return header, table


def write_sweep_report(
    folder: Path, title: str, rows: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]
) -> list[Path]:
    """Write `report.md`, with bars over start layers if the recipe has them, and return the paths of the plots."""
    pictures = []
    for task in dict.fromkeys(row["task"] for row in rows):
        bars, original = _bars([row for row in rows if row["task"] == task], _MAIN.get(task, "accuracy"))
        if bars:
            pictures.append(folder / f"{task}.png")
            plot_start_layers(
                pictures[-1], bars, original, _MAIN.get(task, "accuracy"), f"{task}: every other layer from here"
            )
    lines = [f"# {title}", "", *markdown_table(*tabulate(rows)), ""]
    lines += [
        "Change: change of accuracy, in points. Kept: texts with the same answer as before. × fewer ops: operations in the",
        "converted layers, with pooling, selection and clustering; attention alone: without those.",
        "",
        *(f"- {name} was skipped: {why}" for name, why in skipped.items()),
        *(f"![{picture.stem}]({picture.name})" for picture in pictures),
        "",
    ]
    write_text(folder / "report.md", "\n".join(lines))
    return pictures


def _bars(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[dict[str, list[float]], float]:
    """Return the scores by start layer of each variant, and the original score."""
    by_variant: dict[str, dict[int, float]] = {}
    original = 0.0
    for row in rows:
        start = _START.fullmatch(row["variant"])
        if row["variant"] == "original":
            original = row[metric]
        elif start:
            by_variant.setdefault(start[1], {})[int(start[2])] = row[metric]
    complete = {name: scores for name, scores in by_variant.items() if len(scores) == max(scores) + 1}
    most = max((len(scores) for scores in complete.values()), default=0)
    return {n: [s[i] for i in range(most)] for n, s in complete.items() if len(s) == most}, original


def _layers(numbers: Sequence[int]) -> str:
    consecutive = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}–{numbers[-1]}" if consecutive else ", ".join(map(str, numbers))
