"""How a language model takes in a text: what every way of reading can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Course(ABC):
    """Batches of a training text, step by step."""

    @abstractmethod
    def load(self, step: int) -> Any:
        """The batch of a step, on the device. Made ahead, by threads, in any order."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The mean over its tokens, to be differentiated. Batches come in their order."""

    @abstractmethod
    def state(self) -> Any:
        """What later batches need of earlier ones, for the checkpoint."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Back to what `state` gave."""


class Reader(ABC):
    """A model that reads texts in its own way.

    Args:
        context: tokens of a block.
    """

    def __init__(self, context: int):
        self.context = context

    @abstractmethod
    def course(self, tokens: np.ndarray, batch: int, seed: int) -> Course:
        """Steps of `batch` blocks of a text, new ones in every epoch."""

    @abstractmethod
    def losses(self, tokens: np.ndarray, blocks: int) -> Iterator[Tensor]:
        """`[some blocks, context]` −log p of every token of a text but the first; `blocks` at a time, whole ones only."""

    @abstractmethod
    def operations(self, tokens: np.ndarray) -> float:
        """Of attention per token of the text, all layers, where there is as much before it as the model can use."""


def blocks_of(tokens: np.ndarray, context: int) -> int:
    """In an epoch, wherever in the first block it starts.

    Raises:
        InvalidInput: there is not even one.
    """
    if len(tokens) < context + 1:
        raise InvalidInput(
            "data",
            given=f"{len(tokens):,} tokens to train on",
            expected=f"more than the context of {context:,}",
            fix="give more text, or a smaller --context",
        )
    return max(1, (len(tokens) - context) // context)


def to_device(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and what follows each, `[blocks · context]`."""
    whole = torch.from_numpy(blocks.astype(np.int64))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return whole[:, :-1].flatten(), whole[:, 1:].flatten()
