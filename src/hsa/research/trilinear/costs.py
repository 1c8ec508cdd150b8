"""Cost of pairwise and three-way attention by length: operations, and seconds on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hsa.analysis.cost_plots import Cost
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
"""Maximum number of operations of a timed forward pass: some tenths of a second on one core."""


def costs(
    heads: int, width: int, lengths: Sequence[int] = LENGTHS, most: int = MOST_OPERATIONS, repeats: int = 3
) -> list[Cost]:
    """Measure operations and the median time of a forward pass of four kinds of attention, kind by kind.

    Args:
        heads: Number of heads.
        width: Channels of all heads together.
        lengths: Numbers of leaves.
        most: Maximum number of operations of a timed pass; longer passes are only counted.
        repeats: Number of timed passes, after one that is not timed.

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
    measured = []
    for kind, (attention, describe) in kinds.items():
        for length in lengths:
            hierarchy, operations = describe(length)
            timed = operations <= most
            seconds = _seconds(attention, hierarchy, heads, width // heads, repeats) if timed else None
            measured.append(Cost(kind, length, operations, seconds))
    return measured


def _counted(hierarchy: Hierarchy, heads: int, width: int, window: int | None = None) -> tuple[Hierarchy, int]:
    return hierarchy, flops_trilinear(hierarchy, width, heads, window=window).total


def _on_tree(length: int, heads: int, width: int) -> tuple[Hierarchy, int]:
    tree = Hierarchy.regular([length], (BRANCHING,), repeat_last=True)
    return tree, flops_hierarchical_trilinear(tree, width, heads).total


@torch.no_grad()
def _seconds(attention: Attention, hierarchy: Hierarchy, heads: int, dim: int, repeats: int) -> float:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(hierarchy.num_leaves, heads, dim, generator=generator) for _ in attention.parts]
    attention(*parts, hierarchy, None)  # builds plans and allocates memory
    return median_seconds(lambda: attention(*parts, hierarchy, None), repeats)
