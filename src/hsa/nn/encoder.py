"""`HierarchicalEncoder`: leaf values of a forest → a vector per leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.alpha_option import AlphaOption, check_alpha
from hsa.nn.attention import Attention, Clustered, Flat, Hierarchical, Multiscale, NoAttention, flat_tree
from hsa.nn.bottom_up import bottom_up, steps
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.grouped_linear import Groups
from hsa.nn.head_fusion import HeadFusion, head_fusion
from hsa.nn.inputs import Inputs
from hsa.nn.layer import HierarchicalEncoderLayer
from hsa.nn.learned_alpha import LearnedAlpha, make_alpha
from hsa.nn.pooling import pool_families
from hsa.nn.positions import PositionFeatures, PositionProjection
from hsa.nn.sizes import check_sizes
from hsa.research.trilinear.module import HierarchicalTrilinear, Trilinear
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions

Kind = Literal[
    "hierarchical", "multiscale", "clustered", "bottom-up", "flat", "trilinear", "hierarchical-trilinear", "none"
]

WITH_ENTMAX = ("hierarchical", "multiscale")
"""Operators that can attend by entmax."""
_ON_ALL_LEAVES = ("flat", "trilinear")  # whatever tree they hang in


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes of an encoder.

    Args:
        width: of the leaf vectors.
        heads: of attention.
        head_dim: channels per head; width / heads by default.
        layers: how many.
        feed_forward: inner width of the feed-forward networks; 2·width by default.
        dropout: on embeddings and residual branches.
        kind: "hierarchical" (the paper's), "multiscale" (own rows), "clustered" (own rows over trees found from the
            keys), "bottom-up" (families attend and become one vector, level by level), "flat" (softmax attention over
            all leaves), "trilinear" (over all pairs of leaves), "hierarchical-trilinear" (over pairs of siblings on the
            tree), "none" (no attention: DeepSets).
        fusion: how heads become one: "concatenation", "talking", "collaborative" or "over-heads"; see `head_fusion`, also
            for `shared_dim` and `fusion_penalty`.
        entmax: for "hierarchical" and "multiscale": α-entmax in place of softmax, which leaves out what matters little: a
            number from 1 to 2, or "learned" (per layer, level and head). None: softmax.
        entmax_levels: heights of families with a learned α of their own, from the leaves up; taller ones share the last.
        include_self: leaves attend to themselves; for "hierarchical", where the paper's do not.
        near, top_k: for "multiscale": neighbouring and best leaf families that are exact; `top_k` also for "clustered".
        group, window: for "clustered": keys per group, queries that share a choice.
        windows: fixed windows of so many leaves, from the leaves up, in place of the data's own tree.
        position_width: of the position features; 0 for no positions.
        position_dim: channels of ε per head; 0 to keep places out of the logits.
        position_input: also add a projection of every leaf's place to its vector.
        pool: "families": after every layer but the last, leaf families are pooled into their parents, so that the
            signal coarsens by a level; "none": the tree stays.
    """

    width: int = 128
    heads: int = 4
    head_dim: int | None = None
    layers: int = 2
    feed_forward: int | None = None
    dropout: float = 0.1
    kind: Kind = "hierarchical"
    fusion: str = "concatenation"
    shared_dim: int | None = None
    fusion_penalty: float = 0.01
    entmax: AlphaOption = None
    entmax_levels: int = 3
    include_self: bool = False
    near: int = 0
    top_k: int = 0
    group: int = 8
    window: int = 16
    windows: tuple[int, ...] = ()
    position_width: int = 64
    position_dim: int = 16
    position_input: bool = False
    pool: Literal["none", "families"] = "none"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInput("kind", given=repr(self.kind), expected=f"one of {', '.join(get_args(Kind))}")
        check_sizes(self)
        with torch.device("meta"):  # takes no random numbers from the models that follow
            self._check_entmax(self.new_fusion())  # which raises if the sizes do not fit

    @property
    def keeps_leaves(self) -> bool:
        """Whether the encoder gives a vector for every leaf of its input."""
        return self.pool == "none" and self.kind != "bottom-up"

    def _check_entmax(self, fusion: HeadFusion) -> None:
        check_alpha(self.entmax)
        if self.entmax_levels < 1:
            raise InvalidInput("entmax_levels", given=self.entmax_levels, expected="1 or more")
        if self.entmax is not None and self.kind not in WITH_ENTMAX:
            raise InvalidInput(
                "entmax",
                given=f"{self.entmax} for attention of the kind {self.kind!r}",
                expected=f"one of the kinds {', '.join(WITH_ENTMAX)}: the others have softmax kernels, or no weights",
            )
        if self.entmax is not None and fusion.mixing is not None:
            raise InvalidInput(
                "entmax",
                given=f"{self.entmax} with heads that talk",
                expected="another fusion: mixed rows would have zeros only where all heads have them",
            )

    def new_alpha(self) -> float | LearnedAlpha | None:
        """For a layer of these sizes."""
        return make_alpha(self.entmax, self.entmax_levels, self.heads)

    def new_fusion(self) -> HeadFusion:
        """For a layer of these sizes."""
        sizes = self.width, self.heads, self.head_dim or self.width // self.heads
        return head_fusion(self.fusion, *sizes, shared_dim=self.shared_dim, penalty=self.fusion_penalty)


class HierarchicalEncoder(nn.Module):
    """Embeddings per modality, positions per domain, and layers of attention on the tree.

    Args:
        config: the sizes.
        modalities: what the leaves hold.
        kinds: the kinds of domains in the data: some of "sequence", "grid", "graph", "table".
        keys: the keys of its tables.

    >>> import torch
    >>> from hsa import Signal, collate
    >>> batch = collate([Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> encoder = HierarchicalEncoder(EncoderConfig(width=16), {"text": Modality(tokens=10)}, kinds=("sequence",))
    >>> x, forest = encoder(batch)
    >>> x.shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        config: EncoderConfig,
        modalities: Mapping[str, Modality],
        kinds: Sequence[str] = ("sequence",),
        keys: Sequence[str] = (),
    ):
        super().__init__()
        self.config = config
        self.names = tuple(modalities)
        # Pooled leaves mix modalities: they get projections of their own. Bottom-up, one layer is for all levels.
        pools = config.pool != "none" and len(modalities) > 1
        self.num_groups = 1 if config.kind == "bottom-up" else len(modalities) + pools
        self.embedding = Embedding(modalities, config.width)
        self.dropout = nn.Dropout(config.dropout)
        attentions = [_attention(config) for _ in range(config.layers)]
        self.layers = nn.ModuleList(
            HierarchicalEncoderLayer(
                config.width,
                config.heads,
                attention,
                fusion=config.new_fusion(),
                modalities=self.num_groups,
                feed_forward=config.feed_forward,
                head_dim=config.head_dim,
                dropout=config.dropout,
            )
            for attention in attentions
        )
        self.features: PositionFeatures | None = None
        self.positions = nn.ModuleList()
        kinds = ("sequence",) if config.kind in _ON_ALL_LEAVES or config.windows else kinds
        uses = config.position_width > 0 and bool(kinds)
        in_logits = attentions[0].uses_positions and config.position_dim > 0
        if uses and (in_logits or config.position_input):
            self.features = PositionFeatures(config.position_width, kinds, keys)
        if self.features is not None and in_logits:
            self.positions = nn.ModuleList(
                PositionProjection(self.features.widths, config.heads, config.position_dim) for _ in attentions
            )
        self.place = (
            PositionProjection(self.features.widths, 1, config.width)
            if self.features is not None and config.position_input
            else None
        )

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """A vector per leaf, and the forest these leaves hang in: that of the inputs unless the encoder pools."""
        hierarchy, places = self._tree(inputs)
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)  # knows unknown modalities
        features = None if self.features is None else self.features(places)
        if self.place is not None and features is not None:
            x = x + self.place(features, places.row[hierarchy.tensor("leaf_nodes")])[:, 0]
        x = self.dropout(x)
        if self.config.kind == "bottom-up":
            return bottom_up(x, hierarchy, self.layers, self.positions, features, places)
        groups = Groups.of(inputs.leaves, self.names, self.num_groups)
        for i, layer in enumerate(self.layers):
            if i and self.config.pool == "families":  # lone leaves too, whatever else is in the batch
                x, hierarchy, places = pool_families(x, hierarchy, places)
                groups = Groups((0,) * (self.num_groups - 1) + (len(x),), None, None)
            positions = self.positions[i](features, places.row) if len(self.positions) else None
            x = layer(x, hierarchy, groups, positions)
        return x, hierarchy

    def prepare(self, inputs: Inputs) -> None:
        """Build what depends on the forest alone: call it where batches are made, ahead of the step that uses them."""
        hierarchy, _ = self._tree(inputs)
        if self.config.kind == "bottom-up":
            for step in steps(hierarchy)[0]:
                self.layers[0].attention.prepare(step.families)  # type: ignore[union-attr, operator]
            return
        self.layers[0].attention.prepare(hierarchy)  # type: ignore[union-attr, operator]

    def _tree(self, inputs: Inputs) -> tuple[Hierarchy, NodePositions]:
        """The forest attention runs on."""
        config, hierarchy = self.config, inputs.hierarchy
        if config.kind in _ON_ALL_LEAVES:
            flat = flat_tree(hierarchy)
            return flat, NodePositions.of_sequences(flat)
        if config.windows:
            regular = hierarchy.cached(
                ("windows", config.windows),
                lambda: Hierarchy.regular(hierarchy.lengths, config.windows).to(hierarchy.device),
            )
            return regular, NodePositions.of_sequences(regular)
        # Models without positions ask for no places: those of large graphs cost, those of some grids do not exist.
        return hierarchy, inputs.places if self.features is not None else NodePositions.of_sequences(hierarchy)


def _attention(config: EncoderConfig) -> Attention:
    if config.kind == "hierarchical":
        return Hierarchical(include_self=config.include_self, alpha=config.new_alpha())
    if config.kind == "multiscale":
        return Multiscale(config.heads, near=config.near, top_k=config.top_k, alpha=config.new_alpha())
    if config.kind == "clustered":
        return Clustered(config.heads, group=config.group, top_k=config.top_k, window=config.window)
    if config.kind == "trilinear":
        return Trilinear()
    if config.kind == "hierarchical-trilinear":
        return HierarchicalTrilinear()
    return NoAttention() if config.kind == "none" else Flat()  # bottom-up, a family is a flat tree
