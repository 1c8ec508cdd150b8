"""`CausalLanguageModel`: the interface of language models of any architecture for training and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CausalLanguageModel(nn.Module):
    """Base class of language models: tokens of packed texts in, logits of the next tokens out.

    Attributes:
        config: Frozen dataclass with `to_dict`, `from_dict`, `vocabulary`, `max_length` and `architecture`, a name in
            `hsa.models.registry.LANGUAGE_ARCHITECTURES`.
        embedding: Token vectors, which the output shares.
    """

    config: Any
    embedding: nn.Embedding

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.embedding.weight.device

    @property
    def fixed_context(self) -> int | None:
        """Number of tokens that the model always reads at once; None if any number will do."""
        return None

    @property
    def remembered_tokens(self) -> int:
        """Number of tokens before a block or segment that every layer remembers."""
        return 0

    def new_cache(self, batch: int = 1) -> Any:
        """Return an empty cache for a batch of texts."""
        raise NotImplementedError

    def read(self, tokens: Tensor, lengths: Sequence[int] | Tensor, cache: Any) -> Tensor:
        """Read texts into a cache; return logits `[batch, vocabulary]` of the token after each text."""
        raise NotImplementedError

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Append a token `[batch]` to every text; return logits `[batch, vocabulary]` of the next token."""
        raise NotImplementedError

    def _logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.embedding.weight)
