"""The published document models, by their names: their encoders from the options of `hsa train`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hsa.hierarchy import Hierarchy
from hsa.models import han, hat
from hsa.models.encoders import AnyEncoderConfig
from hsa.models.han import HanConfig
from hsa.models.hat import HatConfig
from hsa.training.options import DocumentOptions, ModelOptions


def han_encoder(model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy) -> HanConfig:
    """By default with as many levels as half of the documents have: higher ones would hardly be trained."""
    heights = hierarchy.structure.height[: hierarchy.num_trees]  # roots come first
    config = HanConfig(
        width=model.width,
        heads=model.heads,
        head_dim=model.head_dim,
        layers=model.layers,
        levels=documents.levels or max(1, int(np.median(heights))),
        dropout=model.dropout,
        encoder=documents.level_encoder,
        position_width=model.position_width,
    )
    han.check_levels(config, hierarchy)
    return config


def hat_encoder(model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy) -> HatConfig:
    config = HatConfig(
        width=model.width,
        heads=model.heads,
        layers=model.layers,
        dropout=model.dropout,
        layout=documents.layout,
        segment=documents.segment,
        segment_level=documents.segment_level,
    )
    hat.check_levels(config, hierarchy)
    return config


DOCUMENT_MODELS: dict[str, Callable[[ModelOptions, DocumentOptions, Hierarchy], AnyEncoderConfig]] = {
    "han": han_encoder,
    "hat": hat_encoder,
}
