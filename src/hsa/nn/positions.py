"""Positions per domain: features of a position, shared by all layers, and a projection per kind in every layer.

The position logit of two siblings is ε(A)·ε(B), with ε = W_kind · features(position). Members of sets and roots have ε = 0.

| domain   | features of a member                                                             |
|----------|----------------------------------------------------------------------------------|
| sequence | sin and cos of learnable frequencies of its index                                |
| grid     | the same of its index on every axis                                              |
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
"""Numbers per position, as `hsa.signals.coordinates` makes them."""


class FourierFeatures(nn.Module):
    """sin(Fx), cos(Fx) with learnable F: for an index, the sinusoids of the Transformer to begin with.

    Li et al., *Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding*, 2021.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        waves = width // 2
        falling = torch.exp(-math.log(10_000.0) * torch.arange(waves) / waves)
        # Several coordinates: directions drawn at random, so that each wave runs across all axes.
        direction = torch.ones(1, waves) if inputs == 1 else nn.functional.normalize(torch.randn(inputs, waves), dim=0)
        self.frequencies = nn.Parameter(direction * falling)

    def forward(self, numbers: Tensor) -> Tensor:
        # No matrix product: autocast would make it one of half precision, in which 257 is 256.
        phase = (numbers.to(self.frequencies.dtype)[..., None] * self.frequencies).sum(-2)
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


class PositionFeatures(nn.Module):
    """Distinct positions → features, `[positions, width]` per kind.

    Args:
        width: of the features of sequences, grids and tables.
        kinds: the kinds of domains that occur in the data.
        keys: the keys of its tables.
    """

    def __init__(self, width: int, kinds: Sequence[str], keys: Sequence[str] = ()):
        super().__init__()
        unknown = set(kinds) - set(KINDS)
        if unknown:
            raise InvalidInput("kinds", given=sorted(unknown), expected=f"some of {KINDS}")
        self.widths = {kind: WIDTHS["graph"] if kind == "graph" else width for kind in KINDS if kind in kinds}
        self.fourier = nn.ModuleDict(
            {kind: FourierFeatures(WIDTHS[kind], width) for kind in ("sequence", "grid") if kind in kinds}
        )
        self.row_of_key = {key: i for i, key in enumerate(keys)}
        if "table" in kinds:
            self.key_vectors = nn.Embedding(len(keys), width)

    def forward(self, positions: NodePositions) -> dict[str, Tensor]:
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
                    given=f"the key {key!r}",
                    expected=f"one of {tuple(self.row_of_key)}",
                    fix="name all keys when the model is made, or leave this member out",
                )
        return torch.tensor([self.row_of_key[key] for key in keys], device=self.key_vectors.weight.device)

    def _check(self, kind: str) -> None:
        if kind not in self.widths:
            raise InvalidInput(
                "positions",
                given=f"members of a {kind}",
                expected=f"only {', '.join(self.widths) or 'sets'}, as the model was made for",
                fix=f"add {kind!r} to the kinds of the model",
            )


class PositionProjection(nn.Module):
    """ε of every node for one layer: a linear map per kind of position.

    Returns `[nodes, heads, dim]`.
    """

    def __init__(self, widths: dict[str, int], heads: int, dim: int):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.maps = nn.ModuleDict({kind: nn.Linear(width, heads * dim, bias=False) for kind, width in widths.items()})
        for layer in self.maps.values():
            # |ε|² starts at about 1/4: positions whisper until the data make them speak.
            nn.init.normal_(layer.weight, std=math.sqrt(0.5 / dim / layer.in_features))  # type: ignore[arg-type, operator]

    def forward(self, features: dict[str, Tensor], row: Tensor) -> Tensor:
        nowhere = next(self.parameters()).new_zeros(1, self.heads * self.dim)
        parts: list[Any] = [self.maps[kind](values.to(nowhere.dtype)) for kind, values in features.items()]
        table = torch.cat([nowhere.to(parts[0].dtype), *parts] if parts else [nowhere])
        return nn.functional.embedding(row, table).view(-1, self.heads, self.dim)
