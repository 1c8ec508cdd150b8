"""Table and plot of the cost of attention by length, in operations and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from hsa.analysis.plots import COLORS, add_legend, pyplot, save_figure


@dataclass(frozen=True)
class Cost:
    """Cost of one kind of attention, or of one model, at one length."""

    kind: str
    length: int
    operations: int
    seconds: float | None  # None if not measured


def cost_table(costs: Sequence[Cost]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a table: a row per length, with the operations and time of every kind.

    >>> cost_table([Cost("a", 4, 2_000_000, 0.5), Cost("a", 8, 8_000_000, None), Cost("b", 4, 0, 0.25)])[1]
    [['4', '2.0 M, 500.00 ms', '0.0 M, 250.00 ms'], ['8', '8.0 M, –', '–']]
    """
    kinds = list(dict.fromkeys(cost.kind for cost in costs))
    by_cell = {(cost.kind, cost.length): cost for cost in costs}
    rows = []
    for length in dict.fromkeys(cost.length for cost in costs):
        rows.append([f"{length:,}", *(_cell(by_cell.get((kind, length))) for kind in kinds)])
    return ["length", *kinds], rows


def _cell(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    time = "–" if cost.seconds is None else f"{1e3 * cost.seconds:,.2f} ms"
    return f"{cost.operations / 1e6:,.1f} M, {time}"


def plot_costs(path: Path, costs: Sequence[Cost], device: str = "this CPU") -> None:
    """Plot operations and seconds against length, both axes logarithmic, a line per kind, as measured on `device`."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for color, kind in zip(cycle(COLORS), dict.fromkeys(cost.kind for cost in costs), strict=False):
        own = [cost for cost in costs if cost.kind == kind]
        counted = [(c.length, c.operations) for c in own if c.operations]  # 0 has no logarithm
        left.plot([n for n, _ in counted], [o for _, o in counted], color=color, marker="o", ms=3, label=kind)
        timed = [(c.length, c.seconds) for c in own if c.seconds is not None]
        right.plot([n for n, _ in timed], [s for _, s in timed], color=color, marker="o", ms=3, label=kind)
    left.set(ylabel="operations", title="Attention operations")
    right.set(ylabel="seconds", title=f"Time of a forward pass, {device}")
    for axes in (left, right):
        if any(len(line.get_xdata()) for line in axes.lines):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set_xlabel("length in leaves")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    add_legend(figure, left)
    save_figure(figure, path)
