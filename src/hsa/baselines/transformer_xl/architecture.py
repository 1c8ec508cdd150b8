"""Registration of Transformer-XL as an architecture of classifiers and of language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hsa.baselines.options import document_options
from hsa.baselines.transformer_xl.encoder import TransformerXLConfig, TransformerXLEncoder
from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.models.options import ModelOptions
from hsa.models.registry import Architecture, Extra, LanguageArchitecture
from hsa.tree.hierarchy import Hierarchy

if TYPE_CHECKING:
    from hsa.training.language_model.data import LmData
    from hsa.training.options import LanguageOptions


def configure(
    options: ModelOptions, extra: Extra, hierarchy: Hierarchy, changes: Mapping[str, Any]
) -> TransformerXLConfig:
    """Return the config of the encoder for the options of a run. Any tree is read as one sequence."""
    return TransformerXLConfig(**_sizes(options, extra), segment=document_options(extra).segment)


def configure_language_model(
    data: LmData, options: ModelOptions, language: LanguageOptions, extra: Extra, changes: Mapping[str, Any]
) -> TransformerXLLanguageConfig:
    """Return the config of the language model for the options of a run. A segment is as long as another model's block."""
    return TransformerXLLanguageConfig(
        data.tokenizer.get_vocab_size(),
        **_sizes(options, extra),
        segment=language.context,
        max_length=language.max_length,
    )


def _sizes(options: ModelOptions, extra: Extra) -> dict[str, Any]:
    documents = document_options(extra)
    shared = {name: getattr(options, name) for name in ("width", "heads", "layers", "dropout")}
    return {**shared, "memory": documents.memory, "test_memory": documents.test_memory}


ENCODER = Architecture(TransformerXLConfig, TransformerXLEncoder, configure)
LANGUAGE_MODEL = LanguageArchitecture(
    TransformerXLLanguageConfig,
    TransformerXLLanguageModel,
    configure="hsa.baselines.transformer_xl.architecture:configure_language_model",
    reader="hsa.baselines.transformer_xl.streams:StreamReader",
    matched=True,
)
