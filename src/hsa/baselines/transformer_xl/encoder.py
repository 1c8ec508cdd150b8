"""Transformer-XL (Dai et al., *Transformer-XL: Attentive Language Models beyond a Fixed-Length Context*, ACL 2019).

Texts are read segment by segment; every layer remembers its inputs at the tokens before, so that what a token knows
reaches back by a memory per layer. Here norms stand before what they normalise, as in all models of this library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hsa.baselines.options import DocumentOptions
from hsa.baselines.transformer_xl.relative_attention import RelativeAttention
from hsa.baselines.transformer_xl.segments import Segments, plan_segments, plan_step
from hsa.errors import InvalidInput
from hsa.nn.attention import flat_tree
from hsa.nn.decoder import Activation, FeedForward
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.inputs import Inputs
from hsa.nn.sizes import check_sizes
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class TransformerXLConfig:
    """The sizes of the encoder of a classifier.

    Args:
        width: of the token vectors.
        heads: of attention.
        layers: how many.
        feed_forward: inner width of the feed-forward networks; 2·width by default.
        dropout: on embeddings and residual branches.
        segment: tokens that are read together; earlier ones are remembered without a gradient.
        memory: tokens before a segment that every layer remembers; 0 for segments on their own.
        test_memory: the same after training; as in training by default.
    """

    width: int = EncoderConfig.width
    heads: int = EncoderConfig.heads
    layers: int = 2
    feed_forward: int | None = None
    dropout: float = EncoderConfig.dropout
    segment: int = DocumentOptions.segment
    memory: int = DocumentOptions.memory
    test_memory: int | None = None
    architecture: str = field(default="transformer-xl", init=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        check_segments(self)

    @property
    def keeps_leaves(self) -> bool:
        return True

    @property
    def has_fixed_size(self) -> bool:
        return False


def check_segments(config: Any) -> None:
    """Raises for a `segment`, `memory` or `test_memory` that means nothing."""
    if config.segment < 1:
        raise InvalidInput("segment", given=config.segment, expected="1 token or more")
    if config.memory < 0:
        raise InvalidInput("memory", given=config.memory, expected="0 tokens or more")
    if config.test_memory is not None and config.test_memory < 0:
        raise InvalidInput(
            "test_memory", given=config.test_memory, expected="0 tokens or more, or None: as much as in training"
        )


class TransformerXLLayer(nn.Module):
    """Attention to the segment and to the memory before it, and a feed-forward network, both with residuals.

    x ← x + attention(n, memory)        n = RMSNorm(x), which is what is remembered
    x ← x + feed_forward(RMSNorm(x))
    """

    def __init__(self, width: int, heads: int, feed_forward: int, activation: Activation, dropout: float):
        super().__init__()
        self.norm_attention, self.norm_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = RelativeAttention(width, heads)
        self.feed_forward = FeedForward(width, feed_forward, activation, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, carried: Tensor | None, segments: Segments, *, projected: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `RelativeAttention`; all of x, with what attention and the network add."""
        attended, rows = self.attention(self.norm_attention(x), carried, segments, projected=projected)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x))), rows


@dataclass(frozen=True, eq=False)
class SegmentMemory:
    """What a model remembers of texts that go on. Nothing in it has a gradient.

    Attributes:
        rows: per layer `[Σ kept, width]`, its normalised inputs; or `[Σ kept, 2·width]`, their keys and values.
        kept: rows of every text.
        seen: tokens of every text so far.
        projected: whether rows are keys and values: smaller steps, for as long as weights stay as they are.
    """

    rows: tuple[Tensor, ...]
    kept: tuple[int, ...]
    seen: tuple[int, ...]
    projected: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for `torch.save`."""
        rows = [rows.cpu() for rows in self.rows]
        return {"rows": rows, "kept": list(self.kept), "seen": list(self.seen), "projected": self.projected}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], device: torch.device | str = "cpu") -> SegmentMemory:
        rows = tuple(rows.to(device) for rows in state["rows"])
        return SegmentMemory(rows, tuple(state["kept"]), tuple(state["seen"]), state["projected"])


class TransformerXLLayers(nn.Module):
    """The layers, and how much they remember: another length while they train than after it."""

    def __init__(self, config: Any, feed_forward: int, activation: Activation):
        super().__init__()
        self.segment, self.lengths = config.segment, (config.memory, config.test_memory)
        self.stack = nn.ModuleList(
            TransformerXLLayer(config.width, config.heads, feed_forward, activation, config.dropout)
            for _ in range(config.layers)
        )

    @property
    def memory(self) -> int:
        """Tokens before a segment that are remembered now."""
        trained, tested = self.lengths
        return trained if self.training or tested is None else tested

    def set_test_memory(self, tokens: int) -> None:
        """Remember this many tokens outside of training; any number will do, because only distances count."""
        self.lengths = self.lengths[0], tokens

    def plan(self, lengths: Sequence[int], before: SegmentMemory | None, device: torch.device) -> Segments:
        """Plan the next `lengths` tokens of every text."""
        carried: dict[str, Any] = {}
        with torch.inference_mode(False):  # what is made now may serve later calls with gradients too
            if before is not None:
                begun = [seen % self.segment for seen in before.seen]
                if _in_step(lengths, before.kept, begun, self.memory):
                    state: dict[str, Any] = {"carried": before.kept[0], "begun": begun[0], "device": device}
                    return plan_step(len(lengths), self.segment, self.memory, **state)
                carried = {"carried": before.kept, "begun": begun}
            return plan_segments(lengths, self.segment, self.memory, device=device, **carried)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Read whole texts from their beginning; nothing is remembered afterwards."""
        for layer in self.stack:
            x, _ = layer(x, None, segments)
        return x

    def go_on(
        self, x: Tensor, lengths: Sequence[int], before: SegmentMemory, segments: Segments
    ) -> tuple[Tensor, SegmentMemory]:
        """So many tokens more of every text, and what is remembered after them."""
        kept = []
        for layer, carried in zip(self.stack, before.rows, strict=True):
            x, rows = layer(x, carried, segments, projected=before.projected)
            kept.append(rows.index_select(0, segments.keep))
        seen = tuple(a + b for a, b in zip(before.seen, lengths, strict=True))
        return x, replace(before, rows=tuple(kept), kept=segments.kept, seen=seen)


def _in_step(lengths: Sequence[int], kept: Sequence[int], begun: Sequence[int], memory: int) -> bool:
    """Whether texts at the same position go on by one token, which sees all that was kept."""
    states = set(zip(lengths, kept, begun, strict=True))
    return len(states) == 1 and lengths[0] == 1 and kept[0] - begun[0] <= memory


class TransformerXLEncoder(nn.Module):
    """Leaf values of documents → a vector per leaf, that knows what came before it.

    The leaves are read in their order, whatever tree they hang in.

    Args:
        config: the sizes.
        modalities: what the leaves hold.
        kinds, keys: of the data's domains; not looked at.

    >>> from hsa import Signal, collate
    >>> batch = collate([Signal.of([3, 1, 4, 1, 5], "text"), Signal.of([9, 2], "text")])
    >>> encoder = TransformerXLEncoder(TransformerXLConfig(width=16, segment=3, memory=2), {"text": Modality(tokens=10)})
    >>> x, forest = encoder(batch)
    >>> x.shape, forest.lengths
    (torch.Size([7, 16]), [5, 2])
    """

    def __init__(
        self,
        config: TransformerXLConfig,
        modalities: Mapping[str, Modality],
        kinds: Sequence[str] = (),
        keys: Sequence[str] = (),
    ):
        super().__init__()
        self.config = config
        self.embedding = Embedding(modalities, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = TransformerXLLayers(config, config.feed_forward or 2 * config.width, "gelu")

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """A vector per leaf, and the flat forest these leaves hang in."""
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)
        return self.layers(self.dropout(x), self._segments(inputs.hierarchy)), flat_tree(inputs.hierarchy)

    def prepare(self, inputs: Inputs) -> None:
        """Build what depends on the forest alone: call it where batches are made, ahead of the step that uses them."""
        flat_tree(inputs.hierarchy)
        self._segments(inputs.hierarchy)

    def _segments(self, hierarchy: Hierarchy) -> Segments:
        layers = self.layers
        key = ("segments", layers.segment, layers.memory)
        return hierarchy.cached(key, lambda: layers.plan(hierarchy.lengths, None, hierarchy.device))
