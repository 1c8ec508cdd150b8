"""Padding of packed sequences in groups of similar size, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_STEP = 64  # sizes are rounded up to a multiple of it if there are more sequences than _FEW
_FEW = 8


def group_by_size(*sizes: np.ndarray) -> list[np.ndarray]:
    """Group sequences of the same size, or of similar size if there are many, so that each group shares one padded call.

    Args:
        sizes: One or more sizes of each sequence, such as its length, `[sequences]` each.

    >>> [group.tolist() for group in group_by_size(np.array([5, 3, 5]))]
    [[1], [0, 2]]
    """
    step = _STEP if len(sizes[0]) > _FEW else 1
    kind = np.zeros_like(sizes[0])
    for size in sizes:  # encode all sizes in one number, which sorts ten times as fast as rows of numbers
        rounded = -(-size // step)
        kind = kind * (1 + rounded.max(initial=0)) + rounded
    return [np.flatnonzero(kind == same) for same in np.unique(kind)]


def padded_rows(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the packed row of every slot in a padded batch, `[sequences, longest]`; padding repeats a sequence's last row.

    >>> padded_rows(np.array([0, 7]), np.array([3, 1])).tolist()
    [[0, 1, 2], [7, 7, 7]]
    """
    return first[:, None] + np.minimum(np.arange(length.max()), length[:, None] - 1)


def rows_after_padding(groups: Sequence[np.ndarray], first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the slot of every packed row in the concatenation of all padded groups, `[rows]`.

    >>> rows_after_padding([np.array([1]), np.array([0])], np.array([0, 2]), np.array([2, 1]))
    array([1, 2, 0])
    """
    back = np.empty(int(length.sum()), np.int64)
    done = 0
    for group in groups:
        rows = padded_rows(first[group], length[group])
        real = np.arange(rows.shape[1]) < length[group][:, None]
        back[rows[real]] = done + np.flatnonzero(real)
        done += rows.size
    return back
