"""Kinds of attention for the layers of an encoder, by name in `hsa.registry.KINDS`. Plug-ins register further ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hsa.nn.attention import Attention, Clustered, Flat, Hierarchical, Multiscale
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.learned_alpha import LearnedAlpha, make_alpha


@dataclass(frozen=True)
class AttentionKind:
    """Kind of attention.

    Attributes:
        build: Function that builds the attention module of one layer.
        on_flat_trees: Whether it attends to all leaves of a tree at once; the encoder then passes flat trees.
        takes_entmax: Whether α-entmax can replace its softmax.
        has_matrix: Whether it has a weight for every pair of leaves, so that plots can show a matrix.
    """

    build: Callable[[EncoderConfig], Attention]
    on_flat_trees: bool = False
    takes_entmax: bool = False
    has_matrix: bool = True


def _alpha(config: EncoderConfig) -> float | LearnedAlpha | None:
    return make_alpha(config.entmax, config.entmax_levels, config.heads)


HIERARCHICAL = AttentionKind(
    lambda config: Hierarchical(include_self=config.include_self, alpha=_alpha(config)), takes_entmax=True
)
MULTISCALE = AttentionKind(
    lambda config: Multiscale(config.heads, near=config.near, top_k=config.top_k, alpha=_alpha(config)),
    takes_entmax=True,
)
CLUSTERED = AttentionKind(
    lambda config: Clustered(config.heads, group=config.group, top_k=config.top_k, tile=config.tile)
)
FLAT = AttentionKind(lambda config: Flat(), on_flat_trees=True)
BOTTOM_UP = AttentionKind(lambda config: Flat(), has_matrix=False)  # the encoder passes each family as a flat tree
