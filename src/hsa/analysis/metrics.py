"""Confusion matrix, from which scores are computed."""

from __future__ import annotations

import numpy as np


def confusion(predicted: np.ndarray, true: np.ndarray, classes: int) -> np.ndarray:
    """Count examples by true and predicted class: `[true class, predicted class]`.

    >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)
