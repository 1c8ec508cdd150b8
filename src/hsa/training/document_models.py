"""The published document models, by their names: their encoders from the options of `hsa train`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from hsa.baselines.han import model as han
from hsa.baselines.han.model import HanConfig
from hsa.baselines.hat import model as hat
from hsa.baselines.hat.layouts import layout_pattern
from hsa.baselines.hat.model import HatConfig, HatEncoder, Returns
from hsa.baselines.transformer_xl.encoder import TransformerXLConfig
from hsa.models.encoders import AnyEncoderConfig
from hsa.nn.sizes import check_sizes
from hsa.training.options import DocumentOptions, ModelOptions
from hsa.tree.hierarchy import Hierarchy

_LEVELS = 3
"""Words, sentences, paragraphs; with more, models of equal size would have next to no feed-forward networks."""


def usual_levels(hierarchy: Hierarchy) -> int:
    """As many as half of the documents have, 1 at least."""
    return max(1, int(np.median(hierarchy.structure.height[: hierarchy.num_trees])))  # roots come first


def han_encoder(model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy) -> HanConfig:
    """By default with as many levels as half of the documents have, but at most 3: higher ones share the third's weights.

    Levels that attend each have projections of their own, so that channels are divided among them: together they have as
    many as one layer of other models.
    """
    levels = documents.levels
    if levels is None:
        levels = min(usual_levels(hierarchy), _LEVELS)
    check_sizes(model)  # whose heads must fit before they are divided
    channels = model.head_dim or model.width // model.heads
    config = HanConfig(
        width=model.width,
        heads=model.heads,
        head_dim=max(1, channels // levels),
        layers=model.layers,
        levels=levels,
        dropout=model.dropout,
        encoder=documents.level_encoder,
        position_width=model.position_width,
    )
    han.check_levels(config, hierarchy)
    return config


def hat_encoder(model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy) -> HatConfig:
    """With as many layers inside and across segments together as other models have, but one of each at least.

    With a warm start, of the sizes of the encoder that it starts from.
    """
    inside = [n for n in range(1, model.layers + 1) if len(layout_pattern(documents.layout, n)) <= model.layers]
    config = HatConfig(
        width=model.width,
        heads=model.heads,
        layers=max(inside, default=1),
        dropout=model.dropout,
        layout=documents.layout,
        segment=documents.segment,
        segment_level=documents.segment_level,
        warm_start=documents.warm_start,
    )
    hat.check_levels(config, hierarchy)
    return config if config.warm_start is None else _pretrained(config)[0]


def start_warm(encoder: nn.Module) -> None:
    """Give an encoder the weights that its configuration says it starts from, if it does."""
    if isinstance(encoder, HatEncoder) and encoder.config.warm_start is not None:
        encoder.start_from(_pretrained(encoder.config)[1])


def pretrained_parameters(encoder: nn.Module) -> list[nn.Parameter]:
    """Those that a warm start sets."""
    return encoder.pretrained_parameters() if isinstance(encoder, HatEncoder) else []


def _pretrained(config: HatConfig) -> tuple[HatConfig, dict[str, Tensor]]:
    """What a configuration starts from: the sizes that has, whatever the configuration's own, and its weights."""
    names = ("warm_start", "layout", "segment", "segment_level", "returns", "dropout")
    return _warm_start(*(getattr(config, name) for name in names))


@lru_cache(maxsize=1)  # asked for its sizes, then for its weights
def _warm_start(
    name: str, layout: str, segment: int, segment_level: int, returns: Returns, dropout: float
) -> tuple[HatConfig, dict[str, Tensor]]:
    from hsa.baselines.hat.warm_start import warm_start

    return warm_start(
        name, layout=layout, segment=segment, segment_level=segment_level, returns=returns, dropout=dropout
    )


def transformer_xl_encoder(
    model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy
) -> TransformerXLConfig:
    """Reads whatever tree as one sequence."""
    return TransformerXLConfig(**transformer_xl_sizes(model, documents, documents.segment))


def transformer_xl_sizes(model: ModelOptions, documents: DocumentOptions, segment: int) -> dict[str, Any]:
    """What the classifier and the language model have in common."""
    shared = {name: getattr(model, name) for name in ("width", "heads", "layers", "dropout")}
    return {**shared, "segment": segment, "memory": documents.memory, "test_memory": documents.test_memory}


DOCUMENT_MODELS: dict[str, Callable[[ModelOptions, DocumentOptions, Hierarchy], AnyEncoderConfig]] = {
    "han": han_encoder,
    "hat": hat_encoder,
    "transformer-xl": transformer_xl_encoder,
}
