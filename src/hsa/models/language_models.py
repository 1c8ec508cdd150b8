"""The language models there are: one per kind of configuration."""

from __future__ import annotations

from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.models.language_model import LanguageModel, LanguageModelConfig

AnyLanguageConfig = LanguageModelConfig | TransformerXLLanguageConfig
AnyLanguageModel = LanguageModel | TransformerXLLanguageModel


def build_language_model(config: AnyLanguageConfig) -> AnyLanguageModel:
    """The model of a configuration, with new weights.

    >>> build_language_model(TransformerXLLanguageConfig(11, width=8, heads=2, layers=1)).config.memory
    128
    """
    if isinstance(config, TransformerXLLanguageConfig):
        return TransformerXLLanguageModel(config)
    return LanguageModel(config)
