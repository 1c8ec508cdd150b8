"""Figure with lines of words in a monospaced font, and coloured boxes behind them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from hsa.analysis.plots import DPI, one_line, pyplot
from hsa.errors import InvalidInput

# Sizes in points. A cell is the width of a character of the monospaced font; it is a whole number of pixels because
# matplotlib draws characters at whole pixels.
CELL = 10 * 72 / DPI
FONT, LINE, MARGIN = CELL / 0.602, 15.0, 14.0
CELLS, LINES = 92, 60  # maximum per line, per figure
DARKEST = 0.85  # of the colour map, behind words


class Page:
    """Figure with coordinates in points from its upper left corner."""

    def __init__(self, width: float, height: float):
        self.height = height
        plt = pyplot()
        from matplotlib.patches import PathPatch

        self.shades = plt.get_cmap("Blues")
        self.rectangle = plt.Rectangle
        self.patch = PathPatch
        self.figure = plt.figure(figsize=(width / 72, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def write(self, x: float, y: float, text: str, **look: Any) -> None:
        """Write text into the line with the upper edge `y`."""
        look = {"fontsize": FONT, "color": "#555555", "parse_math": False, **look}
        self.axes.text(x, y + 0.72 * LINE, text, **look)

    def box(self, x: float, y: float, width: float, height: float, color: Any) -> None:
        self.axes.add_patch(self.rectangle((x, y), width, height, color=color, lw=0))

    def word(self, x: float, y: float, word: str, strong: float) -> None:
        """Write a word on a box whose darkness is `strong`, from 0 to 1."""
        self.box(x, y + 1, cells_of(word) * CELL, LINE - 2, self.shades(DARKEST * strong))
        self.write(x, y, word, family="monospace", color="white" if strong > 0.7 else "#222222")

    def frame(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.axes.add_patch(self.rectangle((x, y), width, height, fill=False, ec=color, lw=1.4))

    def curve(self, points: Sequence[tuple[float, float]], width: float, color: str, alpha: float = 1.0) -> None:
        """Draw a straight line between two points, or a Bézier curve with four control points."""
        from matplotlib.path import Path as Curve

        codes = [Curve.MOVETO] + [Curve.LINETO if len(points) == 2 else Curve.CURVE4] * (len(points) - 1)
        self.axes.add_patch(self.patch(Curve(points, codes), fill=False, ec=color, lw=width, alpha=alpha))

    def legend(self, x: float, most: float, of: str) -> None:
        """Draw the colour scale, from 0 to `most`, with the label `of`, at the bottom."""
        y, size = self.height - 1.9 * LINE, 120.0
        scale, extent = np.linspace(0, DARKEST, 64)[None], (x, x + size, y + LINE - 4, y)
        self.axes.imshow(scale, cmap=self.shades, vmin=0, vmax=1, extent=extent, aspect="auto")
        for share, side in ((0.0, "left"), (0.25, "center"), (1.0, "right")):
            self.write(x + size * share**0.5, y + 0.8 * LINE, percent(most * share), ha=side)
        self.write(x + size + 8, y - 2, of)


def lay_out(labels: Sequence[str] | None, rows: np.ndarray) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the text of each leaf, and its line and first cell (see `word_cells`).

    Args:
        labels: Texts of the leaves, with a leading space at the start of a word; None for the numbers of the leaves.
        rows: Offsets of the runs of leaves that begin a new line.

    Raises:
        InvalidInput: There is not one label per leaf.
    """
    leaves = int(rows[-1])
    if labels is not None and len(labels) != leaves:
        raise InvalidInput("labels", got=len(labels), expected=f"{leaves} labels, one per leaf")
    words = [one_line(label, CELLS - 2) for label in labels or map(str, range(leaves))]
    begins = [labels is None or label[:1].isspace() for label in labels or words]
    return words, word_cells(rows, [cells_of(word) for word in words], begins)


def word_cells(rows: np.ndarray, cells: Sequence[int], begins: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the line and the first cell of every leaf. A row begins a new line and wraps if it is too long.

    Args:
        rows: Offsets of the rows.
        cells: Width of every leaf.
        begins: Whether a leaf begins a word, with a space before it. Words are broken only if they fit in no line.
    """
    starts, line = [], -1
    for first, end in pairwise(rows.tolist()):
        line, cell = line + 1, 0
        for i in range(first, end):
            start = cell + (begins[i] and cell > 0)
            needed = cells[i]
            if begins[i]:
                word = cells[i] + sum(cells[j] for j in takewhile(lambda j: not begins[j], range(i + 1, end)))
                needed = word if word <= CELLS - 2 else needed
            if start and start + needed > CELLS:
                line, start = line + 1, 2  # wrapped lines are indented
            starts.append((line, start))
            cell = start + cells[i]
    return starts


def percent(share: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.123), percent(0.0123), percent(0.0), percent(1e-5)
    ('12 %', '1.2 %', '0 %', '< 0.1 %')
    """
    if 0 < share < 0.0005:
        return "< 0.1 %"
    digits = 1 if 0 < share < 0.095 else 0
    return f"{100 * share:.{digits}f} %"


def cells_of(word: str) -> int:
    """Return the width of a word in cells: East Asian characters take two cells, combining accents none."""
    wide = sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in word)
    return max(1, min(wide, CELLS - 2))


def runs(values: np.ndarray) -> np.ndarray:
    """Return the offsets of the runs of equal values."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1], [True]]))
