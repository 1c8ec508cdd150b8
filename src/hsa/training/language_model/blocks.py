"""Independent blocks of a text, shuffled in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hsa.models.language_model import LanguageModel, Trees
from hsa.nn.attention import counting_operations
from hsa.training.language_model.reader import Course, Reader, blocks_of, to_device


class Blocks:
    """Blocks of `context` + 1 tokens. Every epoch starts at another token and has another order."""

    def __init__(self, tokens: np.ndarray, context: int, seed: int):
        self.tokens, self.context, self.seed = tokens, context, seed
        self.per_epoch = blocks_of(tokens, context)

    def take(self, first: int, number: int) -> np.ndarray:
        """Return consecutive blocks, counted over all epochs, `[number, context + 1]`."""
        offsets = np.arange(self.context + 1)
        starts = np.array([self._start(i) for i in range(first, first + number)])
        return self.tokens[starts[:, None] + offsets]

    def _start(self, block: int) -> int:
        epoch, index = divmod(block, self.per_epoch)
        spare = len(self.tokens) - 1 - self.per_epoch * self.context
        shift, order = _epoch(self.seed, epoch, min(spare, self.context), self.per_epoch)
        return shift + int(order[index]) * self.context


@lru_cache(2)  # batches are prefetched, so the next epoch begins before this one ends
def _epoch(seed: int, epoch: int, most: int, blocks: int) -> tuple[int, np.ndarray]:
    """Return the first token of an epoch, at most `most`, and the order of its blocks."""
    draw = np.random.default_rng((seed, epoch))
    return int(draw.integers(most + 1)), draw.permutation(blocks)


class BlockCourse(Course):
    """Batches with the same number of blocks in every step."""

    def __init__(self, model: LanguageModel, blocks: Blocks, batch: int):
        self.model, self.blocks, self.batch = model, blocks, batch
        self.lengths = (blocks.context,) * batch

    def load(self, step: int) -> tuple[Tensor, Tensor, Trees]:
        blocks = self.blocks.take(step * self.batch, self.batch)
        trees = self.model.trees(blocks[:, :-1].reshape(-1), self.lengths)
        return (*to_device(blocks, self.model.device), trees)

    def loss(self, batch: tuple[Tensor, Tensor, Trees]) -> Tensor:
        tokens, targets, trees = batch
        return self.model.loss(tokens, targets, self.lengths, trees=trees)

    def state(self) -> None:
        """Return None: blocks are independent."""

    def restore(self, state: None) -> None:
        """Do nothing: blocks are independent."""


class BlockReader(Reader):
    """Reader of independent blocks."""

    def __init__(self, model: LanguageModel, context: int):
        super().__init__(context)
        self.model = model

    def course(self, tokens: np.ndarray, batch: int, seed: int) -> BlockCourse:
        return BlockCourse(self.model, Blocks(tokens, self.context, seed), batch)

    def losses(self, tokens: np.ndarray, blocks: int) -> Iterator[Tensor]:
        context, model = self.context, self.model
        number = (len(tokens) - 1) // context
        for first in range(0, number, blocks):
            starts = np.arange(first, min(number, first + blocks)) * context
            some = tokens[starts[:, None] + np.arange(context + 1)]
            inputs, targets = to_device(some, model.device)
            lengths = (context,) * len(some)
            trees = model.trees(some[:, :-1].reshape(-1), lengths)
            yield model.loss(inputs, targets, lengths, trees=trees, mean=False).view(len(some), context)

    @torch.no_grad()
    def operations(self, tokens: np.ndarray) -> float:
        block = torch.from_numpy(tokens[: self.context].astype(np.int64)).to(self.model.device)
        with counting_operations() as counts:
            self.model.hidden(block, [len(block)])
        return sum(count.total for count in counts) / len(block)
