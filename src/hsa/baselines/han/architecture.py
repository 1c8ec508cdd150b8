"""HAN as an architecture of classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsa.baselines.han.model import HanConfig, HanEncoder, check_levels
from hsa.baselines.options import document_options
from hsa.models.options import ModelOptions
from hsa.models.registry import Architecture, Extra
from hsa.models.tree_encoder import usual_levels
from hsa.nn.sizes import check_sizes
from hsa.tree.hierarchy import Hierarchy

_LEVELS = 3
"""Words, sentences, paragraphs; with more, models of equal size would have next to no feed-forward networks."""


def configure(options: ModelOptions, extra: Extra, hierarchy: Hierarchy, changes: Mapping[str, Any]) -> HanConfig:
    """Return the config of HAN for the options of a run.

    Levels that attend each have projections of their own, so channels are divided among them: together they have as many
    as one layer of other models.
    """
    documents = document_options(extra)
    levels = min(usual_levels(hierarchy), _LEVELS) if documents.levels is None else documents.levels
    check_sizes(options)  # whose heads must fit before they are divided
    channels = options.head_dim or options.width // options.heads
    config = HanConfig(
        width=options.width,
        heads=options.heads,
        head_dim=max(1, channels // levels),
        layers=options.layers,
        levels=levels,
        dropout=options.dropout,
        encoder=documents.level_encoder,
        position_width=options.position_width,
    )
    check_levels(config, hierarchy)
    return config


HAN = Architecture(HanConfig, HanEncoder, configure, explanation="hsa.baselines.han.weights:DOCUMENT_WEIGHTS")
