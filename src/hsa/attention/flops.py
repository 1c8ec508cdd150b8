"""Operation counts of attention layers.

An attention entry (a query with a key or node) costs 4·width + heads operations over all heads: a multiplication and an
addition per channel for q·k and for weight·v, and one exponential per head. Talking heads add 4·heads² for mixing logits and
weights. Pooling, selection and clustering are counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsa.attention.checks import check_count
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.multiscale.cluster import KeyClusters
from hsa.attention.multiscale.selection import Partition, Selection
from hsa.attention.multiscale.torch_lists import entries_seen
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Flops:
    """Numbers of operations of one attention layer on one batch.

    >>> count = flops(Hierarchy.regular([4096], (16, 16)), width=768, heads=12)
    >>> count.total == count.attention + count.pooling
    True
    """

    attention: int
    pooling: int
    selection: int = 0
    clustering: int = 0

    @property
    def total(self) -> int:
        """Number of all operations."""
        return self.attention + self.pooling + self.selection + self.clustering


def flops(
    structure: Hierarchy | Partition | Selection | TileSelection,
    width: int,
    heads: int,
    *,
    hierarchy: Hierarchy | None = None,
    clusters: KeyClusters | None = None,
    value_width: int | None = None,
    mixes: bool = False,
) -> Flops:
    """Count the operations of a layer: hierarchical attention for a tree, multiscale or clustered for a selection.

    Keys that a causal query may not see are not counted, except for a `Partition`, which does not know them, and for a
    `TileSelection`, whose tiles multiply them too.

    Args:
        structure: Tree for hierarchical attention; `Selection` or `Partition` for multiscale attention; `TileSelection` for
            clustered attention.
        width: Width of queries and keys, over all heads.
        heads: Number of query heads.
        hierarchy: Tree of the selection or partition.
        clusters: Clusters of the keys, whose computation is counted too.
        value_width: Width of the values over all heads; `width` by default.
        mixes: Whether heads are mixed (`HeadMixing`).

    >>> flops(Hierarchy.flat([12]), width=768, heads=12).attention == flops_flat(12, width=768, heads=12)
    True
    """
    _check(width=width, heads=heads)
    _check_structure(structure)
    if isinstance(structure, TileSelection):
        from hsa.attention.clustered.flops import operations

        return operations(structure, width, heads, value_width=value_width)
    entry = entry_operations(width, heads, value_width=value_width, mixes=mixes)
    if isinstance(structure, Hierarchy):
        sizes = structure.structure.num_children.astype(np.int64)
        entries = int((sizes**2).sum())
        widths = 2 * width + (value_width or width)
        return Flops(attention=entry * entries, pooling=pooling_operations(structure, widths))
    if hierarchy is None:
        raise InvalidInput(
            "hierarchy", problem="not given", expected=f"the tree of the {type(structure).__name__.lower()}"
        )
    partition = structure.partition(hierarchy) if isinstance(structure, Selection) else structure
    limit = structure.limit if isinstance(structure, Selection) else None
    entries = entries_seen(partition, rooted(hierarchy)[0], limit, heads)
    attention = entry * entries // heads
    return Flops(
        attention=attention,
        pooling=pooling_operations(hierarchy, width + (value_width or width)),
        selection=structure.scored * (2 * width // heads + 1) if isinstance(structure, Selection) else 0,
        clustering=0 if clusters is None else clusters.operations,
    )


def flops_flat(n: int, width: int, heads: int) -> int:
    """Count the operations of softmax attention over n tokens: (4·width + heads)·n².

    Args:
        n: Number of tokens.
        width: Width over all heads.
        heads: Number of heads.

    >>> flops_flat(55, width=768, heads=12)  # 9.33 MFLOPs, the paper's Table 3, MRPC
    9329100
    """
    _check(n=n, width=width, heads=heads)
    return entry_operations(width, heads) * n**2


def flops_regular(n: int, branching: Sequence[int], width: int, heads: int) -> int:
    """Count the operations of hierarchical attention over windows as the paper does, with all families padded to full size.

    Each level counts families · min(factor, nodes)² entries; the remaining nodes form one family.

    Args:
        n: Number of tokens.
        branching: Number of members per family, leaf families first.
        width: Width over all heads.
        heads: Number of heads.

    >>> flops_regular(55, (2, 4, 8, 16), width=768, heads=12)
    848100
    """
    if not isinstance(branching, Sequence):
        raise InvalidInput("branching", got=repr(branching), expected="factors, such as (16, 8)")
    _check(n=n, width=width, heads=heads, **{f"branching[{i}]": b for i, b in enumerate(branching)})
    entries, nodes = 0, n
    for factor in branching:
        families = -(-nodes // factor)
        entries += families * min(factor, nodes) ** 2
        nodes = families
    return entry_operations(width, heads) * (entries + nodes**2)


def entry_operations(width: int, heads: int, *, value_width: int | None = None, mixes: bool = False) -> int:
    """Return the number of operations for one query and one key or node, over all heads."""
    return 2 * width + 2 * (value_width or width) + heads + (4 * heads**2 if mixes else 0)


def pooling_operations(hierarchy: Hierarchy, width: int) -> int:
    """Return the number of operations for pooling: a multiplication and an addition per member and channel."""
    return 2 * width * (hierarchy.num_nodes - hierarchy.num_trees)


def _check_structure(structure: Any) -> None:
    if not isinstance(structure, (Hierarchy, Selection, Partition, TileSelection)):
        expected = "a Hierarchy, a Selection, a Partition or a TileSelection"
        raise InvalidInput("structure", got=type(structure).__name__, expected=expected)


def _check(**positive: int) -> None:
    for name, value in positive.items():
        check_count(name, value, "a positive integer", minimum=1)
