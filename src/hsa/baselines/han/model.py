"""Multi-level attention pooling: every level of a document has its own encoder and its own attention.

Words become sentences, sentences become documents (Yang et al., *Hierarchical Attention Networks for Document
Classification*, NAACL 2016), here with as many levels as the data's own trees have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hsa.attention.flops import Flops, entry_operations
from hsa.baselines.han.family_gru import FamilyGRU
from hsa.errors import InvalidInput
from hsa.nn.attention import Flat, note_flops
from hsa.nn.bottom_up import Step, attend, fold, steps
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.inputs import Inputs
from hsa.nn.layer import HierarchicalEncoderLayer
from hsa.nn.pooling import segment_softmax, segment_weigh
from hsa.nn.positions import PositionFeatures, PositionProjection
from hsa.nn.sizes import check_sizes
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions

LevelEncoder = Literal["attention", "gru", "none"]


@dataclass(frozen=True)
class HanConfig:
    """The sizes of multi-level pooling.

    Args:
        width: of the vectors of all levels.
        heads: of attention inside a family.
        head_dim: channels per head; width / heads by default.
        layers: of every level's encoder.
        levels: that have weights of their own, from the leaves up; those of the last serve what lies above it too.
        feed_forward: inner width of the feed-forward networks, 2·width by default; with a GRU, its width per direction,
            width / 2 by default; without an encoder, the width of u, width by default (see `HanEncoder`).
        dropout: on embeddings, residual branches and outputs of GRUs.
        encoder: what a level does before it pools: "attention" among the members of a family, a bidirectional "gru" along
            them (in the order in which they are given, whatever their domain), "none".
        position_width, position_dim: see `EncoderConfig`; for attention, a GRU needs none.
    """

    width: int = EncoderConfig.width
    heads: int = EncoderConfig.heads
    head_dim: int | None = None
    layers: int = EncoderConfig.layers
    levels: int = 2
    feed_forward: int | None = None
    dropout: float = EncoderConfig.dropout
    encoder: LevelEncoder = "attention"
    position_width: int = EncoderConfig.position_width
    position_dim: int = EncoderConfig.position_dim
    architecture: str = field(default="han", init=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.encoder not in get_args(LevelEncoder):
            expected = f"one of {', '.join(get_args(LevelEncoder))}"
            raise InvalidInput("encoder", given=repr(self.encoder), expected=expected)
        if self.levels < 1:
            raise InvalidInput("levels", given=self.levels, expected="1 or more")

    @property
    def keeps_leaves(self) -> bool:
        """A document is one vector in the end."""
        return False

    @property
    def has_fixed_size(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class LevelWeights:
    """How the families of one height weighed their members.

    Attributes:
        height: of these families: 1 for those of leaves.
        level: whose attention it was, counted from 1.
        nodes: `[members]` nodes of the forest.
        families: `[members]` their parents.
        weights: `[members]`, which sum to one in every family.
    """

    height: int
    level: int
    nodes: Tensor
    families: Tensor
    weights: Tensor


def check_levels(config: HanConfig, hierarchy: Hierarchy) -> None:
    """Raises where trees are lower than a model has levels: weights would never be trained.

    >>> check_levels(HanConfig(levels=3), Hierarchy.from_nested([[3, 2], [4]]))
    Traceback (most recent call last):
    hsa.errors.InvalidInput: levels: given 3, expected at most 2: the trees of these data have 3 families of leaves (level 1)
    and 2 of level 2; give fewer levels, or none for as many as the data have
    """
    if config.levels <= hierarchy.depth:
        return
    if not hierarchy.depth:
        raise InvalidInput(
            "data",
            given="trees that are single leaves",
            expected="families of leaves, for a model that pools them",
            fix="choose a model without levels",
        )
    s = hierarchy.structure
    counts = [f"{int((s.height == height).sum()):,}" for height in range(1, hierarchy.depth + 1)]
    listed = [f"{count} of level {level}" for level, count in enumerate(counts[1:], start=2)]
    named = [f"{counts[0]} {'family' if counts[0] == '1' else 'families'} of leaves (level 1)", *listed]
    have = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    raise InvalidInput(
        "levels",
        given=config.levels,
        expected=f"at most {hierarchy.depth}: the trees of these data have {have}",
        fix="give fewer levels, or none for as many as the data have",
    )


class HanEncoder(nn.Module):
    """Families are encoded and pooled by attention, level by level, up to one vector per tree.

        h = encoder(members)        u = tanh(W h + b)        α = softmax over the family of u·c        s = Σ α h

    The encoder, W, b and c are those of the level: families of leaves are level 1, a parent is a level above its highest
    member. A tree that is a single leaf is that leaf's vector.

    Args:
        config: the sizes.
        modalities, kinds, keys: see `HierarchicalEncoder`.

    >>> from hsa import Signal, collate
    >>> from hsa.signals import Sequence
    >>> document = Signal(Sequence(2), [Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> encoder = HanEncoder(HanConfig(width=16), {"text": Modality(tokens=10)})
    >>> x, roots = encoder(collate([document, document]))
    >>> x.shape, roots
    (torch.Size([2, 16]), Hierarchy(2 trees, 2 leaves, 2 nodes, 0 families, depth 0))
    >>> [level.weights.shape for level in encoder.weights(collate([document]))]  # of 5 words, of 2 sentences
    [torch.Size([5]), torch.Size([2])]
    """

    def __init__(
        self,
        config: HanConfig,
        modalities: Mapping[str, Modality],
        kinds: Sequence[str] = ("sequence",),
        keys: Sequence[str] = (),
    ):
        super().__init__()
        self.config = config
        self.embedding = Embedding(modalities, config.width)
        self.dropout = nn.Dropout(config.dropout)
        uses_positions = (
            config.encoder == "attention" and min(config.position_width, config.position_dim) > 0 and bool(kinds)
        )
        self.features = PositionFeatures(config.position_width, kinds, keys) if uses_positions else None
        widths = {} if self.features is None else self.features.widths
        self.levels = nn.ModuleList(_Level(config, widths) for _ in range(config.levels))

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """A vector per tree, and the forest of roots alone."""
        return self._read(inputs)

    @torch.no_grad()
    def weights(self, inputs: Inputs) -> list[LevelWeights]:
        """What was pooled with which weight, from the leaves up; without dropout."""
        record: list[LevelWeights] = []
        was_training = self.training
        try:
            self.eval()._read(inputs, record)
        finally:
            self.train(was_training)
        return record

    def prepare(self, inputs: Inputs) -> None:
        """Build what depends on the forest alone: call it where batches are made, ahead of the step that uses them."""
        for step in steps(inputs.hierarchy)[0]:
            self._level(step).prepare(step.families)

    def _read(self, inputs: Inputs, record: list[LevelWeights] | None = None) -> tuple[Tensor, Hierarchy]:
        hierarchy = inputs.hierarchy
        x = self.dropout(self.embedding(inputs.values, inputs.leaves, hierarchy.num_leaves))
        # Without position features the batch's positions are never built, as in `HierarchicalEncoder`.
        node_positions = inputs.positions if self.features is not None else NodePositions.of_sequences(hierarchy)
        features = None if self.features is None else self.features(node_positions)

        def become(members: Tensor, step: Step) -> Tensor:
            level = self._level(step)
            members = level.encode(members, step, features, node_positions)
            logits = level.score(members)
            note_flops(Flops(attention=entry_operations(members.shape[1], 1) * len(members), pooling=0))
            if record is not None:
                weights = segment_softmax(logits, step.sizes)[:, 0]
                parents = hierarchy.parent.index_select(0, step.nodes)
                record.append(LevelWeights(step.height, self._number(step), step.nodes, parents, weights))
            return segment_weigh(members, logits, step.sizes)

        return fold(x, hierarchy, become)

    def _number(self, step: Step) -> int:
        return min(step.height, self.config.levels)

    def _level(self, step: Step) -> _Level:
        level = self.levels[self._number(step) - 1]
        assert isinstance(level, _Level)
        return level


class _Level(nn.Module):
    """The encoder of a level, and the scores u·c by which it pools."""

    def __init__(self, config: HanConfig, widths: dict[str, int]):
        super().__init__()
        width, attends = config.width, config.encoder == "attention"
        self.layers = nn.ModuleList(
            HierarchicalEncoderLayer(
                width,
                config.heads,
                Flat(),
                feed_forward=config.feed_forward,
                head_dim=config.head_dim,
                dropout=config.dropout,
            )
            for _ in range(config.layers if attends else 0)
        )
        self.positions = nn.ModuleList(
            PositionProjection(widths, config.heads, config.position_dim) for _ in range(config.layers if widths else 0)
        )
        per_direction = config.feed_forward or max(1, width // 2)
        self.gru = FamilyGRU(width, per_direction, config.layers, config.dropout) if config.encoder == "gru" else None
        compared = config.feed_forward or width if config.encoder == "none" else width
        self.score = nn.Sequential(nn.Linear(width, compared), nn.Tanh(), nn.Linear(compared, 1, bias=False))

    def prepare(self, families: Hierarchy) -> None:
        if self.gru is not None:
            self.gru.prepare(families)
        if len(self.layers):
            self.layers[0].attention.prepare(families)  # type: ignore[union-attr, operator]

    def encode(
        self, members: Tensor, step: Step, features: dict[str, Tensor] | None, node_positions: NodePositions
    ) -> Tensor:
        if self.gru is not None:
            return self.gru(members, step.families)
        return attend(members, step, self.layers, self.positions, features, node_positions)
