"""A bidirectional recurrent network over every family of a forest, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hsa.tree.hierarchy import Hierarchy


class FamilyGRU(nn.Module):
    """Bidirectional GRU over the leaves of every tree, projected back to their width.

        h = W [→h; ←h] + b

    Made for forests of families (`nn.bottom_up.Step.families`), where every tree is one sequence.

    Args:
        width: Width of the vectors.
        inner: Width of the hidden state, per direction.
        layers: Number of stacked GRUs.
        dropout: Dropout rate on the outputs of every layer.

    >>> gru = FamilyGRU(16, 5)
    >>> gru(torch.randn(4, 16), Hierarchy.flat([1, 3])).shape
    torch.Size([4, 16])
    """

    def __init__(self, width: int, inner: int, layers: int = 1, dropout: float = 0.0):
        super().__init__()
        between = dropout if layers > 1 else 0.0  # PyTorch warns if a single layer has dropout between layers
        self.gru = nn.GRU(width, inner, num_layers=layers, dropout=between, bidirectional=True)
        self.output = nn.Linear(2 * inner, width)
        self.dropout = nn.Dropout(dropout)

    def prepare(self, hierarchy: Hierarchy) -> None:
        """Build the index structures that depend on the forest alone."""
        _order(hierarchy)

    def forward(self, x: Tensor, hierarchy: Hierarchy) -> Tensor:
        if not len(x):
            return x
        order = _order(hierarchy)
        # Not in half precision: some devices lack such recurrent kernels, and rounding accumulates over a long family.
        with torch.autocast(x.device.type, enabled=False):
            rows = x.index_select(0, order.rows).to(self.output.weight.dtype)
            hidden, _ = self.gru(PackedSequence(rows, order.running))
        return self.dropout(self.output(hidden.data.index_select(0, order.back)))


@dataclass(frozen=True, eq=False)
class _Order:
    rows: Tensor  # [leaves] by position, then by tree, longest tree first
    back: Tensor  # [leaves] inverse permutation
    running: Tensor  # [longest] on the CPU: number of trees that reach this position


def _order(hierarchy: Hierarchy) -> _Order:
    def build() -> _Order:
        offsets = hierarchy.structure.leaf_offsets
        lengths = np.diff(offsets)
        step = np.arange(hierarchy.num_leaves) - np.repeat(offsets[:-1], lengths)
        rank = np.empty(len(lengths), np.int64)
        rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
        rows = np.lexsort((np.repeat(rank, lengths), step))
        back = np.empty_like(rows)
        back[rows] = np.arange(len(rows))
        device = hierarchy.device
        return _Order(
            torch.from_numpy(rows).to(device), torch.from_numpy(back).to(device), torch.from_numpy(np.bincount(step))
        )

    return hierarchy.cached("order of a recurrent network", build)
