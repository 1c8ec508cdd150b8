"""Confusion matrix, and the scores of each class that follow from it."""

from __future__ import annotations

import numpy as np


def confusion(predicted: np.ndarray, true: np.ndarray, classes: int) -> np.ndarray:
    """Count examples by true and predicted class: `[true class, predicted class]`.

    >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)


def scores_by_class(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the precision, recall and F1 of every class of a confusion matrix; 0 for classes that never occur.

    >>> [values.round(2).tolist() for values in scores_by_class(np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]]))]
    [[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.67, 0.67, 0.0]]
    """
    correct, predicted, true = np.diag(table), table.sum(0), table.sum(1)
    both = np.maximum(predicted + true, 1)
    return correct / np.maximum(predicted, 1), correct / np.maximum(true, 1), 2 * correct / both
