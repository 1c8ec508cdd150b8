"""Interfaces for feeding texts to a language model, in training and in evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput


class Course(ABC):
    """Batches of a training text, one per step."""

    @abstractmethod
    def load(self, step: int) -> Any:
        """Return the batch of a step, on the device. Threads call this ahead of time, in any order."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch, with gradients. Called once per batch, in order."""

    @abstractmethod
    def state(self) -> Any:
        """Return what later batches need from earlier ones, for the checkpoint."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Restore the result of `state`."""


class Reader(ABC):
    """Adapter that feeds texts to a model.

    Args:
        context: Number of tokens per block.
    """

    def __init__(self, context: int):
        self.context = context

    @abstractmethod
    def course(self, tokens: np.ndarray, batch: int, seed: int) -> Course:
        """Return the batches of a training text, `batch` blocks each, different in every epoch."""

    @abstractmethod
    def losses(self, tokens: np.ndarray, blocks: int) -> Iterator[Tensor]:
        """Yield −log p of the tokens of a text after the first, `[up to blocks, context]`, complete blocks only."""

    @abstractmethod
    def operations(self, tokens: np.ndarray) -> float:
        """Return the attention operations per token, all layers, with as much context as the model can use."""


def blocks_of(tokens: np.ndarray, context: int) -> int:
    """Return the number of blocks per epoch, for any start of the epoch within the first block.

    Raises:
        InvalidInput: The text is shorter than one block.
    """
    if len(tokens) < context + 1:
        raise InvalidInput(
            "data",
            got=f"{len(tokens):,} tokens to train on",
            expected=f"more than the context of {context:,}",
            fix="Pass more text, or a smaller --context",
        )
    return max(1, (len(tokens) - context) // context)


def to_device(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of the blocks and the token that follows each, `[blocks · context]`."""
    whole = torch.from_numpy(blocks.astype(np.int64))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return whole[:, :-1].flatten(), whole[:, 1:].flatten()
