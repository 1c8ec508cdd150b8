"""Scores of every class and the confusion matrix, for `hsa evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsa.analysis.metrics import confusion, scores_by_class
from hsa.analysis.tables import print_table, terminal_table

if TYPE_CHECKING:
    from rich.console import Console

_MOST_IN_MATRIX = 10
_MOST_CLASSES = 50
_MOST_CONFUSIONS = 10


@dataclass(frozen=True, eq=False)
class ByClass:
    """Confusion matrix `[true class, predicted class]`, and what follows from it."""

    classes: tuple[str, ...]
    table: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, true: np.ndarray, classes: tuple[str, ...]) -> ByClass:
        """Return the scores for predicted and true class indices."""
        return cls(classes, confusion(predicted, true, len(classes)))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores of each class by its name, and the matrix, for JSON."""
        names = ("precision", "recall", "f1")
        columns = [values.tolist() for values in scores_by_class(self.table)]
        classes = {
            name: {**dict(zip(names, row, strict=True)), "support": support}
            for name, row, support in zip(
                self.classes, zip(*columns, strict=True), self.table.sum(1).tolist(), strict=True
            )
        }
        return {"classes": classes, "confusion": self.table.tolist()}

    def print(self, console: Console) -> None:
        """Print the scores of each class, then the matrix, or the most frequent confusions of many classes."""
        scores = self.to_dict()["classes"]
        order = sorted(scores, key=lambda name: -scores[name]["support"]) if len(scores) > _MOST_CLASSES else scores
        rows = [
            [
                name,
                *(f"{scores[name][score]:.3f}" for score in ("precision", "recall", "f1")),
                f"{scores[name]['support']:,}",
            ]
            for name in list(order)[:_MOST_CLASSES]
        ]
        more = len(scores) - len(rows)
        caption = f"the most frequent classes; --json also lists the other {more:,}" if more else None
        _print(console, ["class", "precision", "recall", "F1", "support"], rows, caption)
        if len(self.classes) <= _MOST_IN_MATRIX:
            matrix = zip(self.classes, self.table.tolist(), strict=True)
            rows = [[name, *(f"{count:,}" for count in counts)] for name, counts in matrix]
            _print(console, ["true \\ predicted", *self.classes], rows)
        elif rows := self._confusions():
            _print(
                console, ["true class", "predicted", "examples", "of the class"], rows, "the most frequent confusions"
            )

    def _confusions(self) -> list[list[str]]:
        wrong = self.table - np.diag(np.diag(self.table))
        pairs = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSIONS]
        return [
            [self.classes[i], self.classes[j], f"{wrong[i, j]:,}", f"{wrong[i, j] / self.table[i].sum():.0%}"]
            for i, j in zip(*np.unravel_index(pairs, wrong.shape), strict=True)
            if wrong[i, j]
        ]


def _print(console: Console, header: list[str], rows: list[list[str]], caption: str | None = None) -> None:
    console.print()
    print_table(console, terminal_table(header, rows, caption))
