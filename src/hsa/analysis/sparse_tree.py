"""Plot of the attention of one document as a tree, with the branches cut off that receive no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from hsa.analysis.attention_matrix import layer_weights
from hsa.analysis.page import CELL, CELLS, LINE, LINES, MARGIN, Page, cells_of, lay_out, percent, runs
from hsa.analysis.plots import COLORS, one_line, save_figure
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.signals.batch import Batch
from hsa.tree.hierarchy import Structure

_TREE, _COLUMN = 230.0, 74.0  # maximum widths of all branches and of a level, in points
_THICKEST, _NUMBER = 9.0, 44.0  # widths of the thickest branch and of the column of numbers
_BRANCH, _STUB, _QUERY = COLORS[0], "#c9c9c9", COLORS[1]


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """Attention weights of one leaf of a document, or the mean over its leaves, summed over the tree.

    Attributes:
        structure: Structure of the tree.
        weights: Total weight of the leaves below each node, `[nodes]`; 1 at the root.
        leaf: Index of the leaf that attends; None for the mean over all leaves.
    """

    structure: Structure
    weights: np.ndarray
    leaf: int | None

    @property
    def pruned(self) -> np.ndarray:
        """Mask of the nodes without weight whose parents have some, `[nodes]`: where branches are cut off."""
        s = self.structure
        return (self.weights == 0) & (s.parent >= 0) & (self.weights[s.parent] > 0)

    @property
    def gone(self) -> float:
        """Share of the leaves without weight."""
        return float((self.weights[self.structure.leaf_nodes] == 0).mean())

    @property
    def branches_gone(self) -> tuple[int, int]:
        """Number of nodes between root and leaves without weight, and number of all such nodes."""
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
    """Return the attention weights of a leaf, summed over the tree.

    Args:
        model: Model with a matrix of attention weights.
        example: Batch of one tree.
        leaf: Index of the leaf that attends; by default the mean over all leaves.
        layer: Index of the layer.
        head: Index of the head; by default the mean over all heads.

    Raises:
        InvalidInput: There is not exactly one tree, no such leaf, layer or head, or no matrix of weights.
    """
    weights, hierarchy = layer_weights(model, example, layer)
    if hierarchy.num_trees != 1:
        raise InvalidInput("example", got=hierarchy.num_trees, expected="one tree")
    for name, number, most in (("leaf", leaf, hierarchy.num_leaves), ("head", head, len(weights))):
        if number is not None and not 0 <= number < most:
            raise InvalidInput(name, got=number, expected=f"an index from 0 to {most - 1}")
    matrix = weights.mean(0) if head is None else weights[head]
    row = matrix.mean(0) if leaf is None else matrix[leaf]
    s = hierarchy.structure
    weights_of = [row[first:end].sum(dtype=np.float64) for first, end in zip(s.first_leaf, s.end_leaf, strict=True)]
    return AttentionTree(s, np.array(weights_of), leaf)


def plot_sparse_tree(path: Path, tree: AttentionTree, labels: Sequence[str] | None, title: str) -> None:
    """Draw the tree from the root to the leaf families (one line each) and their leaves; thicker branches have more weight.

    Without weight, a branch ends in a grey stub and leaves are grey. Long lines are wrapped, long documents truncated.

    Args:
        path: File to write.
        tree: Result of `attention_tree`.
        labels: Texts of the leaves, with a leading space at the start of a word; None for the numbers of the leaves.
        title: Title of the plot.

    Raises:
        InvalidInput: There is not one label per leaf.
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
    page.write(MARGIN, 1.3 * LINE, _subtitle(tree, words))

    line = np.array([cell[0] for cell in shown])
    middle = _heights(s, top + (line + 0.5) * LINE)
    _Branches(page, tree, middle, column).draw(rows, left - _NUMBER)
    weights = tree.weights[s.leaf_nodes]
    strength = np.sqrt(weights / (weights.max() or 1.0))  # the square root makes small weights visible
    for i, ((row, cell), word) in enumerate(zip(shown, words, strict=False)):
        x, y = left + cell * CELL, top + row * LINE
        if weights[i]:
            page.word(x, y, word, float(strength[i]))
        else:
            page.write(x, y, word, family="monospace", color="#b5b5b5")
        if i == tree.leaf:
            page.frame(x, y + 1, cells_of(word) * CELL, LINE - 2, _QUERY)
    if cut:
        rest = percent(weights[len(shown) :].sum())
        page.write(left, bottom, f"… and {len(cells) - len(shown):,} more leaves, with {rest} of the weight in total")
    page.legend(left, float(weights.max()), "of the attention weight")
    save_figure(page.figure, path)


def _subtitle(tree: AttentionTree, words: Sequence[str]) -> str:
    whose = "Mean attention of all leaves." if tree.leaf is None else f"Attention of “{words[tree.leaf]}”."
    gone, branches = tree.branches_gone
    return f"{whose} Without any weight: {percent(tree.gone)} of the leaves, {gone:,} of {branches:,} branches"


def _heights(s: Structure, of_leaves: np.ndarray) -> np.ndarray:
    """Return the vertical centre of the visible leaves below each node, `[nodes]`; NaN if none is visible."""
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
        """Draw branches from parents to inner nodes, then to the text at x = `words`, with the weight of each line."""
        s, weights, pruned = self.tree.structure, self.tree.weights, self.tree.pruned
        visible = ~np.isnan(self.middle)
        inner = np.flatnonzero(~s.is_leaf & (s.parent >= 0) & visible)
        for node in sorted(inner.tolist(), key=lambda node: not pruned[node]):  # stubs first, below the others
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
        else:
            self.page.curve(_first_half(curve), 0.9, _STUB)


def _first_half(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the first half of a Bézier curve, by de Casteljau's algorithm.

    >>> _first_half([(0, 0), (2, 0), (2, 4), (4, 4)])[-1]
    (2.0, 2.0)
    """
    points, half = list(curve), [curve[0]]
    while len(points) > 1:
        points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairwise(points)]
        half.append(points[0])
    return half
