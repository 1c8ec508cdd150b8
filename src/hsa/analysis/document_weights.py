"""Which sentences and words of a document its model pooled: a picture of the weights of `hsa.models.han`."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from hsa.analysis.plots import COLORS, DPI, one_line, pyplot, save_figure
from hsa.batch import Batch
from hsa.errors import InvalidInput
from hsa.models.han import HanEncoder
from hsa.nn.inputs import Inputs

# Sizes of the picture, in points. A cell is what a character of the monospaced font takes: whole pixels of the picture, as
# characters are put on whole pixels.
_CELL = 10 * 72 / DPI
_FONT, _LINE, _BAR, _NUMBER, _MARGIN = _CELL / 0.602, 15.0, 60.0, 36.0, 14.0
_CELLS, _LINES = 92, 60  # of a picture
_DARKEST = 0.85  # of the colours for words


@dataclass(frozen=True, eq=False)
class DocumentWeights:
    """What every leaf of a tree weighs in its vector, and how the leaves lie in it.

    Attributes:
        leaves: `[leaves]` products of the weights from the root down to the leaf; they sum to one.
        rows: `[rows + 1]` offsets of runs of leaves in one family: sentences.
        parts: `[parts + 1]` offsets of the members of the root: paragraphs, or whatever is on top. Members that are leaves
            are one part with the leaves beside them.
    """

    leaves: np.ndarray
    rows: np.ndarray
    parts: np.ndarray

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """The weights of runs of leaves: of rows, that of a family, as weights in a family sum to one."""
        return np.add.reduceat(self.leaves, offsets[:-1])


def document_weights(encoder: HanEncoder, example: Inputs) -> DocumentWeights:
    """The weights of one document, from those of all levels.

    Args:
        example: a batch of one tree.

    Raises:
        InvalidInput: more than one tree, or none.

    >>> from hsa import Signal, collate
    >>> from hsa.models.han import HanConfig
    >>> from hsa.nn.embedding import Modality
    >>> from hsa.signals import Sequence
    >>> document = Signal(Sequence(2), [Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> found = document_weights(HanEncoder(HanConfig(width=16), {"text": Modality(tokens=10)}), collate([document]))
    >>> found.rows.tolist(), round(float(found.leaves.sum()), 5)
    ([0, 3, 5], 1.0)
    """
    hierarchy = example.hierarchy
    if hierarchy.num_trees != 1:
        raise InvalidInput("example", given=f"{hierarchy.num_trees} trees", expected="one document")
    s = hierarchy.structure
    share = np.ones(hierarchy.num_nodes)
    for level in reversed(encoder.weights(example)):  # from the root down
        weights = level.weights.double().cpu().numpy()
        share[level.nodes.cpu().numpy()] = share[level.families.cpu().numpy()] * weights
    part = np.zeros(hierarchy.num_leaves, np.int64)  # 0, the root, for leaves that are its members
    for child in np.flatnonzero((s.parent == 0) & ~s.is_leaf):
        part[s.first_leaf[child] : s.end_leaf[child]] = child
    return DocumentWeights(share[s.leaf_nodes], _runs(s.parent[s.leaf_nodes]), _runs(part))


def _runs(values: np.ndarray) -> np.ndarray:
    """Offsets of the runs of equal values."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1], [True]]))


def plot_document_weights(
    path: Path, encoder: HanEncoder, example: Batch, labels: Sequence[str] | None, title: str
) -> None:
    """A line per sentence: how much of the document's vector it is, and its words, shaded by how much each is.

    A document of more levels has bars for the members of its root too. Long sentences are wrapped, long documents cut.

    Args:
        example: a batch of one tree.
        labels: of its leaves; one that begins a word begins with a space, so that pieces of a word stand together.

    Raises:
        InvalidInput: not one tree, or not one label per leaf.
    """
    found = document_weights(encoder, example)
    if labels is not None and len(labels) != len(found.leaves):
        raise InvalidInput("labels", given=len(labels), expected=f"{len(found.leaves)}, one per leaf")
    words = [one_line(label, _CELLS - 2) for label in labels or map(str, range(len(found.leaves)))]
    begins = [labels is None or label[:1].isspace() for label in labels or words]
    places = _places(found.rows, [_cells(word) for word in words], begins)
    shown = [place for place in places if place[0] < _LINES]
    has_parts = len(found.parts) > 2 and not np.array_equal(found.parts, found.rows)
    left = _MARGIN + (1 + has_parts) * (_BAR + _NUMBER)
    top = 3.2 * _LINE
    bottom = top + (shown[-1][0] + 1) * _LINE
    page = _Page(left + (_CELLS + 1) * _CELL + _MARGIN, bottom + ((len(shown) < len(places)) + 2.4) * _LINE)

    page.write(_MARGIN, 0.4 * _LINE, one_line(title, _CELLS), fontsize=10, color="black")
    columns = [("top level", found.parts, COLORS[3])] if has_parts else []
    for i, (name, offsets, color) in enumerate([*columns, ("sentence", found.rows, COLORS[1])]):
        x, weights = _MARGIN + i * (_BAR + _NUMBER) + _NUMBER, found.of(offsets)
        page.write(x, top - 1.2 * _LINE, name)
        for first, end, weight in zip(offsets[:-1], offsets[1:], weights, strict=True):
            if first < len(shown):
                y, last = (top + shown[place][0] * _LINE for place in (first, min(end, len(shown)) - 1))
                page.write(x - 5, y, _percent(weight), ha="right")
                page.box(x, y + 3, (_BAR - 10) * weight / weights.max(), _LINE - 6, color)
                page.box(x, y + 3, 1.2, last - y + _LINE - 6, color)  # how far down it reaches

    page.write(left, top - 1.2 * _LINE, "words")
    strength = np.sqrt(found.leaves / found.leaves.max())  # they span orders of magnitude: a root shows small ones too
    for (line, cell), word, strong in zip(shown, words, strength, strict=False):
        x, y = left + cell * _CELL, top + line * _LINE
        page.box(x, y + 1, _cells(word) * _CELL, _LINE - 2, page.shades(_DARKEST * strong))
        page.write(x, y, word, family="monospace", color="white" if strong > 0.7 else "#222222")
    if len(shown) < len(places):
        rest = _percent(found.leaves[len(shown) :].sum())
        page.write(left, bottom, f"… and {len(places) - len(shown):,} more, which weigh {rest} together")
    page.legend(left, found.leaves.max())
    save_figure(page.figure, path)


class _Page:
    """A figure in points, from its upper left corner."""

    def __init__(self, width: float, height: float):
        self.height = height
        plt = pyplot()
        self.shades = plt.get_cmap("Blues")
        self.rectangle = plt.Rectangle
        self.figure = plt.figure(figsize=(width / 72, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def write(self, x: float, y: float, text: str, **look: Any) -> None:
        """In the line whose upper edge is y."""
        look = {"fontsize": _FONT, "color": "#555555", "parse_math": False, **look}
        self.axes.text(x, y + 0.72 * _LINE, text, **look)

    def box(self, x: float, y: float, width: float, height: float, color: Any) -> None:
        self.axes.add_patch(self.rectangle((x, y), width, height, color=color, lw=0))

    def legend(self, x: float, most: float) -> None:
        """What the colours mean, from nothing to the most, in the last lines."""
        y, size = self.height - 1.9 * _LINE, 120.0
        scale, extent = np.linspace(0, _DARKEST, 64)[None], (x, x + size, y + _LINE - 4, y)
        self.axes.imshow(scale, cmap=self.shades, vmin=0, vmax=1, extent=extent, aspect="auto")
        for share, side in ((0.0, "left"), (0.25, "center"), (1.0, "right")):
            self.write(x + size * share**0.5, y + 0.8 * _LINE, _percent(most * share), ha=side)
        self.write(x + size + 8, y - 2, "of the document's weight")


def _places(rows: np.ndarray, cells: Sequence[int], begins: Sequence[bool]) -> list[tuple[int, int]]:
    """The line and the first cell of every leaf; a row begins a line, and goes on in the next where it is too long.

    Args:
        rows: offsets.
        cells: the width of every leaf.
        begins: whether it begins a word, with a space before it. Words are broken only where they fit in no line.
    """
    places, line = [], -1
    for first, end in pairwise(rows.tolist()):
        line, cell = line + 1, 0
        for i in range(first, end):
            start = cell + (begins[i] and cell > 0)
            needed = cells[i]
            if begins[i]:
                word = cells[i] + sum(cells[j] for j in takewhile(lambda j: not begins[j], range(i + 1, end)))
                needed = word if word <= _CELLS - 2 else needed
            if start and start + needed > _CELLS:
                line, start = line + 1, 2  # further lines stand in
            places.append((line, start))
            cell = start + cells[i]
    return places


def _percent(share: float) -> str:
    """
    >>> _percent(0.123), _percent(0.0123), _percent(0.0)
    ('12 %', '1.2 %', '0 %')
    """
    digits = 1 if 0 < share < 0.095 else 0
    return f"{100 * share:.{digits}f} %"


def _cells(word: str) -> int:
    """How wide a word is in a monospaced font, where characters of East Asia take two cells and accents none."""
    wide = sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in word)
    return max(1, min(wide, _CELLS - 2))
