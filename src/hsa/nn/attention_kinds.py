"""The kinds of attention that an encoder's layers can have. `hsa.registry.KINDS` names them; plug-ins add theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hsa.nn.attention import Attention, Clustered, Flat, Hierarchical, Multiscale
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.learned_alpha import LearnedAlpha, make_alpha


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention.

    Attributes:
        build: Builds the attention of one layer.
        on_flat_trees: Whether it attends to all leaves of a tree at once: the encoder hands it trees without inner nodes.
        takes_entmax: Whether α-entmax can replace its softmax.
        has_matrix: Whether it gives a weight to every pair of leaves, which can be drawn as a matrix.
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
BOTTOM_UP = AttentionKind(lambda config: Flat(), has_matrix=False)  # bottom up, a family is a flat tree
