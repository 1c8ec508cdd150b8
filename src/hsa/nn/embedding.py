"""Leaf values of every modality → vectors of one width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class Modality:
    """What the leaves of one modality hold.

    Args:
        tokens: the size of a vocabulary, for leaves that are ids; 0 for leaves that are numbers, vectors or patches.
        numbers: how many numbers a leaf holds; 0 for tokens.
        width: of the token vectors, when it is not the width of the model: pre-trained ones of 50 or 300 numbers.
        frozen: the token vectors are not trained.
        center, scale: numbers become (number − center) / scale.
    """

    tokens: int = 0
    numbers: int = 0
    width: int | None = None
    frozen: bool = False
    center: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.tokens > 0) == (self.numbers > 0):
            raise InvalidInput(
                "modality",
                given=f"tokens={self.tokens}, numbers={self.numbers}",
                expected="one of them positive: leaves are ids, or they are numbers",
            )


class Embedding(nn.Module):
    """Leaves in, `[leaves, width]` out.

    >>> embedding = Embedding({"text": Modality(tokens=100), "patch": Modality(numbers=12)}, 8)
    >>> values = {"text": torch.tensor([3, 14]), "patch": torch.rand(1, 2, 2, 3)}
    >>> embedding(values, {"text": torch.tensor([0, 2]), "patch": torch.tensor([1])}, 3).shape
    torch.Size([3, 8])
    """

    def __init__(self, modalities: Mapping[str, Modality], width: int):
        super().__init__()
        self.modalities = dict(modalities)
        self.width = width
        self.tables = nn.ModuleDict()
        self.maps = nn.ModuleDict()
        for name, modality in self.modalities.items():
            inner = modality.width or width
            if modality.tokens:
                table = nn.Embedding(modality.tokens, inner)
                nn.init.normal_(table.weight, std=inner**-0.5)
                table.weight.requires_grad_(not modality.frozen)
                self.tables[name] = table
            if modality.numbers or inner != width:
                self.maps[name] = nn.Linear(modality.numbers or inner, width)

    def set_vectors(self, name: str, vectors: Tensor) -> None:
        """Pre-trained vectors for the tokens of a modality."""
        table = self.tables[name]
        if not isinstance(table, nn.Embedding) or table.weight.shape != vectors.shape:
            raise InvalidInput(
                f"vectors[{name!r}]",
                given=f"shape {tuple(vectors.shape)}",
                expected="a row per token of the vocabulary",
            )
        with torch.no_grad():
            table.weight.copy_(vectors)

    def forward(self, values: Mapping[str, Any], leaves: Mapping[str, Tensor], num_leaves: int) -> Tensor:
        vectors = {name: self._vectors(name, given) for name, given in values.items()}
        if len(vectors) == 1:
            return next(iter(vectors.values()))
        like = next(iter(vectors.values()), next(self.parameters()))  # a batch of no trees has no values
        out = like.new_zeros(num_leaves, self.width)
        for name, rows in vectors.items():
            out = out.index_copy(0, leaves[name], rows.to(out.dtype))
        return out

    def _vectors(self, name: str, values: Any) -> Tensor:
        if name not in self.modalities:
            raise InvalidInput(
                "values", given=f"leaves of modality {name!r}", expected=f"some of {tuple(self.modalities)}"
            )
        if not isinstance(values, Tensor):
            raise InvalidInput(
                f"values[{name!r}]",
                given="leaves of several kinds, or strings",
                expected="one tensor",
                fix="read text with a tokenizer, so that its leaves are ids; give all leaves of a modality one shape",
            )
        modality = self.modalities[name]
        if modality.tokens:
            vectors = self.tables[name](values)
        else:
            flat = values.reshape(len(values), -1)
            if flat.shape[1] != modality.numbers:
                raise InvalidInput(
                    f"values[{name!r}]", given=f"{flat.shape[1]} numbers per leaf", expected=f"{modality.numbers}"
                )
            dtype = next(self.maps[name].parameters()).dtype  # of the model, which need not be PyTorch's default
            wide = flat.to(torch.promote_types(dtype, torch.float32))
            vectors = ((wide - modality.center) / modality.scale).to(dtype)
        return self.maps[name](vectors) if name in self.maps else vectors
