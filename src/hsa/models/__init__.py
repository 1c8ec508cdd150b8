"""Models: classifiers, language models and encoder–decoders, with functions that save and load them."""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa.models.classifier import Classifier as Classifier
    from hsa.models.classifier import ModelConfig as ModelConfig
    from hsa.models.classifier import equal_parameters as equal_parameters
    from hsa.models.language_model import LanguageModel as LanguageModel
    from hsa.models.language_model import LanguageModelConfig as LanguageModelConfig
    from hsa.models.saved import load_language_model as load_language_model
    from hsa.models.saved import load_model as load_model
    from hsa.models.saved import load_seq2seq as load_seq2seq
    from hsa.models.saved import save_language_model as save_language_model
    from hsa.models.saved import save_model as save_model
    from hsa.models.saved import save_seq2seq as save_seq2seq
    from hsa.models.seq2seq import Seq2Seq as Seq2Seq
    from hsa.models.seq2seq import Seq2SeqConfig as Seq2SeqConfig

_HOMES = {
    "hsa.models.classifier": "Classifier ModelConfig equal_parameters",
    "hsa.models.language_model": "LanguageModel LanguageModelConfig",
    "hsa.models.saved": ("load_language_model load_model load_seq2seq save_language_model save_model save_seq2seq"),
    "hsa.models.seq2seq": "Seq2Seq Seq2SeqConfig",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
