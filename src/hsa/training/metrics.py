"""Scores of predictions: accuracy and F1, or R² and mean absolute error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsa.analysis.metrics import confusion, scores_by_class


@dataclass(frozen=True)
class Scores:
    """Accuracy and macro F1 of predicted classes, or R² and mean absolute error of predicted numbers."""

    accuracy: float | None = None
    f1: float | None = None
    r2: float | None = None
    mean_absolute_error: float | None = None

    @property
    def shown(self) -> dict[str, float]:
        """Scores by their names in tables."""
        if self.accuracy is not None:
            return {"accuracy": self.accuracy, "F1": self.f1 or 0.0}
        return {"R²": self.r2 or 0.0, "error": self.mean_absolute_error or 0.0}

    @property
    def main(self) -> float:
        """Score that models and epochs are selected by: accuracy or R²."""
        return float(self.accuracy if self.accuracy is not None else self.r2 or 0.0)


def class_scores(predicted: np.ndarray, true: np.ndarray, classes: int) -> Scores:
    """Return the accuracy, and the mean F1 over the classes that occur or are predicted.

    >>> class_scores(np.array([0, 1, 1]), np.array([0, 0, 1]), 3)
    Scores(accuracy=0.6666666666666666, f1=0.6666666666666666, r2=None, mean_absolute_error=None)
    """
    table = confusion(predicted, true, classes)
    seen = table.sum(0) + table.sum(1) > 0
    _, _, f1 = scores_by_class(table)
    return Scores(accuracy=float(np.trace(table) / len(true)), f1=float(f1[seen].mean()))


def number_scores(predicted: np.ndarray, true: np.ndarray) -> Scores:
    """Return R² (1 − squared error / variance; 0 if all true numbers are equal) and the mean absolute error.

    >>> number_scores(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    Scores(accuracy=None, f1=None, r2=0.5, mean_absolute_error=0.5)
    """
    variance = float(((true - true.mean()) ** 2).mean())
    error = float(((predicted - true) ** 2).mean())
    return Scores(
        r2=1 - error / variance if variance else 0.0, mean_absolute_error=float(np.abs(predicted - true).mean())
    )
