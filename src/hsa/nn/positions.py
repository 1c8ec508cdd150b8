"""Positions of nodes in their domains: features that all layers share, and a projection per kind of domain and layer.

The position logit of two siblings is ε(A)·ε(B), with ε = W_kind · features(position). Roots and members of sets have ε = 0.

| domain   | features of a member                                                             |
|----------|----------------------------------------------------------------------------------|
| sequence | sines and cosines of its index at learned frequencies                            |
| grid     | sines and cosines of its indices on all axes at learned frequencies              |
| graph    | Laplacian eigenvectors and random-walk return chances (`hsa.signals.coordinates`) |
| table    | a learned vector per key                                                         |
| set      | none                                                                             |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.tree.positions import KINDS, NodePositions

WIDTHS = {"sequence": 1, "grid": 3, "graph": 16}
"""Number of coordinates of a position in each kind of domain, as `hsa.signals.coordinates` computes them."""


class FourierFeatures(nn.Module):
    """Features sin(Fx), cos(Fx) with a learned matrix F; for one coordinate, F starts as the Transformer's sinusoids.

    Li et al., *Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding*, 2021.

    Args:
        inputs: Number of coordinates.
        width: Number of features.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        waves = width // 2
        falling = torch.exp(-math.log(10_000.0) * torch.arange(waves) / waves)
        # Draw random directions for several coordinates, so that each wave runs across all axes.
        direction = torch.ones(1, waves) if inputs == 1 else nn.functional.normalize(torch.randn(inputs, waves), dim=0)
        self.frequencies = nn.Parameter(direction * falling)

    def forward(self, numbers: Tensor) -> Tensor:
        # Not a matrix product: autocast would compute it in half precision, in which 257 is 256.
        phase = (numbers.to(self.frequencies.dtype)[..., None] * self.frequencies).sum(-2)
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


class PositionFeatures(nn.Module):
    """Features of the distinct positions in a batch.

    Args:
        width: Number of features in sequences, grids and tables.
        kinds: Kinds of domains that occur in the data.
        keys: Keys of the tables in the data.
    """

    def __init__(self, width: int, kinds: Sequence[str], keys: Sequence[str] = ()):
        super().__init__()
        unknown = set(kinds) - set(KINDS)
        if unknown:
            raise InvalidInput("kinds", got=sorted(unknown), expected=f"some of {KINDS}")
        self.widths = {kind: WIDTHS["graph"] if kind == "graph" else width for kind in KINDS if kind in kinds}
        self.fourier = nn.ModuleDict(
            {kind: FourierFeatures(WIDTHS[kind], width) for kind in ("sequence", "grid") if kind in kinds}
        )
        self.row_of_key = {key: i for i, key in enumerate(keys)}
        if "table" in kinds:
            self.key_vectors = nn.Embedding(len(keys), width)

    def forward(self, positions: NodePositions) -> dict[str, Tensor]:
        """Return the features of each kind of domain, `[positions, width]`."""
        features: dict[str, Tensor] = {}
        for kind, numbers in positions.numbers.items():
            self._check(kind)
            features[kind] = numbers if kind == "graph" else self.fourier[kind](numbers)
        if positions.keys:
            self._check("table")
            features["table"] = self.key_vectors(self._rows(positions.keys))
        return {kind: features[kind] for kind in KINDS if kind in features}

    def _rows(self, keys: Sequence[str]) -> Tensor:
        for key in keys:
            if key not in self.row_of_key:
                raise InvalidInput(
                    "table",
                    got=f"the key {key!r}",
                    expected=f"one of {tuple(self.row_of_key)}",
                    fix="Pass all keys to the model when you build it, or leave this member out",
                )
        return torch.tensor([self.row_of_key[key] for key in keys], device=self.key_vectors.weight.device)

    def _check(self, kind: str) -> None:
        if kind not in self.widths:
            raise InvalidInput(
                "positions",
                got=f"members of a {kind}",
                expected=f"only {', '.join(self.widths) or 'sets'}, the kinds of the model",
                fix=f"Add {kind!r} to the kinds of the model",
            )


class PositionProjection(nn.Module):
    """Linear map per kind of domain from position features to the ε of one layer.

    Args:
        widths: Number of features of each kind.
        heads: Number of heads.
        dim: Channels of ε per head.
    """

    def __init__(self, widths: dict[str, int], heads: int, dim: int):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.maps = nn.ModuleDict({kind: nn.Linear(width, heads * dim, bias=False) for kind, width in widths.items()})
        for layer in self.maps.values():
            # |ε|² starts at about 1/4, so that position logits are small at first.
            nn.init.normal_(layer.weight, std=math.sqrt(0.5 / dim / layer.in_features))  # type: ignore[arg-type, operator]

    def forward(self, features: dict[str, Tensor], row: Tensor) -> Tensor:
        """Return ε of every node, `[nodes, heads, dim]`.

        Args:
            features: Features of the distinct positions, from `PositionFeatures`.
            row: Row of each node among them, `[nodes]`, counted from 1; 0 for nodes without a position.
        """
        zero = next(self.parameters()).new_zeros(1, self.heads * self.dim)
        parts: list[Any] = [self.maps[kind](values.to(zero.dtype)) for kind, values in features.items()]
        table = torch.cat([zero.to(parts[0].dtype), *parts] if parts else [zero])
        return nn.functional.embedding(row, table).view(-1, self.heads, self.dim)
