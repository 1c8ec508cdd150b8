"""Positions of a token in a causal tree: its index in its leaf family, the index of that family in its parent, and so on.

Each index counts earlier members, so that it does not depend on later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hsa.nn.positions import FourierFeatures
from hsa.tree.causal_tree import cap, levels


def token_positions(
    lengths: Sequence[int], branching: Sequence[int], closes: np.ndarray | None, sinks: int, height: int
) -> np.ndarray:
    """Return the index of each token in its family, of that family in its parent, …, `[tokens, height]`.

    Args:
        lengths: Number of tokens of each sequence.
        branching: Members per family, from the leaves up.
        closes: Height up to which each token closes families, `[tokens]`; None if none does.
        sinks: Number of first tokens that share no family with later ones.
        height: Number of levels.

    >>> token_positions([7], (3, 2), None, 0, 3).T.tolist()
    [[0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    """
    all_levels = levels(lengths, branching, closes, sinks, height)
    node = np.arange(len(all_levels[0].tree))
    indices = []
    for above in all_levels[1:]:
        sizes = np.diff(above.offsets)
        parent = np.repeat(np.arange(len(sizes)), sizes)[node]
        indices.append(node - above.offsets[parent])
        node = parent
    return np.stack(indices, -1)


class TreePositionCounters:
    """Positions of the next token of every sequence, updated as tokens are appended.

    Args:
        batch: Number of sequences.
        branching: Members per family, from the leaves up.
        sinks: Number of first tokens that share no family with later ones.
        height: Number of levels.

    >>> counters = TreePositionCounters(1, (3, 2), sinks=0, height=3)
    >>> for _ in range(4):
    ...     counters.append([0])
    >>> counters.positions.tolist()  # of the fifth token
    [[1, 1, 0]]
    """

    def __init__(self, batch: int, branching: Sequence[int], sinks: int, height: int):
        self.branching, self.sinks, self.height = tuple(branching), sinks, height
        self.positions = np.zeros((batch, height), np.int64)
        self.lengths = [0] * batch
        self.closes: list[list[int]] | None = None  # per sequence and token; None while no token has closed a family

    def set(self, lengths: Sequence[int], closes: Sequence[Sequence[int]] | None = None) -> None:
        """Start from sequences of these lengths, as if `append` had been called for each of their tokens."""
        self.lengths = list(lengths)
        self.closes = None if closes is None else [list(heights) for heights in closes]
        closing = None if closes is None else np.array([h for heights in closes for h in (*heights, 0)], np.int64)
        with_next = [length + 1 for length in lengths]
        positions = token_positions(with_next, self.branching, closing, self.sinks, self.height)
        self.positions = positions[np.cumsum(with_next) - 1]

    def append(self, closes: Sequence[int] | None) -> None:
        """Append a token to every sequence, with the height up to which it closes families."""
        if closes is not None:
            if self.closes is None:
                self.closes = [[0] * length for length in self.lengths]
            for heights, new in zip(self.closes, closes, strict=True):
                heights.append(int(new))
        self.lengths = [length + 1 for length in self.lengths]
        height = np.zeros(len(self.lengths), np.int64) if closes is None else np.asarray(closes, np.int64)
        height = np.where(np.array(self.lengths) == self.sinks, self.height, height)
        grows = np.ones(len(height), bool)  # whether the level below has gained a member
        for level in range(1, self.height + 1):
            index = self.positions[:, level - 1]
            index += grows
            grows = grows & ((index == cap(self.branching, level)) | (height >= level))
            index[grows] = 0

    def reorder(self, index: Sequence[int]) -> None:
        """Replace sequence i by the former sequence `index[i]`."""
        closes = None if self.closes is None else [self.closes[i] for i in index]
        self.set([self.lengths[i] for i in index], closes)

    def crop(self, lengths: Sequence[int]) -> None:
        """Shorten the sequences to these lengths."""
        closes = None if self.closes is None else [h[:n] for h, n in zip(self.closes, lengths, strict=True)]
        self.set(lengths, closes)


class TreePositionEmbedding(nn.Module):
    """Embedding of token positions in a tree: learned Fourier features of each index and a linear map per level.

    Args:
        width: Width of the token vectors.
        branching: Members per family, from the leaves up.
        height: Number of levels.
        features: Number of Fourier features of an index.
    """

    def __init__(self, width: int, branching: Sequence[int], height: int, features: int = 32):
        super().__init__()
        self.members = [cap(branching, level) for level in range(1, height + 1)]
        self.fourier = nn.ModuleList(FourierFeatures(1, features) for _ in range(height))
        self.maps = nn.ModuleList(nn.Linear(features, width, bias=False) for _ in range(height))
        for layer in self.maps:
            nn.init.normal_(layer.weight, std=0.02 * (2 / features) ** 0.5)  # type: ignore[arg-type]

    def forward(self, positions: Tensor) -> Tensor:
        """Embed positions, `[tokens, height]` → `[tokens, width]`. Each distinct index is mapped once, then looked up."""
        total: Tensor | float = 0.0
        for level, (fourier, project) in enumerate(zip(self.fourier, self.maps, strict=True)):
            index = torch.arange(self.members[level], device=positions.device)[:, None]
            total = total + nn.functional.embedding(positions[:, level], project(fourier(index)))
        assert isinstance(total, Tensor)
        return total
