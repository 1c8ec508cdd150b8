"""Training on streams of text: each batch continues the one before, together with the model's memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.baselines.transformer_xl.encoder import SegmentMemory
from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageModel
from hsa.nn.attention import counting_operations
from hsa.training.language_model.reader import Course, Reader, blocks_of, to_device


class Streams:
    """A text cut into contiguous parts that are read in parallel. Every epoch cuts it at other tokens.

    If a text has fewer blocks than there are streams, each stream is one block and the streams overlap.

    >>> streams = Streams(np.arange(14), context=3, streams=2, seed=0)
    >>> streams.steps_per_epoch
    1
    """

    def __init__(self, tokens: np.ndarray, context: int, streams: int, seed: int):
        self.tokens, self.context, self.streams, self.seed = tokens, context, streams, seed
        self.steps_per_epoch = max(1, blocks_of(tokens, context) // streams)

    def take(self, step: int) -> np.ndarray:
        """Return the block of every stream at this step, `[streams, context + 1]`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        each = self.steps_per_epoch * self.context
        first = _starts(self.seed, epoch, len(self.tokens), self.streams, each) + index * self.context
        return self.tokens[first[:, None] + np.arange(self.context + 1)]

    def begins(self, step: int) -> bool:
        """Return whether the streams begin at this step."""
        return step % self.steps_per_epoch == 0


@lru_cache(2)  # batches are prefetched, so two epochs can overlap
def _starts(seed: int, epoch: int, tokens: int, streams: int, each: int) -> np.ndarray:
    """Return where the streams of an epoch start; each has `each` tokens."""
    draw = np.random.default_rng((seed, epoch))
    spare = tokens - 1 - streams * each
    if spare < 0:
        return draw.integers(tokens - each, size=streams)
    return int(draw.integers(spare + 1)) + draw.permutation(streams) * each


class StreamCourse(Course):
    """Training course that reads a block of every stream per step, with the memory of earlier blocks."""

    def __init__(self, model: TransformerXLLanguageModel, streams: Streams):
        self.model, self.streams = model, streams
        self.lengths = (streams.context,) * streams.streams
        self.memory = model.new_memory(streams.streams)

    def load(self, step: int) -> tuple[Tensor, Tensor, bool]:
        return (*to_device(self.streams.take(step), self.model.device), self.streams.begins(step))

    def loss(self, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        tokens, targets, begins = batch
        memory = None if begins else self.memory
        loss, self.memory = self.model.loss(tokens, targets, self.lengths, memory)
        return loss

    def state(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.memory = SegmentMemory.from_state_dict(state, self.model.device)


class StreamReader(Reader):
    """Reader of a text from beginning to end. Several blocks are read at once, with the same result as one by one."""

    def __init__(self, model: TransformerXLLanguageModel, context: int):
        super().__init__(context)
        self.model = model

    def course(self, tokens: np.ndarray, batch: int, seed: int) -> StreamCourse:
        return StreamCourse(self.model, Streams(tokens, self.context, batch, seed))

    def losses(self, tokens: np.ndarray, blocks: int) -> Iterator[Tensor]:
        memory = self.model.new_memory(projected=True)
        end = (len(tokens) - 1) // self.context * self.context
        for first in range(0, end, blocks * self.context):
            some = tokens[first : min(end, first + blocks * self.context) + 1]
            inputs, targets = to_device(some[None], self.model.device)
            losses, memory = self.model.loss(inputs, targets, [len(inputs)], memory, mean=False)
            yield losses.view(-1, self.context)

    @torch.no_grad()
    def operations(self, tokens: np.ndarray) -> float:
        """Return operations per token with a full memory, as nearly everywhere in a long text."""
        segment, remembered = self.model.config.segment, self.model.layers.memory
        before = -(-remembered // segment) * segment
        text = torch.from_numpy(tokens[: before + segment].astype(np.int64)).to(self.model.device)
        size = min(segment, len(text))
        memory = self.model.new_memory(projected=True)
        if len(text) > size:
            _, memory = self.model.extend(text[:-size], [len(text) - size], memory)
        with counting_operations() as counts:
            self.model.extend(text[-size:], [size], memory)
        return sum(count.total for count in counts) / size
