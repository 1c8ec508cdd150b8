"""The attention tree of one document, without the branches that get no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from hsa.analysis.page import CELL, CELLS, LINE, LINES, MARGIN, Page, cells_of, lay_out, percent, runs
from hsa.analysis.plots import COLORS, layer_weights, one_line, save_figure
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.signals.batch import Batch
from hsa.tree.hierarchy import Structure

_TREE, _COLUMN = 230.0, 74.0  # widths in the picture, in points: of all branches at most, of a level at most
_THICKEST, _NUMBER = 9.0, 44.0
_BRANCH, _STUB, _ASKING = COLORS[0], "#c9c9c9", COLORS[1]


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """What a leaf of a document looks at, or what its leaves do on average.

    Attributes:
        structure: of the one tree.
        weights: `[nodes]`: how much of the row falls on what is below each node; 1 at the root.
        leaf: whose row it is; None: the mean of all.
    """

    structure: Structure
    weights: np.ndarray
    leaf: int | None

    @property
    def pruned(self) -> np.ndarray:
        """`[nodes]`: those that get nothing though their parents get something: where branches are cut off."""
        s = self.structure
        return (self.weights == 0) & (s.parent >= 0) & (self.weights[s.parent] > 0)

    @property
    def gone(self) -> float:
        """Share of the leaves that get no weight."""
        return float((self.weights[self.structure.leaf_nodes] == 0).mean())

    @property
    def branches_gone(self) -> tuple[int, int]:
        """Nodes between root and leaves that get no weight, and how many there are."""
        s = self.structure
        inner = ~s.is_leaf & (s.parent >= 0)
        return int((self.weights[inner] == 0).sum()), int(inner.sum())


def attention_tree(
    model: Classifier,
    example: Batch,
    *,
    leaf: int | None = None,
    layer: int = 0,
    head: int | None = None,
) -> AttentionTree:
    """The weights of a row, added up over the tree.

    Args:
        example: a batch of one tree.
        leaf: the one that looks; the mean over all by default.
        layer, head: of the model; the mean over heads by default.

    Raises:
        InvalidInput: not one tree; no such leaf, layer or head; a model without a matrix of weights.
    """
    weights, hierarchy = layer_weights(model, example, layer)
    if hierarchy.num_trees != 1:
        raise InvalidInput("example", given=f"{hierarchy.num_trees} trees", expected="one document")
    for name, number, most in (("leaf", leaf, hierarchy.num_leaves), ("head", head, len(weights))):
        if number is not None and not 0 <= number < most:
            raise InvalidInput(name, given=number, expected=f"from 0 to {most - 1}")
    matrix = weights.mean(0) if head is None else weights[head]
    row = matrix.mean(0) if leaf is None else matrix[leaf]
    s = hierarchy.structure
    weights_of = [row[first:end].sum(dtype=np.float64) for first, end in zip(s.first_leaf, s.end_leaf, strict=True)]
    return AttentionTree(s, np.array(weights_of), leaf)


def plot_sparse_tree(path: Path, tree: AttentionTree, labels: Sequence[str] | None, title: str) -> None:
    """Branches as thick as their weight, from the root to sentences (whatever leaf families are) and their words.

    Where attention gives nothing a branch ends in a grey stub and the words are grey. Long sentences are wrapped, long
    documents cut.

    Args:
        labels: of the leaves; one that begins a word begins with a space, so that pieces of a word stand together.

    Raises:
        InvalidInput: not one label per leaf.
    """
    s = tree.structure
    rows = runs(s.parent[s.leaf_nodes])
    words, cells = lay_out(labels, rows)
    shown = [cell for cell in cells if cell[0] < LINES]
    depth = int(s.depth[~s.is_leaf].max(initial=0))
    column = min(_COLUMN, _TREE / max(1, depth))
    left = MARGIN + (depth + 0.5) * column + _NUMBER
    top = 3.4 * LINE
    bottom = top + (shown[-1][0] + 1) * LINE
    cut = len(shown) < len(cells)
    page = Page(left + (CELLS + 1) * CELL + MARGIN, bottom + (cut + 2.8) * LINE)
    page.write(MARGIN, 0.3 * LINE, one_line(title, CELLS), fontsize=10, color="black")
    page.write(MARGIN, 1.3 * LINE, _what(tree, words))

    line = np.array([cell[0] for cell in shown])
    middle = _heights(s, top + (line + 0.5) * LINE)
    _Branches(page, tree, middle, column).draw(rows, left - _NUMBER)
    weights = tree.weights[s.leaf_nodes]
    strength = np.sqrt(weights / (weights.max() or 1.0))  # they span orders of magnitude: a root shows small ones too
    for i, ((row, cell), word) in enumerate(zip(shown, words, strict=False)):
        x, y = left + cell * CELL, top + row * LINE
        if weights[i]:
            page.word(x, y, word, float(strength[i]))
        else:
            page.write(x, y, word, family="monospace", color="#b5b5b5")
        if i == tree.leaf:
            page.frame(x, y + 1, cells_of(word) * CELL, LINE - 2, _ASKING)
    if cut:
        rest = percent(weights[len(shown) :].sum())
        page.write(left, bottom, f"… and {len(cells) - len(shown):,} more, which get {rest} together")
    page.legend(left, float(weights.max()), "of the row's weight")
    save_figure(page.figure, path)


def _what(tree: AttentionTree, words: Sequence[str]) -> str:
    who = "What all leaves look at, on average." if tree.leaf is None else f"What “{words[tree.leaf]}” looks at."
    gone, branches = tree.branches_gone
    return f"{who} No weight at all: {percent(tree.gone)} of the leaves, {gone:,} of {branches:,} branches"


def _heights(s: Structure, of_leaves: np.ndarray) -> np.ndarray:
    """`[nodes]`: the middle of what is shown of each; no number where nothing is."""
    middle = np.full(len(s.parent), np.nan)
    for node in range(len(middle)):
        first, end = int(s.first_leaf[node]), min(int(s.end_leaf[node]), len(of_leaves))
        if first < end:
            middle[node] = (of_leaves[first] + of_leaves[end - 1]) / 2
    return middle


@dataclass
class _Branches:
    page: Page
    tree: AttentionTree
    middle: np.ndarray
    column: float

    def draw(self, rows: np.ndarray, words: float) -> None:
        """To every inner node from its parent, and from there to `words`, the edge of the text, with what a line gets."""
        s, weights, pruned = self.tree.structure, self.tree.weights, self.tree.pruned
        visible = ~np.isnan(self.middle)
        inner = np.flatnonzero(~s.is_leaf & (s.parent >= 0) & visible)
        for node in sorted(inner.tolist(), key=lambda node: not pruned[node]):  # stubs lie below the others
            if weights[node] or pruned[node]:
                self._branch(self._point(int(s.parent[node])), self._point(node), float(weights[node]))
        for first, end in pairwise(rows.tolist()):
            leaves = s.leaf_nodes[first:end]
            here = self.middle[leaves][visible[leaves]]
            parent = int(s.parent[leaves[0]])
            if len(here):
                y, weight = float(here[0] + here[-1]) / 2, float(weights[leaves].sum())
                if weights[parent]:
                    self._branch(self._point(parent), (words, y), weight)
                look = {"ha": "right", "color": "#555555" if weight else _STUB}
                self.page.write(words + _NUMBER - 8, y - LINE / 2, percent(weight), **look)

    def _point(self, node: int) -> tuple[float, float]:
        return MARGIN + self.column * float(self.tree.structure.depth[node]), float(self.middle[node])

    def _branch(self, start: tuple[float, float], end: tuple[float, float], weight: float) -> None:
        (x0, y0), (x1, y1) = start, end
        bend, strong = (x0 + x1) / 2, min(weight, 1.0) ** 0.5
        curve = [(x0, y0), (bend, y0), (bend, y1), (x1, y1)]
        if weight:
            self.page.curve(curve, max(0.7, _THICKEST * strong), _BRANCH, 0.3 + 0.7 * strong)
        else:  # half of the way
            self.page.curve(_first_half(curve), 0.9, _STUB)


def _first_half(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of a Bézier curve, by de Casteljau.

    >>> _first_half([(0, 0), (2, 0), (2, 4), (4, 4)])[-1]
    (2.0, 2.0)
    """
    points, half = list(curve), [curve[0]]
    while len(points) > 1:
        points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairwise(points)]
        half.append(points[0])
    return half
