"""Picture of HAN's pooling weights: which sentences and words of a document the model used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hsa.analysis.page import CELL, CELLS, LINE, LINES, MARGIN, Page, lay_out, percent, runs
from hsa.analysis.plots import COLORS, one_line, save_figure
from hsa.baselines.han.model import HanEncoder
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.registry import Explanation
from hsa.nn.inputs import Inputs
from hsa.signals.batch import Batch

_BAR, _NUMBER = 60.0, 36.0  # widths of a bar and of its label, in points


@dataclass(frozen=True, eq=False)
class DocumentWeights:
    """Weight of every leaf in the vector of its document, and the document's sentences and top-level parts.

    Attributes:
        leaves: `[leaves]` Products of the pooling weights from the root down to the leaf; they sum to one.
        rows: `[rows + 1]` Leaf offsets of the sentences, which are runs of leaves of one family.
        parts: `[parts + 1]` Leaf offsets of the root's members (paragraphs, for example). Neighbouring members that are
            leaves form one part.
    """

    leaves: np.ndarray
    rows: np.ndarray
    parts: np.ndarray

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """Return the total weight of each run of leaves; for `rows`, this is the weight of the family."""
        return np.add.reduceat(self.leaves, offsets[:-1])


def document_weights(encoder: HanEncoder, example: Inputs) -> DocumentWeights:
    """Return the leaf weights of one document, the products of its pooling weights over all levels.

    Args:
        encoder: Encoder to run.
        example: Batch of one tree.

    Raises:
        InvalidInput: If the batch does not hold exactly one tree.

    >>> from hsa import Signal, collate
    >>> from hsa.baselines.han.model import HanConfig
    >>> from hsa.nn.embedding import Modality
    >>> from hsa.signals import Sequence
    >>> document = Signal(Sequence(2), [Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> weights = document_weights(HanEncoder(HanConfig(width=16), {"text": Modality(tokens=10)}), collate([document]))
    >>> weights.rows.tolist(), round(float(weights.leaves.sum()), 5)
    ([0, 3, 5], 1.0)
    """
    hierarchy = example.hierarchy
    if hierarchy.num_trees != 1:
        raise InvalidInput("example", got=f"{hierarchy.num_trees} trees", expected="one document")
    s = hierarchy.structure
    share = np.ones(hierarchy.num_nodes)
    for level in reversed(encoder.weights(example)):  # from the root down
        weights = level.weights.double().cpu().numpy()
        share[level.nodes.cpu().numpy()] = share[level.families.cpu().numpy()] * weights
    part = np.zeros(hierarchy.num_leaves, np.int64)  # 0, the root, for leaves that are members of the root
    for child in np.flatnonzero((s.parent == 0) & ~s.is_leaf):
        part[s.first_leaf[child] : s.end_leaf[child]] = child
    return DocumentWeights(share[s.leaf_nodes], runs(s.parent[s.leaf_nodes]), runs(part))


def plot_document_weights(
    path: Path, encoder: HanEncoder, example: Batch, labels: Sequence[str] | None, title: str
) -> None:
    """Draw one line per sentence, with a bar for its weight in the document and its words shaded by their weights.

    Documents with more than two levels also have a bar for every member of the root. Long sentences are wrapped, and long
    documents are cut.

    Args:
        path: File to write.
        encoder: Encoder to run.
        example: Batch of one tree.
        labels: Labels of the leaves. A label that begins a word starts with a space, so that pieces of a word are drawn
            together.
        title: Title of the picture.

    Raises:
        InvalidInput: If there is not exactly one tree, or not one label per leaf.
    """
    weights = document_weights(encoder, example)
    words, cells = lay_out(labels, weights.rows)
    shown = [cell for cell in cells if cell[0] < LINES]
    has_parts = len(weights.parts) > 2 and not np.array_equal(weights.parts, weights.rows)
    left = MARGIN + (1 + has_parts) * (_BAR + _NUMBER)
    top = 3.2 * LINE
    bottom = top + (shown[-1][0] + 1) * LINE
    page = Page(left + (CELLS + 1) * CELL + MARGIN, bottom + ((len(shown) < len(cells)) + 2.4) * LINE)

    page.write(MARGIN, 0.4 * LINE, one_line(title, CELLS), fontsize=10, color="black")
    columns = [("top level", weights.parts, COLORS[3])] if has_parts else []
    for i, (name, offsets, color) in enumerate([*columns, ("sentence", weights.rows, COLORS[1])]):
        x, shares = MARGIN + i * (_BAR + _NUMBER) + _NUMBER, weights.of(offsets)
        page.write(x, top - 1.2 * LINE, name)
        for first, end, weight in zip(offsets[:-1], offsets[1:], shares, strict=True):
            if first < len(shown):
                y, last = (top + shown[leaf][0] * LINE for leaf in (first, min(end, len(shown)) - 1))
                page.write(x - 5, y, percent(weight), ha="right")
                page.box(x, y + 3, (_BAR - 10) * weight / shares.max(), LINE - 6, color)
                page.box(x, y + 3, 1.2, last - y + LINE - 6, color)  # a rule beside all its lines

    page.write(left, top - 1.2 * LINE, "words")
    # Weights span orders of magnitude; the square root keeps small ones visible.
    strength = np.sqrt(weights.leaves / weights.leaves.max())
    for (line, cell), word, strong in zip(shown, words, strength, strict=False):
        page.word(left + cell * CELL, top + line * LINE, word, strong)
    if len(shown) < len(cells):
        rest = percent(weights.leaves[len(shown) :].sum())
        page.write(left, bottom, f"… and {len(cells) - len(shown):,} more, with a total weight of {rest}")
    page.legend(left, weights.leaves.max(), "of the document's weight")
    save_figure(page.figure, path)


def _draw(path: Path, model: Classifier, example: Batch, labels: Sequence[str] | None, title: str) -> None:
    plot_document_weights(path, model.encoder, example, labels, title)


DOCUMENT_WEIGHTS = Explanation("weights.png", 400, _draw)
