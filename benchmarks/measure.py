"""Timing, checks and Markdown tables that all benchmarks share."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


def medians(candidates: dict[str, Callable[[], Any]], repeats: int = 7, seconds: float = 20.0) -> dict[str, float]:
    """Return the median milliseconds of each candidate, measured in turns so that a slow phase affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()  # builds plans and allocates memory
    began = time.perf_counter()
    for turn in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def check(name: str, out: Tensor, reference: Tensor, tolerance: float) -> None:
    """Exit if `out` is further from `reference` than `tolerance`, relative to the largest value."""
    error = float((out.double() - reference.double()).abs().max() / reference.double().abs().max())
    if not error < tolerance:
        raise SystemExit(f"{name}: error {error:.2e} relative to the largest value, expected below {tolerance:.0e}")


Section = tuple[str, Sequence[str], Sequence[Sequence[Any]]]


def write_table(name: str, title: str, sections: Sequence[Section], notes: str, *, command: str | None = None) -> None:
    """Print Markdown tables and save them as results/`name`.md.

    Args:
        sections: (heading, header, rows) of each table; an empty heading for a single table.
        notes: Text below the tables.
        command: Command that was run; `python -m benchmarks.run NAME` by default.
    """
    lines = [f"# {title}", ""]
    for heading, header, rows in sections:
        lines += [f"## {heading}", ""] if heading else []
        lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        lines += ["| " + " | ".join(_cell(x) for x in row) + " |" for row in rows]
        lines.append("")
    threads = torch.get_num_threads()
    machine = f"{threads} thread{'s' * (threads != 1)}, {platform.machine()}, torch {torch.__version__}"
    if torch.cuda.is_available():
        machine = f"one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines += [notes, "", f"Measured with `{command or f'python -m benchmarks.run {name}'}` on {machine}.", ""]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines))
    print("\n".join(lines))


def _cell(x: Any) -> str:
    if x is None:
        return "–"
    if isinstance(x, float):
        digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3
        return f"{x:,.{digits}f}"
    return str(x)
