"""Configuration of the decoder from the options of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsa.models.language_model import LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.registry import Extra
from hsa.training.language_model.data import LmData
from hsa.training.options import LanguageOptions


def decoder_sizes(options: ModelOptions, language: LanguageOptions) -> dict[str, Any]:
    """Return the options that all decoders share, as arguments of `LanguageModelConfig`."""
    names = ("width", "heads", "dropout", "near", "fusion", "shared_dim", "fusion_penalty")
    own = ("kv_heads", "feed_forward", "sinks", "positions")
    sizes = {name: getattr(options, name) for name in names} | {name: getattr(language, name) for name in own}
    return {**sizes, "branching": language.branching or None}


def configure(
    data: LmData, options: ModelOptions, language: LanguageOptions, extra: Extra, changes: Mapping[str, Any]
) -> LanguageModelConfig:
    """Return the configuration of a decoder.

    The parameters of the kinds of attention differ only in one bias per head and layer.
    """
    return LanguageModelConfig(
        data.tokenizer.get_vocab_size(),
        layers=options.layers,
        **decoder_sizes(options, language),
        threshold=language.threshold,
        top_k=options.top_k or None,
        tile=language.tile,
        closes=data.closes if language.tree == "text" else {},
        max_length=language.max_length,
        **changes,
    )
