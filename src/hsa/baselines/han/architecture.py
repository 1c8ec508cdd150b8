"""Registration of HAN as a classifier architecture."""

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
"""Largest default: words, sentences, paragraphs. More would leave models of equal size almost no feed-forward network."""


def configure(options: ModelOptions, extra: Extra, hierarchy: Hierarchy, changes: Mapping[str, Any]) -> HanConfig:
    """Return the config of HAN for the options of a run.

    Each level has its own attention projections, so the head channels are divided among the levels: together they have as
    many as one layer of another model.
    """
    documents = document_options(extra)
    levels = min(usual_levels(hierarchy), _LEVELS) if documents.levels is None else documents.levels
    check_sizes(options)  # before the head channels are divided among the levels
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
