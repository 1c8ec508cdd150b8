"""Documents cut into segments that begin with a vector of their own: windows of their leaves, or nodes of their trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class TextSegments:
    """The rows of a model that reads segments: of each a first row of its own, its leaves, perhaps a last row.

    Attributes:
        rows: a tree per segment, a leaf per row.
        documents: a tree per document, a leaf per segment.
        source: `[rows]` the leaf in this row; one more than the last leaf for first rows, two more for last rows.
        position: `[rows]` in the segment, from 0.
        first: `[segments]` the first row.
        leaf: `[leaves]` the row.
        number: `[segments]` in the document, from 0.
    """

    rows: Hierarchy
    documents: Hierarchy
    source: Tensor
    position: Tensor
    first: Tensor
    leaf: Tensor
    number: Tensor


def text_segments(hierarchy: Hierarchy, longest: int, level: int = 0, *, last_row: bool = False) -> TextSegments:
    """The segments of every document. Built once per hierarchy.

    Args:
        longest: leaves of a segment, at most.
        level: 0: windows of `longest` leaves, the last of a document may be short. Otherwise the largest nodes of at most
            this height: 1 for families of leaves, 2 for what is above them. Neighbouring leaves that hang higher up
            are a segment together. Longer ones are cut into windows.
        last_row: segments have one.

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
    """First leaves of the largest nodes of at most this height; of neighbouring leaves among them, of the first."""
    s = hierarchy.structure
    is_top = (s.height <= level) & ~np.append(s.height <= level, False)[s.parent]  # −1: the entry appended
    follows_leaf = np.zeros(hierarchy.num_nodes, bool)  # a leaf, and its elder sibling another
    follows_leaf[1:] = s.is_leaf[1:] & s.is_leaf[:-1] & (s.parent[1:] == s.parent[:-1]) & (s.parent[1:] >= 0)
    return np.sort(s.first_leaf[is_top & ~follows_leaf])
