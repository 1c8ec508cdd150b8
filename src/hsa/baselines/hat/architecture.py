"""Registration of HAT as a classifier architecture, with a warm start from a pre-trained encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from hsa.baselines.hat.layouts import layout_pattern
from hsa.baselines.hat.model import HatConfig, HatEncoder, Returns, check_levels
from hsa.baselines.options import document_options
from hsa.models.options import ModelOptions
from hsa.models.registry import Architecture, Extra
from hsa.tree.hierarchy import Hierarchy


def configure(options: ModelOptions, extra: Extra, hierarchy: Hierarchy, changes: Mapping[str, Any]) -> HatConfig:
    """Return the config of HAT for the options of a run.

    Layers inside and across segments together number `options.layers` at most, with at least one inside segments. With a
    warm start, the sizes are those of the pre-trained encoder.
    """
    documents = document_options(extra)
    inside = [n for n in range(1, options.layers + 1) if len(layout_pattern(documents.layout, n)) <= options.layers]
    config = HatConfig(
        width=options.width,
        heads=options.heads,
        layers=max(inside, default=1),
        dropout=options.dropout,
        layout=documents.layout,
        segment=documents.segment,
        segment_level=documents.segment_level,
        warm_start=documents.warm_start,
    )
    check_levels(config, hierarchy)
    return config if config.warm_start is None else _pretrained(config)[0]


def start_warm(encoder: nn.Module, load: bool) -> list[nn.Parameter]:
    """Return the parameters that a warm start sets (none without one); also load their pre-trained weights if `load`."""
    assert isinstance(encoder, HatEncoder)
    if load and encoder.config.warm_start is not None:
        encoder.start_from(_pretrained(encoder.config)[1])
    return encoder.pretrained_parameters()


def tokenizer(extra: Extra, say: Callable[[str], None]) -> Any:
    """Return the tokenizer of the pre-trained encoder, or None without a warm start."""
    name = document_options(extra).warm_start
    if name is None:
        return None
    from hsa.baselines.hat.warm_start import pretrained_tokenizer

    say(f"loading the tokenizer of {name}")
    return pretrained_tokenizer(name)


def _pretrained(config: HatConfig) -> tuple[HatConfig, dict[str, Tensor]]:
    """Return the config with the sizes of its pre-trained encoder, and the weights of that encoder."""
    names = ("warm_start", "layout", "segment", "segment_level", "returns", "dropout")
    return _warm_start(*(getattr(config, name) for name in names))


@lru_cache(maxsize=1)  # called once for the sizes, then again for the weights
def _warm_start(
    name: str, layout: str, segment: int, segment_level: int, returns: Returns, dropout: float
) -> tuple[HatConfig, dict[str, Tensor]]:
    from hsa.baselines.hat.warm_start import warm_start

    return warm_start(
        name, layout=layout, segment=segment, segment_level=segment_level, returns=returns, dropout=dropout
    )


HAT = Architecture(HatConfig, HatEncoder, configure, warm_start=start_warm, tokenizer=tokenizer)
