"""Transformer-XL (Dai et al., *Transformer-XL: Attentive Language Models beyond a Fixed-Length Context*, ACL 2019).

Texts are read segment by segment. Every layer remembers its inputs at earlier tokens, so the receptive field grows by one
memory length per layer. Unlike the original, layers are pre-norm, as in all models of this library.
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
from hsa.plain_values import check_fields
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class TransformerXLConfig:
    """Configuration of `TransformerXLEncoder`.

    Args:
        width: Width of the token vectors.
        heads: Number of attention heads.
        layers: Number of layers.
        feed_forward: Inner width of the feed-forward networks; 2·width by default.
        dropout: Dropout rate on embeddings and residual branches.
        segment: Number of tokens per segment. No gradient flows into earlier segments.
        memory: Number of tokens before a segment that every layer remembers; 0 makes segments independent.
        test_memory: Number of remembered tokens after training; the same as in training by default.
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
    """Check that `segment`, `memory` and `test_memory` are valid numbers of tokens."""
    if config.segment < 1:
        raise InvalidInput("segment", got=config.segment, expected="1 token or more")
    if config.memory < 0:
        raise InvalidInput("memory", got=config.memory, expected="0 tokens or more")
    if config.test_memory is not None and config.test_memory < 0:
        raise InvalidInput(
            "test_memory", got=config.test_memory, expected="0 tokens or more, or None for as many as in training"
        )


class TransformerXLLayer(nn.Module):
    """Layer of attention to the segment and the memory before it, and a feed-forward network, both residual.

    x ← x + attention(n, memory)        n = RMSNorm(x); the memory holds n of earlier tokens
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
        """Return the output for x, and rows for the memory; arguments as in `RelativeAttention.forward`."""
        attended, rows = self.attention(self.norm_attention(x), carried, segments, projected=projected)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x))), rows


@dataclass(frozen=True, eq=False)
class SegmentMemory:
    """Memory of texts that are read in several passes. It carries no gradients.

    Attributes:
        rows: Per layer, normalised inputs `[Σ kept, width]`, or their keys and values `[Σ kept, 2·width]`.
        kept: Number of rows of every text.
        seen: Number of tokens of every text so far.
        projected: Whether rows are keys and values. This saves projections, but is valid only while weights do not change.
    """

    rows: tuple[Tensor, ...]
    kept: tuple[int, ...]
    seen: tuple[int, ...]
    projected: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for `torch.save`."""
        rows = [rows.cpu() for rows in self.rows]
        return {"rows": rows, "kept": list(self.kept), "seen": list(self.seen), "projected": self.projected}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], device: torch.device | str = "cpu") -> SegmentMemory:
        """Restore what `state_dict` returned."""
        check_fields(state, ("rows", "kept", "seen", "projected"), "state")
        rows = tuple(rows.to(device) for rows in state["rows"])
        return SegmentMemory(rows, tuple(state["kept"]), tuple(state["seen"]), state["projected"])


class TransformerXLLayers(nn.Module):
    """Stack of layers, with one memory length for training and one for evaluation."""

    def __init__(self, config: Any, feed_forward: int, activation: Activation):
        super().__init__()
        self.segment, self.lengths = config.segment, (config.memory, config.test_memory)
        self.stack = nn.ModuleList(
            TransformerXLLayer(config.width, config.heads, feed_forward, activation, config.dropout)
            for _ in range(config.layers)
        )

    @property
    def memory(self) -> int:
        """Number of tokens remembered before a segment in the current mode (training or evaluation)."""
        trained, tested = self.lengths
        return trained if self.training or tested is None else tested

    def set_test_memory(self, tokens: int) -> None:
        """Set the memory length for evaluation. Any length works, because attention uses only distances."""
        self.lengths = self.lengths[0], tokens

    def plan(self, lengths: Sequence[int], before: SegmentMemory | None, device: torch.device) -> Segments:
        """Plan the next `lengths` tokens of every text."""
        carried: dict[str, Any] = {}
        with torch.inference_mode(False):  # plans are cached, and later calls may need gradients
            if before is not None:
                begun = [seen % self.segment for seen in before.seen]
                if _is_uniform_step(lengths, before.kept, begun, self.memory):
                    state: dict[str, Any] = {"carried": before.kept[0], "begun": begun[0], "device": device}
                    return plan_step(len(lengths), self.segment, self.memory, **state)
                carried = {"carried": before.kept, "begun": begun}
            return plan_segments(lengths, self.segment, self.memory, device=device, **carried)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Read whole texts from their beginning; nothing is remembered afterwards."""
        for layer in self.stack:
            x, _ = layer(x, None, segments)
        return x

    def extend(
        self, x: Tensor, lengths: Sequence[int], before: SegmentMemory, segments: Segments
    ) -> tuple[Tensor, SegmentMemory]:
        """Read the next `lengths` tokens of every text; return their vectors and the memory after them."""
        kept = []
        for layer, carried in zip(self.stack, before.rows, strict=True):
            x, rows = layer(x, carried, segments, projected=before.projected)
            kept.append(rows.index_select(0, segments.keep))
        seen = tuple(a + b for a, b in zip(before.seen, lengths, strict=True))
        return x, replace(before, rows=tuple(kept), kept=segments.kept, seen=seen)


def _is_uniform_step(lengths: Sequence[int], kept: Sequence[int], begun: Sequence[int], memory: int) -> bool:
    """Return whether all texts are at the same position and read one token, which attends to all kept rows."""
    states = set(zip(lengths, kept, begun, strict=True))
    return len(states) == 1 and lengths[0] == 1 and kept[0] - begun[0] <= memory


class TransformerXLEncoder(nn.Module):
    """Causal encoder of documents: a vector per leaf that depends on this leaf and earlier ones.

    Leaves are read in sequence order; their tree is ignored.

    Args:
        config: Sizes of the encoder.
        modalities: Modalities of the leaf values.
        kinds, keys: Kinds and keys of the domains; ignored.

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
        """Return a vector per leaf, and the flat forest of these leaves."""
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)
        return self.layers(self.dropout(x), self._segments(inputs.hierarchy)), flat_tree(inputs.hierarchy)

    def prepare(self, inputs: Inputs) -> None:
        """Build index structures that depend on the forest alone; call it when batches are made, ahead of their step."""
        flat_tree(inputs.hierarchy)
        self._segments(inputs.hierarchy)

    def _segments(self, hierarchy: Hierarchy) -> Segments:
        layers = self.layers
        key = ("segments", layers.segment, layers.memory)
        return hierarchy.cached(key, lambda: layers.plan(hierarchy.lengths, None, hierarchy.device))
