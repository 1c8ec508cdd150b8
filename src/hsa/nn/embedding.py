"""Embedding of leaf values: a vector of the same width for every leaf, whatever its modality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class Modality:
    """Description of the leaves of one modality: token ids, or a fixed number of numbers each.

    Args:
        tokens: Size of the vocabulary, for leaves that are token ids; 0 for numbers, vectors and patches.
        numbers: Number of numbers in a leaf; 0 for tokens.
        width: Width of the token vectors, for pre-trained ones; the width of the model by default.
        frozen: Whether the token vectors are kept fixed during training.
        center: Number that is subtracted from the numbers.
        scale: Number by which they are divided afterwards.

    Raises:
        InvalidInput: Both or neither of `tokens` and `numbers` are positive.

    >>> from hsa.nn import Modality
    >>> words = Modality(tokens=30_000, width=300, frozen=True)  # pre-trained vectors
    >>> patches = Modality(numbers=3 * 16 * 16, center=127.5, scale=127.5)  # pixels of 0 … 255 become −1 … 1
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
                got=f"tokens={self.tokens}, numbers={self.numbers}",
                expected="either tokens or numbers to be positive",
            )


class Embedding(nn.Module):
    """Embedding of leaves of several modalities in one space.

    Token ids are looked up in a table per modality, and numbers are normalised and mapped linearly. Token vectors of another
    width than the model's are mapped linearly too.

    Args:
        modalities: Description of each modality, by name.
        width: Width of the resulting vectors.

    >>> import torch
    >>> from hsa.nn import Embedding, Modality
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
        """Copy pre-trained vectors, `[tokens, width]`, into the table of a modality."""
        table = self.tables[name]
        if not isinstance(table, nn.Embedding) or table.weight.shape != vectors.shape:
            raise InvalidInput(
                f"vectors[{name!r}]",
                got=f"shape {tuple(vectors.shape)}",
                expected="one row per token of the vocabulary, of the modality's width",
            )
        with torch.no_grad():
            table.weight.copy_(vectors)

    def forward(self, values: Mapping[str, Any], leaves: Mapping[str, Tensor], num_leaves: int) -> Tensor:
        """Return the vectors of all leaves, `[num_leaves, width]`.

        Args:
            values: Values of the leaves of each modality, `[leaves of the modality, …]`.
            leaves: Indices of the leaves that they belong to.
            num_leaves: Number of leaves of all modalities.
        """
        vectors = {name: self._vectors(name, rows) for name, rows in values.items()}
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
                "values", got=f"leaves of modality {name!r}", expected=f"some of {tuple(self.modalities)}"
            )
        if not isinstance(values, Tensor):
            raise InvalidInput(
                f"values[{name!r}]",
                got="leaves of several kinds, or strings",
                expected="one tensor",
                fix="Tokenize text into ids with a tokenizer, and give all leaves of a modality the same shape and type",
            )
        modality = self.modalities[name]
        if modality.tokens:
            vectors = self.tables[name](values)
        else:
            flat = values.reshape(len(values), -1)
            if flat.shape[1] != modality.numbers:
                raise InvalidInput(
                    f"values[{name!r}]", got=flat.shape[1], expected=f"{modality.numbers} numbers per leaf"
                )
            dtype = next(self.maps[name].parameters()).dtype  # the model's, which may differ from PyTorch's default
            wide = flat.to(torch.promote_types(dtype, torch.float32))
            vectors = ((wide - modality.center) / modality.scale).to(dtype)
        return self.maps[name](vectors) if name in self.maps else vectors
