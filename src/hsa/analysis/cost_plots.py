"""What attention costs by length: operations and seconds of pairwise and three-way attention, and a picture of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from hsa.analysis.plots import COLORS, add_legend, pyplot, save_figure
from hsa.analysis.timing import median_seconds
from hsa.attention.flops import flops_flat
from hsa.nn.attention import Attention, Flat
from hsa.research.trilinear.counts import flops_hierarchical_trilinear, flops_trilinear
from hsa.research.trilinear.module import HierarchicalTrilinear, Trilinear
from hsa.tree.hierarchy import Hierarchy

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WINDOW = 16
BRANCHING = 8
MOST_OPERATIONS = 10_000_000_000
"""Of a forward pass that is still timed: some tenths of a second on one core."""


@dataclass(frozen=True)
class Cost:
    """Of the attention of one layer on one sequence."""

    kind: str
    length: int
    operations: int
    seconds: float | None  # None where it was too long to be measured


def costs(
    heads: int, width: int, lengths: Sequence[int] = LENGTHS, most: int = MOST_OPERATIONS, repeats: int = 3
) -> list[Cost]:
    """Operations, and the median time of a forward pass, of four attentions; kind by kind, lengths as given.

    Args:
        heads, width: of attention; width: all heads together.
        lengths: leaves of a sequence.
        most: passes of more operations are counted, not timed.
        repeats: passes of which the median is taken, after one that is not timed.

    >>> [c.operations for c in costs(1, 4, lengths=(16, 32), most=0)[:4]]  # pairs: four times, triples: eight times
    [4352, 17408, 72704, 569344]
    """
    kinds: dict[str, tuple[Attention, Callable[[int], tuple[Hierarchy, int]]]] = {
        "pairs": (Flat(), lambda n: (Hierarchy.flat([n]), flops_flat(n, width, heads))),
        "three-way": (Trilinear(), lambda n: _counted(Hierarchy.flat([n]), heads, width)),
        f"three-way, window {WINDOW}": (
            Trilinear(window=WINDOW),
            lambda n: _counted(Hierarchy.flat([n]), heads, width, WINDOW),
        ),
        f"three-way on a tree of {BRANCHING}s": (HierarchicalTrilinear(), lambda n: _on_tree(n, heads, width)),
    }
    found = []
    for kind, (attention, describe) in kinds.items():
        for length in lengths:
            hierarchy, operations = describe(length)
            timed = operations <= most
            seconds = _seconds(attention, hierarchy, heads, width // heads, repeats) if timed else None
            found.append(Cost(kind, length, operations, seconds))
    return found


def _counted(hierarchy: Hierarchy, heads: int, width: int, window: int | None = None) -> tuple[Hierarchy, int]:
    return hierarchy, flops_trilinear(hierarchy, width, heads, window=window).total


def _on_tree(length: int, heads: int, width: int) -> tuple[Hierarchy, int]:
    tree = Hierarchy.regular([length], (BRANCHING,), repeat_last=True)
    return tree, flops_hierarchical_trilinear(tree, width, heads).total


@torch.no_grad()
def _seconds(attention: Attention, hierarchy: Hierarchy, heads: int, dim: int, repeats: int) -> float:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(hierarchy.num_leaves, heads, dim, generator=generator) for _ in attention.parts]
    attention(*parts, hierarchy, None)  # plans, allocations
    return median_seconds(lambda: attention(*parts, hierarchy, None), repeats)


def cost_table(found: Sequence[Cost]) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a table: a row per length, operations and time of every kind, as far as these are known.

    >>> cost_table([Cost("a", 4, 2_000_000, 0.5), Cost("a", 8, 8_000_000, None), Cost("b", 4, 0, 0.25)])[1]
    [['4', '2.0 M, 500.00 ms', '0.0 M, 250.00 ms'], ['8', '8.0 M, –', '–']]
    """
    kinds = list(dict.fromkeys(cost.kind for cost in found))
    by_place = {(cost.kind, cost.length): cost for cost in found}
    rows = []
    for length in dict.fromkeys(cost.length for cost in found):
        rows.append([f"{length:,}", *(_cell(by_place.get((kind, length))) for kind in kinds)])
    return ["length", *kinds], rows


def _cell(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    time = "–" if cost.seconds is None else f"{1e3 * cost.seconds:,.2f} ms"
    return f"{cost.operations / 1e6:,.1f} M, {time}"


def plot_costs(path: Path, found: Sequence[Cost], device: str = "this CPU") -> None:
    """Operations and seconds against length, both axes logarithmic, a line per kind; `device`: where it was measured."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for color, kind in zip(cycle(COLORS), dict.fromkeys(cost.kind for cost in found), strict=False):
        own = [cost for cost in found if cost.kind == kind]
        counted = [(c.length, c.operations) for c in own if c.operations]  # no logarithm of nothing
        left.plot([n for n, _ in counted], [o for _, o in counted], color=color, marker="o", ms=3, label=kind)
        timed = [(c.length, c.seconds) for c in own if c.seconds is not None]
        right.plot([n for n, _ in timed], [s for _, s in timed], color=color, marker="o", ms=3, label=kind)
    left.set(ylabel="operations", title="Operations of attention")
    right.set(ylabel="seconds", title=f"Forward pass, {device}")
    for axes in (left, right):
        if any(len(line.get_xdata()) for line in axes.lines):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set_xlabel("leaves")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    add_legend(figure, left)
    save_figure(figure, path)
