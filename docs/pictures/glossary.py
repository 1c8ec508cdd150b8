"""Picture of the glossary: `python docs/pictures/glossary.py` writes docs/pictures/glossary.png.

The words, the tree and the query are fixed; the rest is computed. `hsa.select` makes the selection and `Selection.partition`
lists the keys that the query attends to. Queries and keys are random, except that the key of "ferry" resembles the query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch

import hsa

TEXT = "[CLS] our ferry left at dawn and at noon it found the little island of the birds"
WORDS = TEXT.split()
QUERY, MATCH = WORDS.index("it"), WORDS.index("ferry")
BRANCHING = (2, 2)
DARK = "#2b2d42"
COLORS = {
    "sink": "#c8405a",
    "selected": "#dd8a14",
    "near": "#3b9567",
    "own": "#1f6f8b",
    "pooled": "#7856a8",
    "hidden": "#b2b2b2",  # below a pooled node
    "expanded": "#8a8a8a",  # above exact leaves
}
WIDTH, HEIGHT, GAP = 0.94, 0.52, 0.36  # of a leaf's box; between families
POOLED = (1.62, 0.7)  # size of a pooled node's box
LEVELS = {0: "leaves", 1: "leaf families", 2: "families\nof families", 3: "root"}
STEP = 1.36  # between levels
TILE_Y, LIST_Y = -1.5, -3.06


class Layout:
    """Coordinates of the nodes, and the role of each in the attention of the query."""

    def __init__(self) -> None:
        self.tree = hsa.Hierarchy.regular([len(WORDS)], BRANCHING, sinks=1)
        torch.manual_seed(0)
        q, k = torch.randn(2, len(WORDS), 1, 16).unbind(0)
        k[MATCH] = 3 * q[QUERY]
        selection = hsa.select(q, k, self.tree, near=1, top_k=1)
        neighbourhood = hsa.select(q, k, self.tree, near=1)

        structure = self.tree.structure
        self.parent: list[int] = structure.parent.tolist()
        self.leaves: list[int] = structure.leaf_nodes.tolist()
        self.words = dict(zip(self.leaves, WORDS, strict=True))
        group = int(selection.queries.group[QUERY])
        self.tile = range(*selection.queries.offsets[group : group + 2].tolist())
        self.neighbours = set(neighbourhood.families[group, 0].tolist())
        partition = selection.partition(self.tree)
        listed = partition.nodes[slice(*partition.offsets[group : group + 2].tolist())].tolist()
        self.attended: list[int] = sorted(listed, key=lambda node: int(structure.first_leaf[node]))
        self.role = {node: self._role(node) for node in range(len(self.parent))}
        self.x, self.level = self._coordinates()

    def y(self, node: int) -> float:
        return STEP * self.level[node]

    def name(self, node: int) -> str:
        return self.words.get(node) or f"pooled node\n{int(self.tree.leaf_count[node])} keys"

    def _role(self, node: int) -> str:
        """Return the key of the node's colour."""
        if node in self.attended:
            family, own = self.parent[node], self.parent[self.leaves[QUERY]]
            if node not in self.words:
                return "pooled"
            if self.parent[family] < 0:
                return "sink"
            return "own" if family == own else "near" if family in self.neighbours else "selected"
        while node >= 0 and node not in self.attended:
            node = self.parent[node]
        return "expanded" if node < 0 else "hidden"

    def _coordinates(self) -> tuple[dict[int, float], dict[int, int]]:
        x: dict[int, float] = {}
        at = 0.0
        for leaf, before in zip(self.leaves, [-1, *self.leaves], strict=False):
            at += 1.0 if before >= 0 and self.parent[before] == self.parent[leaf] else 1.0 + GAP
            x[leaf] = at
        level = dict.fromkeys(self.leaves, 0)
        for node in reversed(range(len(self.parent))):
            if node not in x:
                children = [child for child, above in enumerate(self.parent) if above == node]
                x[node] = (min(x[child] for child in children) + max(x[child] for child in children)) / 2
                level[node] = 1 + max(level[child] for child in children)
        return x, level


def box(axes: Any, x: float, y: float, text: str, color: str, *, filled: bool = True) -> None:
    """Draw a word or, where the text has two lines, a pooled node."""
    is_pooled = "\n" in text
    width, height = POOLED if is_pooled else (WIDTH, HEIGHT)
    rounded(axes, x - width / 2, y - height / 2, width, height, color if filled else "white", color)
    style: Any = {"ha": "center", "color": "white" if filled else color, "zorder": 4}
    if is_pooled:
        axes.text(x, y - 0.01, text, va="center", fontsize=9.8, linespacing=1.15, **style)
    else:
        axes.text(x, y - 0.085, text, va="baseline", fontsize=11.2, **style)


def rounded(
    axes: Any, x: float, y: float, width: float, height: float, fill: str, edge: str, radius: float = 0.12, **style: Any
) -> None:
    shape = f"round,pad=0,rounding_size={radius}"
    style = {"lw": 1.3, "zorder": 3, **style}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=fill, edgecolor=edge, **style))


def draw_tree(axes: Any, layout: Layout) -> None:
    for node, above in enumerate(layout.parent):
        if above >= 0:
            hidden = layout.role[node] == "hidden"
            bend = layout.y(above) - STEP / 2
            xs = [layout.x[node], layout.x[node], layout.x[above], layout.x[above]]
            ys = [layout.y(node), bend, bend, layout.y(above)]
            axes.plot(xs, ys, color="#dedede" if hidden else "#9a9a9a", lw=1.5, zorder=0 if hidden else 1)
    for node, role in layout.role.items():
        if node in layout.words or role == "pooled":
            box(axes, layout.x[node], layout.y(node), layout.name(node), COLORS[role], filled=role != "hidden")
        else:
            axes.plot(layout.x[node], layout.y(node), "o", ms=11, mfc="white", mec=COLORS[role], mew=1.5, zorder=3)
    for level, text in LEVELS.items():
        axes.text(0.5, STEP * level, text, ha="right", va="center", fontsize=11.5, color="#808080", linespacing=1.1)


def draw_roles(axes: Any, layout: Layout) -> None:
    """Write under each exact family why it is exact."""
    texts = {"sink": "sink", "selected": "selected group\n(top_k = 1)", "near": "near = 1", "own": "own family"}
    for family in dict.fromkeys(layout.parent[leaf] for leaf in layout.leaves):
        members = [leaf for leaf in layout.leaves if layout.parent[leaf] == family]
        role = layout.role[members[0]]
        if role in texts:
            x = (layout.x[members[0]] + layout.x[members[-1]]) / 2
            style: Any = {"fontsize": 12, "fontweight": "bold", "color": COLORS[role], "linespacing": 1.1}
            axes.text(x, -0.66 - 0.3 * texts[role].count("\n"), texts[role], ha="center", va="baseline", **style)


def draw_tile(axes: Any, layout: Layout) -> None:
    xs = [layout.x[layout.leaves[i]] for i in layout.tile]
    left, right = xs[0] - 0.66, xs[-1] + 0.66
    rounded(axes, left, TILE_Y - 0.42, right - left, 0.84, "#eef3f7", DARK, 0.2, ls=(0, (4, 2)), zorder=1)
    for i, x in zip(layout.tile, xs, strict=True):
        box(axes, x, TILE_Y, WORDS[i], DARK, filled=i == QUERY)
    style: Any = {"va": "center", "fontsize": 12, "color": DARK}
    axes.text(left - 0.16, TILE_Y, "the query", ha="right", fontweight="bold", **style)
    axes.text(right + 0.16, TILE_Y, "and its tile: the queries that share a selection", ha="left", **style)


def draw_list(axes: Any, layout: Layout) -> None:
    """Draw the keys that the query attends to, in the order of the text."""
    gap = 0.12
    widths = [WIDTH if node in layout.words else POOLED[0] for node in layout.attended]
    middle = (min(layout.x.values()) + max(layout.x.values())) / 2
    at = middle - (sum(widths) + gap * (len(widths) - 1)) / 2
    for node, width in zip(layout.attended, widths, strict=True):
        box(axes, at + width / 2, LIST_Y, layout.name(node), COLORS[layout.role[node]])
        at += width + gap
    text = f"“{WORDS[QUERY]}” attends to {len(layout.attended)} keys instead of {len(WORDS)}"
    axes.text(middle, LIST_Y + 0.66, text, ha="center", va="center", fontsize=12, color=DARK)


def main() -> None:
    layout = Layout()
    figure = plt.figure(figsize=(12.6, 6))
    axes = figure.add_axes((0, 0, 1, 1))
    for draw in (draw_tree, draw_roles, draw_tile, draw_list):
        draw(axes, layout)
    axes.set(xlim=(-1.2, max(layout.x.values()) + 0.6), ylim=(LIST_Y - 0.4, 3 * STEP + 0.3))
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=160, bbox_inches="tight", pad_inches=0.12)


if __name__ == "__main__":
    main()
