"""Segments of documents: windows of leaves or nodes of the trees, each with a summary row in front."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class TextSegments:
    """Row indices of segments. A segment consists of a summary row, its leaves and, optionally, a final row.

    Attributes:
        rows: Forest with a tree per segment and a leaf per row.
        documents: Forest with a tree per document and a leaf per segment.
        source: `[rows]` Leaf in each row; the number of leaves for summary rows, plus one for final rows.
        position: `[rows]` Position in the segment, from 0.
        first: `[segments]` Summary row of each segment.
        leaf: `[leaves]` Row of each leaf.
        number: `[segments]` Index of the segment in its document, from 0.
    """

    rows: Hierarchy
    documents: Hierarchy
    source: Tensor
    position: Tensor
    first: Tensor
    leaf: Tensor
    number: Tensor


def text_segments(hierarchy: Hierarchy, longest: int, level: int = 0, *, last_row: bool = False) -> TextSegments:
    """Return the segments of every document, built once per hierarchy.

    Args:
        hierarchy: Forest of documents.
        longest: Maximum number of leaves per segment.
        level: 0 for windows of `longest` leaves; the last window of a document may be shorter. Otherwise the largest nodes
            of at most this height: 1 for leaf families, 2 for the level above. Neighbouring leaves whose parent is
            higher form one segment. Longer segments are cut into windows.
        last_row: Whether segments have a final row.

    >>> text = Hierarchy.from_nested([[3, 2], [7]])  # sentences of 3, 2 and 7 tokens
    >>> [length - 1 for length in text_segments(text, 4).rows.lengths], text_segments(text, 4).documents.lengths
    ([4, 1, 4, 3], [2, 2])
    >>> [length - 1 for length in text_segments(text, 4, 1).rows.lengths]
    [3, 2, 4, 3]
    """
    key = ("text segments", longest, level, last_row)
    return hierarchy.cached(key, lambda: _build(hierarchy, longest, level, last_row))


def _build(hierarchy: Hierarchy, longest: int, level: int, last_row: bool) -> TextSegments:
    s, device = hierarchy.structure, hierarchy.device
    starts = s.leaf_offsets[:-1] if level == 0 else _node_starts(hierarchy, level)
    runs = np.diff(np.append(starts, hierarchy.num_leaves))
    windows = -(-runs // longest)
    lengths = np.full(int(windows.sum()), longest)
    lengths[np.cumsum(windows) - 1] = runs - (windows - 1) * longest
    document = np.repeat(np.searchsorted(s.leaf_offsets, starts, side="right") - 1, windows)

    size = lengths + 1 + last_row
    end = np.cumsum(size)
    first = end - size
    segment = np.repeat(np.arange(len(size)), size)  # of every row
    leaf = np.arange(hierarchy.num_leaves) + np.repeat((1 + last_row) * np.arange(len(size)) + 1, lengths)
    source = np.full(len(segment), hierarchy.num_leaves)
    if last_row:
        source[end - 1] += 1
    source[leaf] = np.arange(hierarchy.num_leaves)
    per_document = np.bincount(document, minlength=hierarchy.num_trees)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return TextSegments(
        rows=Hierarchy.flat(size).to(device),
        documents=Hierarchy.flat(per_document).to(device),
        source=tensor(source),
        position=tensor(np.arange(len(segment)) - first[segment]),
        first=tensor(first),
        leaf=tensor(leaf),
        number=tensor(np.arange(len(size)) - (np.cumsum(per_document) - per_document)[document]),
    )


def _node_starts(hierarchy: Hierarchy, level: int) -> np.ndarray:
    """Return the first leaf of each largest node of at most this height; a run of sibling leaves counts as one node."""
    s = hierarchy.structure
    is_top = (s.height <= level) & ~np.append(s.height <= level, False)[s.parent]  # roots have parent −1: the False
    follows_leaf = np.zeros(hierarchy.num_nodes, bool)  # a leaf directly after a sibling leaf
    follows_leaf[1:] = s.is_leaf[1:] & s.is_leaf[:-1] & (s.parent[1:] == s.parent[:-1]) & (s.parent[1:] >= 0)
    return np.sort(s.first_leaf[is_top & ~follows_leaf])
