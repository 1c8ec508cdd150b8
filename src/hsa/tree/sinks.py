"""Sinks: leaves that are children of the root, such as [CLS], [SEP] or the first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from torch import Tensor

from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.tree.hierarchy import Structure

Sinks: TypeAlias = int | Sequence[int] | Tensor | np.ndarray | None
"""Number of first leaves of every tree, positions in every tree (negative from its end), or a mask over all leaves."""


def sink_leaves(sinks: Sinks, lengths: np.ndarray) -> np.ndarray:
    """Return the sorted leaf indices of the sinks."""
    if sinks is None:
        return np.empty(0, np.int64)
    start = np.cumsum(lengths) - lengths
    if isinstance(sinks, (Tensor, np.ndarray)):
        mask = sinks.detach().cpu().numpy() if isinstance(sinks, Tensor) else sinks
        if mask.dtype != np.bool_ or mask.shape != (int(lengths.sum()),):
            raise InvalidInput(
                "sinks",
                got=f"{mask.dtype} of shape {tuple(mask.shape)}",
                expected=f"a boolean mask of shape ({int(lengths.sum())},), one entry per leaf",
                fix="Pass positions as a tuple, for example sinks=(0, -1)",
            )
        return np.flatnonzero(mask)
    if not isinstance(sinks, Sequence):
        if isinstance(sinks, bool) or not isinstance(sinks, (int, np.integer)) or sinks < 0:
            raise InvalidInput(
                "sinks", got=repr(sinks), expected="a number of first leaves (0 or more) or a sequence of positions"
            )
        number = np.minimum(min(sinks, int(lengths.max(initial=0))), lengths)
        return np.repeat(start - (np.cumsum(number) - number), number) + np.arange(int(number.sum()))
    leaves = []
    for i, position in enumerate(sinks):
        if not -lengths.min(initial=np.iinfo(np.int64).max) <= position < lengths.min(initial=np.iinfo(np.int64).max):
            raise InvalidInput(
                f"sinks[{i}]",
                got=position,
                expected=f"a position inside every tree (the shortest has {lengths.min()} leaves)",
                fix="Pass a mask over all leaves where trees differ",
            )
        leaves.append(start + (position if position >= 0 else lengths + position))
    return np.unique(np.concatenate(leaves)) if leaves else np.empty(0, np.int64)


def cut_out_sinks(structure: Structure, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return parents and first leaves of the nodes of the forest in which the sinks are children of their roots.

    Sinks split the nodes that contain them. A node becomes one piece for each run of leaves between sinks that it overlaps;
    the parent of a piece is the piece of the node's parent for the same run.
    """
    s = structure
    num_trees = len(s.leaf_offsets) - 1
    num_leaves = len(s.leaf_nodes)
    is_sink = np.zeros(num_leaves, bool)
    is_sink[sinks] = True
    after_sink = np.concatenate([[False], is_sink[:-1]])
    run = np.cumsum(~is_sink & after_sink)  # a run may span two trees, as nodes never do
    first_run = np.where(is_sink, run + 1, run)  # run of the first leaf from here on that is not a sink
    below_root = np.arange(num_trees, len(s.parent))
    first = first_run[s.first_leaf[below_root]]
    last = run[s.end_leaf[below_root] - 1]
    pieces = np.maximum(last - first + 1, 0)

    owner = np.repeat(below_root, pieces)
    piece_run = np.repeat(first - (np.cumsum(pieces) - pieces), pieces) + np.arange(len(owner))
    begin = np.zeros(len(s.parent), np.int64)  # index of each node's first piece
    begin[below_root] = num_trees + np.cumsum(pieces) - pieces
    first_of = np.zeros(len(s.parent), np.int64)
    first_of[below_root] = first
    above = s.parent[owner]
    parent_of_piece = np.where(above < num_trees, above, begin[above] + piece_run - first_of[above])
    run_start = np.flatnonzero(~is_sink & (after_sink | (np.arange(num_leaves) == 0)))
    starts = np.zeros(int(run[-1]) + 1, np.int64)
    starts[run[run_start]] = run_start
    leaf_of_piece = np.maximum(s.first_leaf[owner], starts[piece_run])

    sink_tree = np.searchsorted(s.leaf_offsets, sinks, side="right") - 1
    parent = np.concatenate([np.full(num_trees, -1), parent_of_piece, sink_tree])
    return parent, np.concatenate([s.leaf_offsets[:-1], leaf_of_piece, sinks])
