"""`ModelOptions`: the sizes of models, as named by `hsa train` and recipes. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsa.nn.alpha_option import AlphaOption, check_alpha
from hsa.nn.encoder_config import EncoderConfig
from hsa.registry import FUSIONS


@dataclass(frozen=True)
class ModelOptions:
    """The model. The first one of a run has these sizes; the others are matched to its number of parameters.

    Args:
        width: Size of the leaf vectors.
        heads: Number of attention heads.
        head_dim: Channels per head; width / heads by default.
        layers: Number of layers (in total for hat, per level for han).
        dropout: Dropout on embeddings and residual branches.
        fusion: Fusion of the heads: concatenation, talking (they mix logits and weights), collaborative (one query and
            key projection for all) or over-heads (every leaf weighs its heads).
        shared_dim: For collaborative: channels of the shared queries and keys; half of all heads' by default.
        fusion_penalty: For over-heads: weight of the penalty that keeps leaves from all preferring the same head.
        entmax: For hierarchical and multiscale: entmax with this α in place of softmax, which gives small logits no weight:
            a number from 1 (softmax) to 2 (sparsemax), or learned (for every layer, level and head).
        include_self: For hierarchical: leaves attend to themselves. The paper's experiments pass --no-include-self.
        near: For multiscale: number of neighbouring leaf families on each side that are attended to leaf by leaf.
        top_k: For multiscale and clustered: number of further leaf families attended to leaf by leaf, the best ones. For
            clustered language models: number of groups of keys, in place of --threshold.
        windows: Fixed windows of this many leaves, from the leaves up, in place of the data's own tree.
        position_width: Number of position features; 0 for no positions.
        position_input: Also add positions to the leaf vectors.
        pooling: Pooling of the leaves of a tree into one vector: mean, max, attention, first or last.
    """

    width: int = EncoderConfig.width
    heads: int = EncoderConfig.heads
    head_dim: int | None = EncoderConfig.head_dim
    layers: int = EncoderConfig.layers
    dropout: float = EncoderConfig.dropout
    fusion: str = EncoderConfig.fusion
    shared_dim: int | None = EncoderConfig.shared_dim
    fusion_penalty: float = EncoderConfig.fusion_penalty
    entmax: AlphaOption = EncoderConfig.entmax
    include_self: bool = EncoderConfig.include_self
    near: int = EncoderConfig.near
    top_k: int = EncoderConfig.top_k
    windows: tuple[int, ...] = EncoderConfig.windows
    position_width: int = EncoderConfig.position_width
    position_input: bool = EncoderConfig.position_input
    pooling: Literal["mean", "max", "attention", "first", "last"] = "mean"

    def __post_init__(self) -> None:
        check_alpha(self.entmax)
        FUSIONS.check(self.fusion)
