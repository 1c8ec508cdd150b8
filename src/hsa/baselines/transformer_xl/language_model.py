"""Transformer-XL as a language model, which carries a memory along streams of text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hsa.attention.cache.interface import Memory
from hsa.baselines.options import DocumentOptions
from hsa.baselines.transformer_xl.encoder import SegmentMemory, TransformerXLLayers, check_segments
from hsa.baselines.transformer_xl.segments import Segments
from hsa.errors import InvalidInput
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.known_fields import known_fields
from hsa.models.language_model import check_length, check_texts
from hsa.nn.decoder import Activation, initialise, inner_width
from hsa.nn.sizes import check_sizes
from hsa.nn.token_loss import mean_token_loss, token_losses

_KEPT = 16  # cached plans; batches of the same lengths recur


@dataclass(frozen=True)
class TransformerXLLanguageConfig:
    """Configuration of `TransformerXLLanguageModel`; `to_dict` and `from_dict` convert to and from JSON values.

    Args:
        vocabulary: Number of distinct tokens.
        width, heads, layers, dropout, segment, memory, test_memory: See `TransformerXLConfig`.
        feed_forward: Inner width of the feed-forward networks; by default 8/3·width for "swiglu", 4·width for "gelu".
        activation: Activation of the feed-forward networks, "swiglu" or "gelu".
        max_length: Maximum number of tokens of a text; None for no limit.
    """

    vocabulary: int
    width: int = 256
    heads: int = 4
    layers: int = 4
    feed_forward: int | None = None
    activation: Activation = "swiglu"
    dropout: float = 0.0
    segment: int = DocumentOptions.segment
    memory: int = DocumentOptions.memory
    test_memory: int | None = None
    max_length: int | None = None
    architecture: str = field(default="transformer-xl", init=False)

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise InvalidInput("vocabulary", got=self.vocabulary, expected="1 or more")
        check_sizes(self)
        check_segments(self)
        if self.activation not in get_args(Activation):
            raise InvalidInput(
                "activation", got=repr(self.activation), expected=f"one of {', '.join(get_args(Activation))}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise InvalidInput("max_length", got=self.max_length, expected="1 or more, or None")

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward networks."""
        return self.feed_forward or inner_width(self.width, self.activation)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TransformerXLLanguageConfig:
        fields = {name: value for name, value in data.items() if name != "architecture"}
        return TransformerXLLanguageConfig(**known_fields(TransformerXLLanguageConfig, fields))


class TransformerXLLanguageModel(CausalLanguageModel):
    """Language model with a segment memory: embedding, layers, final norm, and an output tied to the embedding.

    >>> model = TransformerXLLanguageModel(TransformerXLLanguageConfig(97, width=16, heads=2, layers=2, segment=8))
    >>> tokens = torch.randint(97, (30,))
    >>> model(tokens, [18, 12]).shape  # two texts, packed, from their beginning
    torch.Size([30, 97])
    >>> memory = model.new_memory(batch=2)
    >>> hidden, memory = model.extend(tokens[:16], [8, 8], memory)  # two streams
    >>> hidden, memory = model.extend(tokens[-2:], [1, 1], memory)
    >>> memory.seen
    (9, 9)
    """

    def __init__(self, config: TransformerXLLanguageConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = TransformerXLLayers(config, config.inner, config.activation)
        self.norm = nn.RMSNorm(config.width)
        initialise(self, config.layers)
        self._plans: OrderedDict[Any, Segments] = OrderedDict()

    @property
    def fixed_context(self) -> int:
        return self.config.segment

    @property
    def remembered_tokens(self) -> int:
        return self.layers.memory

    def forward(self, tokens: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
        """Return next-token logits `[tokens, vocabulary]` of packed texts of these lengths, read from their beginning."""
        return self._logits(self.extend(tokens, lengths)[0])

    def extend(
        self, tokens: Tensor, lengths: Sequence[int] | Tensor, memory: SegmentMemory | None = None
    ) -> tuple[Tensor, SegmentMemory]:
        """Read more tokens of every text; return their final vectors `[tokens, width]` and the new memory.

        Segments are counted from the beginning of a text, so reading it in parts gives the same numbers as reading it at
        once.

        Args:
            tokens: `[tokens]` New tokens of all texts, packed.
            lengths: Number of new tokens of every text.
            memory: Memory of the earlier tokens; empty by default.
        """
        sizes = check_texts(tokens, lengths)
        memory = self.new_memory(len(sizes)) if memory is None else memory
        self._check(memory, sizes)
        x = self.dropout(self.embedding(tokens))
        x, memory = self.layers.extend(x, sizes, memory, self._plan(sizes, memory))
        return self.norm(x), memory

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: Sequence[int],
        memory: SegmentMemory | None = None,
        *,
        mean: bool = True,
    ) -> tuple[Tensor, SegmentMemory]:
        """Return the mean of −log p(target), or the loss of every token `[tokens]`; and the memory after them."""
        hidden, memory = self.extend(tokens, lengths, memory)
        return (mean_token_loss if mean else token_losses)(hidden, self.embedding.weight, targets), memory

    def new_memory(self, batch: int = 1, *, projected: bool = False) -> SegmentMemory:
        """Return an empty memory of `batch` texts; see `SegmentMemory` for `projected`."""
        weight = self.embedding.weight
        row = weight.detach().new_empty(0, self.config.width * (2 if projected else 1))
        return SegmentMemory((row,) * self.config.layers, (0,) * batch, (0,) * batch, projected)

    def new_cache(self, batch: int = 1) -> TransformerXLCache:
        """Return an empty cache for generating `batch` texts."""
        return TransformerXLCache(self.new_memory(batch, projected=True))

    def read(self, tokens: Tensor, lengths: Sequence[int] | Tensor, cache: TransformerXLCache) -> Tensor:
        """Read more tokens of every text; return logits `[batch, vocabulary]` of the token after each."""
        hidden, cache.state = self.extend(tokens, lengths, cache.state)
        last = torch.as_tensor(lengths, device=hidden.device).cumsum(0) - 1
        return self._logits(hidden[last])

    def step(self, tokens: Tensor, cache: TransformerXLCache) -> Tensor:
        """Read one token `[batch]` more of every text; return logits `[batch, vocabulary]` of the next."""
        return self.read(tokens, [1] * len(tokens), cache)

    def _plan(self, sizes: list[int], memory: SegmentMemory) -> Segments:
        if max(sizes) == 1:  # in generation, plans never recur: do not let them evict those of batches
            return self.layers.plan(sizes, memory, self.device)
        begun = tuple(seen % self.config.segment for seen in memory.seen)
        key = (tuple(sizes), memory.kept, begun, self.layers.memory, self.device)
        if key not in self._plans:
            self._plans[key] = self.layers.plan(sizes, memory, self.device)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _check(self, memory: SegmentMemory, sizes: list[int]) -> None:
        if len(memory.kept) != len(sizes):
            raise InvalidInput("memory", got=f"{len(memory.kept)}", expected=f"the memory of {len(sizes)} texts")
        width = self.config.width * (2 if memory.projected else 1)
        if len(memory.rows) != self.config.layers or any(rows.shape[1] != width for rows in memory.rows):
            raise InvalidInput(
                "memory",
                got="the memory of another model",
                expected=f"{self.config.layers} layers of width {width}",
                fix="Make it with `model.new_memory(batch)`",
            )
        check_length(max(a + b for a, b in zip(memory.seen, sizes, strict=True)), self.config.max_length)


class TransformerXLCache:
    """Cache for generating texts; made by `TransformerXLLanguageModel.new_cache`."""

    def __init__(self, state: SegmentMemory):
        self.state = state

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every text so far."""
        return list(self.state.seen)

    def memory(self) -> Memory:
        """Return the bytes that all layers keep, and those of a flat cache."""
        rows, kept, seen = self.state.rows, sum(self.state.kept), sum(self.state.seen)
        taken = sum(part.nbytes for part in rows)
        flat = sum(seen * part.shape[1] * part.element_size() for part in rows)
        return Memory(taken, flat, leaves_kept=kept == seen)
