"""Multi-level attention pooling: each level of a document has its own encoder and its own attention.

Words are pooled into sentences and sentences into documents (Yang et al., *Hierarchical Attention Networks for Document
Classification*, NAACL 2016), here for trees of any depth.
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
from hsa.nn.layer import EncoderLayer
from hsa.nn.pooling import segment_softmax, segment_weigh
from hsa.nn.positions import PositionFeatures, PositionProjection
from hsa.nn.sizes import check_sizes
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions

LevelEncoder = Literal["attention", "gru", "none"]


@dataclass(frozen=True)
class HanConfig:
    """Configuration of `HanEncoder`.

    Args:
        width: Width of the vectors of all levels.
        heads: Number of attention heads.
        head_dim: Channels per head; width / heads by default.
        layers: Number of layers of each level's encoder.
        levels: Number of levels with their own weights, from the leaves up. Higher levels use those of the last.
        feed_forward: Inner width of the feed-forward networks, 2·width by default; with a GRU, its width per direction,
            width / 2 by default; without an encoder, the width of u (see `HanEncoder`), width by default.
        dropout: Dropout rate on embeddings, residual branches and outputs of GRUs.
        encoder: Encoder of a family before it is pooled: "attention" among its members, a bidirectional "gru" over them
            (in their given order, whatever their domain), or "none".
        position_width, position_dim: See `EncoderConfig`. Only attention uses them.
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
            raise InvalidInput("encoder", got=repr(self.encoder), expected=expected)
        if self.levels < 1:
            raise InvalidInput("levels", got=self.levels, expected="1 or more")

    @property
    def keeps_leaves(self) -> bool:
        """Whether the output has a vector per leaf; here it has one per document."""
        return False

    @property
    def has_fixed_size(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class LevelWeights:
    """Pooling weights of all families of one height.

    Attributes:
        height: Height of these families; 1 for leaf families.
        level: Level whose weights pooled them, counted from 1.
        nodes: `[members]` Nodes of the forest.
        families: `[members]` Parents of the nodes.
        weights: `[members]` Weights of the nodes; they sum to one in every family.
    """

    height: int
    level: int
    nodes: Tensor
    families: Tensor
    weights: Tensor


def check_levels(config: HanConfig, hierarchy: Hierarchy) -> None:
    """Raise an error if no tree has as many levels as the model, because some weights would never be trained.

    >>> check_levels(HanConfig(levels=3), Hierarchy.from_nested([[3, 2], [4]]))
    Traceback (most recent call last):
    hsa.errors.InvalidInput: levels: expected at most 2, the depth of these trees (3 leaf families on level 1 and 2 families
    on level 2), got 3. Use fewer levels, or omit the option to choose them from the data
    """
    if config.levels <= hierarchy.depth:
        return
    if not hierarchy.depth:
        raise InvalidInput(
            "data",
            got="only trees that are single leaves",
            expected="trees with families to pool",
            fix="Choose a model without levels",
        )
    counts = [int((hierarchy.structure.height == height).sum()) for height in range(1, hierarchy.depth + 1)]
    listed = [_count_families(count, level) for level, count in enumerate(counts, start=1)]
    families = " and ".join(part for part in (", ".join(listed[:-1]), listed[-1]) if part)
    raise InvalidInput(
        "levels",
        got=config.levels,
        expected=f"at most {hierarchy.depth}, the depth of these trees ({families})",
        fix="Use fewer levels, or omit the option to choose them from the data",
    )


def _count_families(count: int, level: int) -> str:
    return f"{count:,} {'leaf ' * (level == 1)}{'family' if count == 1 else 'families'} on level {level}"


class HanEncoder(nn.Module):
    """Encoder that encodes and pools the families level by level, up to one vector per tree.

        h = encoder(members)        u = tanh(W h + b)        α = softmax over the family of u·c        s = Σ α h

    Each level has its own encoder, W, b and c. Leaf families are level 1; a parent is one level above its highest member.
    A tree that is a single leaf is represented by the vector of that leaf.

    Args:
        config: Sizes of the encoder.
        modalities, kinds, keys: See `HierarchicalEncoder`.

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
        """Return a vector per tree, and the forest of roots alone."""
        return self._read(inputs)

    @torch.no_grad()
    def weights(self, inputs: Inputs) -> list[LevelWeights]:
        """Return the pooling weights of every height, from the leaves up, computed without dropout."""
        record: list[LevelWeights] = []
        was_training = self.training
        try:
            self.eval()._read(inputs, record)
        finally:
            self.train(was_training)
        return record

    def prepare(self, inputs: Inputs) -> None:
        """Build index structures that depend on the forest alone; call it when batches are made, ahead of their step."""
        for step in steps(inputs.hierarchy)[0]:
            self._level(step).prepare(step.families)

    def _read(self, inputs: Inputs, record: list[LevelWeights] | None = None) -> tuple[Tensor, Hierarchy]:
        hierarchy = inputs.hierarchy
        x = self.dropout(self.embedding(inputs.values, inputs.leaves, hierarchy.num_leaves))
        # Reading `inputs.positions` builds them, so do not touch it without position features.
        node_positions = inputs.positions if self.features is not None else NodePositions.of_sequences(hierarchy)
        features = None if self.features is None else self.features(node_positions)

        def pool(members: Tensor, step: Step) -> Tensor:
            level = self._level(step)
            members = level.encode(members, step, features, node_positions)
            logits = level.score(members)
            note_flops(Flops(attention=entry_operations(members.shape[1], 1) * len(members), pooling=0))
            if record is not None:
                weights = segment_softmax(logits, step.sizes)[:, 0]
                parents = hierarchy.parent.index_select(0, step.nodes)
                record.append(LevelWeights(step.height, self._number(step), step.nodes, parents, weights))
            return segment_weigh(members, logits, step.sizes)

        return fold(x, hierarchy, pool)

    def _number(self, step: Step) -> int:
        return min(step.height, self.config.levels)

    def _level(self, step: Step) -> _Level:
        level = self.levels[self._number(step) - 1]
        assert isinstance(level, _Level)
        return level


class _Level(nn.Module):
    """Encoder of a level, and its pooling scores u·c."""

    def __init__(self, config: HanConfig, widths: dict[str, int]):
        super().__init__()
        width, attends = config.width, config.encoder == "attention"
        self.layers = nn.ModuleList(
            EncoderLayer(
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
