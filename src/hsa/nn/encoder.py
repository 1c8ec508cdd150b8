"""Hierarchical transformer encoder: from the leaf values of a forest to a vector per leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hsa.nn.attention import flat_tree
from hsa.nn.bottom_up import bottom_up, steps
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.grouped_linear import Groups
from hsa.nn.inputs import Inputs
from hsa.nn.layer import EncoderLayer
from hsa.nn.pooling import pool_families
from hsa.nn.positions import PositionFeatures, PositionProjection
from hsa.registry import KINDS
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions


class HierarchicalEncoder(nn.Module):
    """Transformer encoder over trees: embeddings per modality, positions per domain, and layers of attention on the tree.

    Args:
        config: Sizes and kind of attention.
        modalities: Description of the leaves of each modality, by name.
        kinds: Kinds of domains in the data: some of "sequence", "grid", "graph" and "table".
        keys: Keys of the tables in the data.

    >>> from hsa import Signal, collate
    >>> from hsa.nn import EncoderConfig, HierarchicalEncoder, Modality
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
        # Pooled leaves mix modalities and get projections of their own. Bottom-up layers serve all levels.
        pools = config.pool != "none" and len(modalities) > 1
        self.num_groups = 1 if config.kind == "bottom-up" else len(modalities) + pools
        self.embedding = Embedding(modalities, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.kind = KINDS.get(config.kind)
        attentions = [self.kind.build(config) for _ in range(config.layers)]
        self.layers = nn.ModuleList(
            EncoderLayer(
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
        kinds = ("sequence",) if self.kind.on_flat_trees or config.windows else kinds
        uses = config.position_width > 0 and bool(kinds)
        in_logits = attentions[0].uses_positions and config.position_dim > 0
        if uses and (in_logits or config.position_input):
            self.features = PositionFeatures(config.position_width, kinds, keys)
        if self.features is not None and in_logits:
            self.positions = nn.ModuleList(
                PositionProjection(self.features.widths, config.heads, config.position_dim) for _ in attentions
            )
        self.input_position = (
            PositionProjection(self.features.widths, 1, config.width)
            if self.features is not None and config.position_input
            else None
        )

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """Encode a batch.

        Args:
            inputs: A batch from `hsa.collate`, or any object with its values, leaves, hierarchy and positions.

        Returns:
            A vector per leaf, `[leaves, width]`, and the forest of these leaves. The forest differs from that of the inputs
            if the encoder pools, uses fixed windows or attends to flat trees.
        """
        hierarchy, node_positions = self._tree(inputs)
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)  # refuses unknown modalities
        features = None if self.features is None else self.features(node_positions)
        if self.input_position is not None and features is not None:
            x = x + self.input_position(features, node_positions.row[hierarchy.tensor("leaf_nodes")])[:, 0]
        x = self.dropout(x)
        if self.config.kind == "bottom-up":
            return bottom_up(x, hierarchy, self.layers, self.positions, features, node_positions)
        groups = Groups.of(inputs.leaves, self.names, self.num_groups)
        for i, layer in enumerate(self.layers):
            if i and self.config.pool == "families":  # single leaves too: results must not depend on the batch
                x, hierarchy, node_positions = pool_families(x, hierarchy, node_positions)
                groups = Groups((0,) * (self.num_groups - 1) + (len(x),), None, None)
            positions = self.positions[i](features, node_positions.row) if len(self.positions) else None
            x = layer(x, hierarchy, groups, positions)
        return x, hierarchy

    def prepare(self, inputs: Inputs) -> None:
        """Build and cache everything that depends on the forest alone. Call it where batches are made."""
        hierarchy, _ = self._tree(inputs)
        if self.config.kind == "bottom-up":
            for step in steps(hierarchy)[0]:
                self.layers[0].attention.prepare(step.families)  # type: ignore[union-attr, operator]
            return
        self.layers[0].attention.prepare(hierarchy)  # type: ignore[union-attr, operator]

    def _tree(self, inputs: Inputs) -> tuple[Hierarchy, NodePositions]:
        """Return the forest that attention runs on, and the positions of its nodes."""
        config, hierarchy = self.config, inputs.hierarchy
        if self.kind.on_flat_trees:
            flat = flat_tree(hierarchy)
            return flat, NodePositions.of_sequences(flat)
        if config.windows:
            regular = hierarchy.cached(
                ("windows", config.windows),
                lambda: Hierarchy.regular(hierarchy.lengths, config.windows).to(hierarchy.device),
            )
            return regular, NodePositions.of_sequences(regular)
        # Do not build the batch's positions unless they are used: they are costly on large graphs, and grids of more than
        # three axes have none.
        return hierarchy, inputs.positions if self.features is not None else NodePositions.of_sequences(hierarchy)
